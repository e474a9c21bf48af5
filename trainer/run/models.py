"""Which models a run starts or continues from, and whether they can be used."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import RunError
from ..functions import named_function
from ..learning.config import OptimizerConfig
from ..learning.lora import adapted_model, check_adapters
from ..learning.multimodal import is_multimodal, load_tokenizer
from .arguments import RunArguments
from .checkpoint import CRITIC, last_checkpoint

DEFAULT_MODEL = "facebook/opt-125m"
BUILTIN_MODEL = "trainer.tasks.tiny_model:build_tiny_model"
BUILTIN_BASE = "trainer.tasks.tiny_model:build_tiny_base"  # with --lora-rank
BUILTIN_LEARNING_RATE = 3e-3
CLASSES = {"--reward-model": "ForSequenceClassification", "--teacher": "Config"}  # a teacher is vLLM's alone


@dataclass(frozen=True)
class Models:
    """The models of a run: names on the hub, or folders."""

    initial: str  # what the run began with when it was new
    loaded: str  # what trainer and engine load: `initial` or, with --resume, a checkpoint that is a whole model
    checkpoint: Path | None  # what --resume goes on from


def choose_models(run_folder: Path, arguments, device: str) -> tuple[Models, OptimizerConfig]:
    """The models of a new run, or of the one to resume, by a script's `Arguments`, and their `optimizer` with the
    model's learning rate.

    Without --model, a run on CPU gets the built-in model, with its own learning rate unless one is given. A model that
    a function makes is in the run's folder. Raises RunError if a model cannot be loaded, or if the run to resume has no
    checkpoint or no steps left.
    """
    args, config, optimizer = arguments.run, arguments.model, arguments.optimizer
    name = args.model or DEFAULT_MODEL
    built_in = (run_folder / "model").is_dir() if args.resume else device == "cpu"
    if args.model is None and built_in:
        name = BUILTIN_BASE if config.lora_rank else BUILTIN_MODEL
        optimizer = replace(optimizer, learning_rate=optimizer.learning_rate or BUILTIN_LEARNING_RATE)
    initial = load_or_make(name, run_folder / "model", args)
    checkpoint = last_checkpoint(run_folder) if args.resume else None
    if checkpoint:
        check_adapters(checkpoint, config)
        if (done := int(checkpoint.name.rpartition("-")[2])) >= args.steps:
            raise RunError(f"that run has done its {done} steps: ask for more with --steps")
    return Models(initial, initial if config.lora_rank else str(checkpoint or initial), checkpoint), optimizer


def choose_ppo_models(
    run_folder: Path, arguments, device: str
) -> tuple[dict[str, str], dict[str, Path], OptimizerConfig]:
    """Returns the model that each actor of train_ppo.py loads, by the actor's name; the folders whose training state
    trainer and critic go on from, by the same names; and the optimizer's config, as `choose_models` does.

    The critic is that of the checkpoint, if it has one, or `--critic-model`, or the initial policy. With --lora-rank,
    policy and critic have adapters: the checkpoint has only those, and the policy without them is the reference. A
    reward model that a function makes is in the run's folder. Raises RunError for models that do not fit each other.
    """
    models, optimizer = choose_models(run_folder, arguments, device)
    args, config, reward_model = arguments.run, arguments.model, arguments.rewards.reward_model
    critic = arguments.critic_model or models.initial
    states = {"trainer": models.checkpoint} if models.checkpoint else {}
    if models.checkpoint and (models.checkpoint / CRITIC).is_dir():
        states["critic"] = models.checkpoint / CRITIC
        check_adapters(states["critic"], config)
        critic = critic if config.lora_rank else str(states["critic"])
    check_model(critic, "ForSequenceClassification")
    check_vocabulary(f"the critic {critic}", critic, models.loaded, "--critic-model")
    if reward_model:
        reward_model = load_or_make(reward_model, run_folder / "reward_model", args, "--reward-model")
        check_reward_model(reward_model)
    reference = None if config.lora_rank else models.initial
    paths = {"trainer": models.loaded, "critic": critic, "reference": reference, "reward_model": reward_model}
    return {name: path for name, path in paths.items() if path}, states, optimizer


def choose_teacher(run_folder: Path, arguments, model: str) -> str:
    """The teacher of train_distill.py: a name on the hub, or a folder, which is the run's if a function makes it.

    Raises RunError if there is none, if it cannot be loaded or cannot read all that this model may sample, or if the
    student would sample at another temperature than the teacher's log-probabilities have.
    """
    args, teacher, temperature = arguments.run, arguments.teacher.teacher, arguments.sampling.temperature
    if not teacher:
        raise RunError("--teacher is missing: which model is the student to learn from?")
    if temperature != 1:
        raise RunError(f"--temperature {temperature:g}: a teacher's log-probabilities are those at 1")
    path = load_or_make(teacher, run_folder / "teacher", args, "--teacher")
    check_vocabulary(f"the teacher {teacher}", path, model, "--teacher")
    return path


def load_or_make(name: str, folder: Path, args: RunArguments, flag: str = "--model") -> str:
    """The model to load: this one or, if `name` is module:function, the one that the function makes in this folder.

    A run to resume has it there already. Raises RunError as `check_model` does.
    """
    model = name
    if re.fullmatch(r"[\w.]+:\w+", name):
        model = str(folder)
        if not (args.resume and folder.is_dir()):
            print(f"{name} makes a model in {model}", flush=True)  # which may take minutes
            named_function(flag, name)(model, args.seed)
    check_model(model, CLASSES.get(flag, "ForCausalLM"))
    return model


def check_model(model: str, needs: str = "ForCausalLM") -> None:
    """Raise RunError if transformers cannot load this model's configuration, tokenizer or processor, or if it cannot be
    trained with the class that it `needs`; a "Config" only has to load."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    try:
        problem = _problem(model, needs)
        # Otherwise, this and the tokenizer could ask on the screen whether to run code that comes with the model.
        config = None if problem else AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers and its hub client raise different errors by version
        folder = "no such folder, and the hub has none" if not Path(model).exists() else "not a model's folder"
        raise RunError(f"cannot load the model {model}: {folder} ({first_line(error)})") from error
    if problem:
        raise RunError(f"the model {model} {problem}")
    needed = {"tokenizer": AutoTokenizer}
    if is_multimodal(config.model_type):
        needed["processor, without which vLLM serves no text either,"] = AutoProcessor
    for what, auto_class in needed.items():
        try:
            auto_class.from_pretrained(model, trust_remote_code=False)
        except Exception as error:
            raise RunError(f"cannot load the {what} of {model} ({first_line(error)})") from error


def _problem(model: str, needs: str) -> str:
    """Why a model cannot be used with the class that it `needs`, as its configuration says; "" if it can."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig
    from transformers.models.auto import modeling_auto as auto
    from transformers.utils import find_adapter_config_file

    if adapters := find_adapter_config_file(model):
        return f"has adapters: give what they adapt, {adapted_model(Path(adapters).parent)}, or merge them into it"
    config, _ = PreTrainedConfig.get_config_dict(model)
    if needs != "Config" and (quantized := config.get("quantization_config")):
        return f"is quantized ({quantized.get('quant_method')}): give the unquantized model"
    classes = {
        "Config": CONFIG_MAPPING,
        "ForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        "ForSequenceClassification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    if (kind := config.get("model_type")) and kind not in classes[needs]:
        return (
            f"is of the type {kind}, for which transformers has no class ...{needs}; code that comes with a model"
            " (trust_remote_code) is never run"
        )
    return ""


def check_vocabulary(name: str, path: str, model: str, flag: str) -> None:
    """Raise RunError if the tokenizer at this path has other token ids than this model's, or if the model there embeds
    fewer ids, since this model may sample each that it embeds. (Qwen2.5's 7B has more than its 0.5B, as padding.)"""
    from transformers import AutoConfig, AutoTokenizer

    vocabularies = [AutoTokenizer.from_pretrained(each).get_vocab() for each in (path, model)]
    if vocabularies[0] != vocabularies[1]:
        raise RunError(
            f"{name} has another tokenizer than {model}: it reads the policy's tokens, so {flag} needs the same"
            " vocabulary"
        )
    rows, sampled = (AutoConfig.from_pretrained(each).get_text_config().vocab_size for each in (path, model))
    if rows < sampled:
        raise RunError(
            f"{name} has {rows} embeddings, and {model} {sampled}, so it may sample an id that {name} cannot read:"
            f" resize_token_embeddings({rows}) of transformers removes the padding of {model}"
        )


def check_reward_model(path: str) -> None:
    """Raise RunError for a model without a head of one output, or whose tokenizer has more tokens than it embeds."""
    from transformers import AutoConfig

    config, (tokenizer, _) = AutoConfig.from_pretrained(path), load_tokenizer(path)
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


def first_line(error: Exception) -> str:
    """Of an error's text; the name of an error without one."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
