"""The models beside the policy: a critic's value head, and a reward model.

Both are transformers' sequence classifiers with one output: a trunk and a linear `score` head. A reward model's head
reads the last token's hidden state. A critic's head reads every one, so that a reward model can begin a critic.
"""

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method

from .arguments import RunArguments
from .checkpoint import check_model, check_nodes, choose_models, load_or_make
from .errors import RunError
from .learner import Learner, Rollout, choose_attention
from .lora import check_adapters


class Scorer(Learner):
    """A learner, or one rank of it, that also gives scores of all tokens of all rollouts at once."""

    @torch.no_grad()
    def _of_all(self, rollouts: list[Rollout], width: int, score: Callable) -> torch.Tensor:
        """What score(rollouts, width), shaped [b, width], gives for each of B rollouts: [B, width], on the CPU."""
        parts, _, mine, numbers = self._share(
            rollouts, [True] * len(rollouts), torch.arange(1, len(rollouts) + 1, device=self.device)
        )
        scores = torch.zeros(len(rollouts) + 1, width, device=self.device)  # row 0: of the ranks' fillers
        with self._computing(self.model):
            for part in parts:
                scores[numbers[part]] = score(mine[part], width)
        if self.ranks > 1:
            dist.all_reduce(scores)
        return scores[1:].cpu()

    def logprobs(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Log-probabilities [B, T] of the completions' tokens, right-padded with zeros, on the CPU."""
        return self._of_all(rollouts, longest(rollouts), lambda *part: self.token_logprobs(*part)[0])


class Classifier(Scorer):
    """A sequence classifier with one output."""

    new_head = "score"  # as transformers calls it in every causal model's classifier
    may_lack_head = False  # a checkpoint to begin with

    def _from_pretrained(self, path: str):
        from transformers import AutoModelForSequenceClassification

        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=torch.float32, attn_implementation=self.config.attention, output_loading_info=True
        )
        if missing := sorted(report["missing_keys"]):
            if missing != [f"{self.new_head}.weight"] or not self.may_lack_head:
                raise RunError(f"{path} lacks {missing[0]}, so it is no {type(model).__name__}")
            torch.nn.init.zeros_(model.score.weight)  # all values begin at 0
        return model

    def _examine(self, model) -> None:
        self.attention = choose_attention(model.base_model, self.config.attention)

    def _needs_bound(self) -> bool:
        return False  # no engine computes what it does

    def _add_scores(self, model) -> None:
        model.token_scores = partial(_token_values, model)
        register_fsdp_forward_method(model, "token_scores")  # it gathers the weights around it


def _token_values(model, ids: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor]:
    """Values [N] of the states in which tokens of ids [B, S] were chosen: of what comes before each of them.

    `places` [N] are the tokens' positions in `ids.flatten()`. As in logprobs.py, right-padding needs no mask.
    """
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return (model.score(states.flatten(0, 1)[places - 1])[:, 0].float(),)


class RewardScorer(Classifier):
    """A reward model, or one rank of it. It reads text with its own tokenizer, so its vocabulary may be another
    than the policy's."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.tokenizer.truncation_side = "left"  # the end is what is scored

    def score(self, prompts: list, completions: list) -> list[float]:
        """A score of each completion, text or chat messages, after its prompt."""
        room = getattr(self.model.config, "max_position_embeddings", None)
        room = room and min(room, self.tokenizer.model_max_length)  # of 514 positions, RoBERTa has two for padding
        texts = [self._text(*pair) for pair in zip(prompts, completions, strict=True)]
        rows = [
            self.tokenizer(text, add_special_tokens=isinstance(prompt, str), truncation=bool(room), max_length=room)
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        rollouts = [Rollout(row["input_ids"] or [self.tokenizer.eos_token_id], [], [], None) for row in rows]
        return self._of_all(rollouts, 1, lambda part, _: self._last_scores(part)).flatten().tolist()

    def _text(self, prompt: str | list[dict], completion: str | list[dict]) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)

    def _last_scores(self, rollouts: list[Rollout]) -> torch.Tensor:
        pad = torch.nn.utils.rnn.pad_sequence
        rows = [torch.tensor(rollout.prompt_ids, device=self.device) for rollout in rollouts]
        ends = {rollout.prompt_ids[-1] for rollout in rollouts}
        # transformers scores the last token that is not this one, be it padding or not.
        padding = next(token for token in itertools.count() if token not in ends)
        self.model.config.get_text_config().pad_token_id = padding
        ids = pad(rows, batch_first=True, padding_value=padding)
        mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
        with self._autocast():
            return self.model(input_ids=ids, attention_mask=mask).logits.float()


def longest(rollouts: list[Rollout]) -> int:
    """T: the tokens of the longest completion."""
    return max(len(rollout.completion_ids) for rollout in rollouts)


def choose_ppo_models(run_folder: Path, args: RunArguments, device: str) -> tuple[dict[str, str], dict[str, Path]]:
    """What each actor loads, by name, and the folders whose training state trainer and critic go on from.

    The policy is as in `choose_models`. The critic is that of the checkpoint, if it has one, or `--critic-model`, or
    the initial policy. Both may have adapters: then the checkpoint has those alone, and the policy without them is the
    reference. A reward model that is a function's to make is made in the run's folder. Raises RunError for models that
    do not fit.
    """
    if args.kl_target and not args.kl_coef:
        raise RunError("--kl-target multiplies --kl-coef, which is 0 and stays so: give it a start above 0")
    models = choose_models(run_folder, args, device)
    critic, reward_model = args.critic_model or models.initial, args.reward_model
    states = {"trainer": models.checkpoint} if models.checkpoint else {}
    if models.checkpoint and (models.checkpoint / "critic").is_dir():
        states["critic"] = models.checkpoint / "critic"
        check_adapters(states["critic"], args)
        critic = critic if args.lora_rank else str(states["critic"])
    check_critic(critic, models.loaded)
    if reward_model:
        reward_model = load_or_make(reward_model, run_folder / "reward_model", args, "--reward-model")
        check_reward_model(reward_model)
    if args.ray_address:
        folders = [path for path in (critic, reward_model) if path and os.path.isdir(path)]
        check_nodes(folders, "GPU" if device == "cuda" else "CPU")
    reference = None if args.lora_rank else models.initial
    paths = {"trainer": models.loaded, "critic": critic, "reference": reference, "reward_model": reward_model}
    return {name: path for name, path in paths.items() if path}, states


def check_critic(critic: str, model: str) -> None:
    """Raise RunError if the critic does not read the tokens of this model."""
    from transformers import AutoTokenizer

    check_model(critic)
    vocabularies = [AutoTokenizer.from_pretrained(path).get_vocab() for path in (critic, model)]
    if vocabularies[0] != vocabularies[1]:
        raise RunError(
            f"the critic {critic} has another tokenizer than {model}: it reads the policy's tokens, so --critic-model"
            " needs the same vocabulary"
        )


def check_reward_model(path: str) -> None:
    """Raise RunError for a model without a head of one output, or with fewer embeddings than tokens."""
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    kind = (config.architectures or ["?"])[0]
    if not kind.endswith("ForSequenceClassification"):
        raise RunError(f"the reward model {path} is a {kind}: a ...ForSequenceClassification with one output is wanted")
    if config.num_labels != 1:
        raise RunError(f"the reward model {path} has {config.num_labels} outputs: one is wanted")
    largest, rows = max(tokenizer.get_vocab().values()), config.get_text_config().vocab_size
    if largest >= rows:
        raise RunError(
            f"the reward model {path} has the tokenizer of another vocabulary: token {largest}, and {rows} embeddings"
        )
