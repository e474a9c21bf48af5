"""The models beside the policy: that of a critic, which gives values, and a reward model.

Both are transformers' sequence classifiers with one output: a trunk and a linear `score` head. A reward model's head
reads the last token's hidden state, a critic's head every token's. So a critic can begin as a reward model.
"""

import itertools
from functools import partial

import torch

from ..errors import RunError
from .attention import choose_attention
from .model import Model
from .rollout import Rollout
from .sharding import add_method, load_model


class ValueModel(Model):
    """A sequence classifier with one output. Its score of a token is the value of the state before it."""

    new_head = "score"  # as transformers calls it in every causal model's classifier
    has_engine = False
    may_lack_head = True  # whether its checkpoint may be a policy's

    def score(self, rollouts: list[Rollout], width: int) -> tuple[torch.Tensor]:
        """Values [b, width] of the states before the tokens that the policy sampled, and zeros elsewhere, for one
        micro-batch of b rollouts."""
        return self.score_tokens(self.module.values, rollouts, width)

    def _from_pretrained(self, path: str, **loading: bool):
        from transformers import AutoConfig, AutoModelForSequenceClassification

        config = AutoConfig.from_pretrained(path, num_labels=1)
        module, missing = load_model(AutoModelForSequenceClassification, path, config, self.device, **loading)
        if missing:
            if missing != [f"{self.new_head}.weight"] or not self.may_lack_head:
                raise RunError(f"{path} lacks {missing[0]}, so it is no {type(module).__name__}")
            torch.nn.init.zeros_(module.score.weight)  # so that all values begin at 0
        add_method(module, "values", token_values)
        return module

    def _choose_computation(self, module) -> None:
        self.attention = choose_attention(module, partial(_hidden_states, module))


def _hidden_states(module, input_ids: torch.Tensor) -> torch.Tensor:
    """The states of sequences [B, S], one at a time: the classifier looks for padding in several."""
    outputs = [module(input_ids=row[None], output_hidden_states=True, use_cache=False) for row in input_ids]
    return torch.cat([output.hidden_states[-1] for output in outputs])


def token_values(
    module, inputs: dict[str, torch.Tensor], targets: torch.Tensor, states_at: torch.Tensor
) -> tuple[torch.Tensor]:
    """Values [N] of the states at the positions `states_at` [N], as in `logprobs.token_scores`: of the states that
    predict the targets [N]."""
    states = module.base_model(**inputs, use_cache=False).last_hidden_state
    return (module.score(states.flatten(0, 1)[states_at])[:, 0].float(),)


class RewardModel(ValueModel):
    """A reward model, or one rank of it. It reads text with its own tokenizer, whose vocabulary need not be the
    policy's."""

    may_lack_head = False

    def rewards(self, prompts: list, completions: list) -> list[float]:
        """The score of each completion after its prompt. Both are texts or lists of chat messages."""
        self.tokenizer.truncation_side = "left"  # the end is what is scored
        max_length = getattr(self.module.config, "max_position_embeddings", None)
        if max_length:
            table = getattr(getattr(self.module.base_model, "embeddings", None), "position_embeddings", None)
            padding = getattr(table, "padding_idx", None)  # RoBERTa's first token is at the position after it
            reserved = 0 if padding is None else padding + 1
            max_length = min(max_length - reserved, self.tokenizer.model_max_length)
        rollouts = []
        for prompt, completion in zip(prompts, completions, strict=True):
            encoded = self.tokenizer(
                self._text(prompt, completion),
                add_special_tokens=isinstance(prompt, str),  # a chat template has its own
                truncation=bool(max_length),
                max_length=max_length,
            )
            rollouts.append(Rollout([], encoded["input_ids"] or [self.tokenizer.eos_token_id], []))
        (scores,) = self.score_all(rollouts)
        return scores[:, 0].tolist()

    def score(self, rollouts: list[Rollout], width: int) -> tuple[torch.Tensor]:
        """The scores of b texts, which are completions without a prompt: the first column of a tensor [b, width]."""
        pad = torch.nn.utils.rnn.pad_sequence
        rows = [torch.tensor(rollout.completion_ids, device=self.device) for rollout in rollouts]
        ends = {rollout.completion_ids[-1] for rollout in rollouts}
        # transformers scores the last token that is not the padding token: take one with which no text ends.
        padding = next(token for token in itertools.count() if token not in ends)
        self.module.config.get_text_config().pad_token_id = padding
        ids = pad(rows, batch_first=True, padding_value=padding)
        mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
        with self.autocast():
            scores = self.module(input_ids=ids, attention_mask=mask).logits.float()
        return (torch.nn.functional.pad(scores, (0, width - 1)),)

    def _text(self, prompt: str | list[dict], completion: str | list[dict]) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        *before, last = prompt
        if last["role"] == "assistant":  # the completion continues this message
            prompt, completion = before, [last | {"content": last["content"] + completion[0]["content"]}]
        return self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
