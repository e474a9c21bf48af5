"""Which models a run starts or continues from, and how it writes checkpoints."""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import RunError
from ..functions import named_function
from ..learning.config import OptimizerConfig
from ..learning.lora import adapted_model, check_adapters
from ..learning.multimodal import is_multimodal, load_tokenizer
from ..learning.sharding import wait_for_ranks
from .arguments import RunArguments

DEFAULT_MODEL = "facebook/opt-125m"
BUILTIN_MODEL = "trainer.tasks.tiny_model:build_tiny_model"
BUILTIN_BASE = "trainer.tasks.tiny_model:build_tiny_base"  # with --lora-rank
BUILTIN_LEARNING_RATE = 3e-3
CHECKPOINTS_KEPT = 2
CRITIC = "critic"  # the critic's folder in a checkpoint
CLASSES = {"--reward-model": "ForSequenceClassification", "--teacher": "Config"}  # a teacher is vLLM's alone


@dataclass(frozen=True)
class Models:
    """The models of a run: names on the hub, or folders."""

    initial: str  # what the run began with when it was new
    loaded: str  # what trainer and engine load: `initial` or, with --resume, a checkpoint that is a whole model
    checkpoint: Path | None  # what --resume goes on from


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """If a write to the folder fails because of the disk, raise the disk's error, such as "No space left on device".

    Libraries hide it: torch.save says "unexpected pos 2929408 vs 2929296".
    """
    try:
        yield
    except Exception as error:
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(1 << 20))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as cause:
            raise OSError(cause.errno, cause.strerror, str(folder)) from error
        raise


def write_checkpoint(run_folder: Path, step: int, save: Callable[[Path], None], rank: int = 0) -> Path:
    """Write a checkpoint with `save(folder)`, and remove old ones. All ranks call this. Returns the folder."""
    new_checkpoint(run_folder, step, rank)
    return end_checkpoint(run_folder, step, save, rank)


def end_checkpoint(run_folder: Path, step: int, save: Callable[[Path], None], rank: int = 0) -> Path:
    """As `write_checkpoint`, in the folder that `new_checkpoint` has made.

    The folder gets its final name last, so a kill at any moment leaves a whole checkpoint.
    """
    final, unfinished = run_folder / f"checkpoint-{step:06d}", run_folder / f"unfinished-{step:06d}"
    with disk_errors(run_folder):
        save(unfinished)
    wait_for_ranks()
    if rank == 0:
        with disk_errors(run_folder):
            for path in [*unfinished.rglob("*"), unfinished]:
                flush_to_disk(path)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        flush_to_disk(run_folder)
        for old in checkpoints(run_folder)[:-CHECKPOINTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)  # on NFS, a file that somebody reads stays until the next time
    return final


def new_checkpoint(run_folder: Path, step: int, rank: int = 0) -> Path:
    """Have rank 0 make the empty folder of a checkpoint, which all ranks return. Raises RunError on a rank that does
    not see it."""
    folder = run_folder / f"unfinished-{step:06d}"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        with disk_errors(run_folder):
            folder.mkdir(parents=True)
    wait_for_ranks()
    if not folder.is_dir():
        raise RunError(
            f"{folder} is not on this node: all ranks write their parts of a checkpoint, so --output must be on a disk"
            " that their nodes share"
        )
    return folder


def checkpoints(run_folder: Path) -> list[Path]:
    """The checkpoints that a run has left there, in order. A user's own copies have other names."""
    return sorted(run_folder.glob(f"checkpoint-{'[0-9]' * 6}"))


def last_checkpoint(run_folder: Path, of_model: str) -> Path:
    """The newest checkpoint. Raises RunError if there is none, or if it is of another model than `of_model`."""
    if not checkpoints(run_folder):
        raise RunError(f"{run_folder} has no checkpoint to continue from")
    last = checkpoints(run_folder)[-1]
    model = str(adapted_model(last) or last)
    if not is_gone(model) and (sizes := check_model(model)) != (expected := check_model(of_model)):
        raise RunError(f"{last} is a checkpoint of another model than {of_model}: {sizes}, {expected}")
    return last


def is_gone(model: str) -> bool:
    """Whether this is a folder that has moved."""
    return os.path.isabs(model) and not os.path.exists(model)


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
    if args.resume and is_gone(name):
        if config.lora_rank or arguments.loss.kl_coef or arguments.loss.loss == "ppo":  # PPO always has a reference
            raise RunError(f"the model that this run began with is no longer at {name}: --model says where it is now")
        name = str(max(checkpoints(run_folder), default=name))
    initial = load_or_make(name, run_folder / "model", args)
    checkpoint = last_checkpoint(run_folder, of_model=initial) if args.resume else None
    if checkpoint:
        check_adapters(checkpoint, config)
        if (done := int(checkpoint.name.rpartition("-")[2])) >= args.steps:
            raise RunError(f"that run has done its {done} steps: ask for more with --steps")
    check_nodes(args, device, initial, str(checkpoint or initial))
    return Models(initial, initial if config.lora_rank else str(checkpoint or initial), checkpoint), optimizer


def choose_ppo_models(
    run_folder: Path, arguments, device: str, is_chat: bool = False
) -> tuple[dict[str, str], dict[str, Path], OptimizerConfig]:
    """Returns the model that each actor of train_ppo.py loads, by the actor's name; the folders whose training state
    trainer and critic go on from, by the same names; and the optimizer's config, as `choose_models` does.

    The critic is that of the checkpoint, if it has one, or `--critic-model`, or the initial policy. With --lora-rank,
    policy and critic have adapters: the checkpoint has only those, and the policy without them is the reference. A
    reward model that a function makes is in the run's folder. Raises RunError for models that do not fit each other, or
    prompts that are chat messages (`is_chat`).
    """
    models, optimizer = choose_models(run_folder, arguments, device)
    args, config, reward_model = arguments.run, arguments.model, arguments.rewards.reward_model
    critic = arguments.critic_model or models.initial
    states = {"trainer": models.checkpoint} if models.checkpoint else {}
    if models.checkpoint and (models.checkpoint / CRITIC).is_dir():
        states["critic"] = models.checkpoint / CRITIC
        check_adapters(states["critic"], config)
        critic = critic if config.lora_rank else str(states["critic"])
    check_critic(critic, models.loaded)
    if reward_model:
        reward_model = load_or_make(reward_model, run_folder / "reward_model", args, "--reward-model")
        check_reward_model(reward_model, is_chat)
    check_nodes(args, device, critic, reward_model)
    reference = None if config.lora_rank else models.initial
    paths = {"trainer": models.loaded, "critic": critic, "reference": reference, "reward_model": reward_model}
    return {name: path for name, path in paths.items() if path}, states, optimizer


def choose_teacher(run_folder: Path, arguments, model: str, device: str) -> str:
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
    check_nodes(args, device, path)
    return path


def load_or_make(name: str, folder: Path, args: RunArguments, flag: str = "--model") -> str:
    """The model to load: this one or, if `name` is module:function, the one that the function makes in this folder.

    A run to resume has it there already. Raises RunError as `check_model` does.
    """
    model = name
    if re.fullmatch(r"[\w.]+:\w+", name):
        model = str(folder)
        if not (args.resume and folder.is_dir()):
            named_function(flag, name)(model, args.seed)
    check_model(model, CLASSES.get(flag, "ForCausalLM"))
    return model


def check_nodes(args: RunArguments, device: str, *models: str | None) -> None:
    """Raise RunError if a node of the cluster, where Ray may place trainer or engine, lacks one of these folders."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    folders = sorted({model for model in models if model and os.path.isdir(model)})
    if not args.ray_address or not folders:
        return
    resource = "GPU" if device == "cuda" else "CPU"
    find_missing = ray.remote(lambda: [folder for folder in folders if not os.path.isdir(folder)])
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)]
    calls = []
    for node in nodes:
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls.append(find_missing.options(num_cpus=0, scheduling_strategy=on_node).remote())
    for node, missing in zip(nodes, ray.get(calls, timeout=60), strict=True):
        if missing:
            raise RunError(
                f"{missing[0]} is not on the node {node['NodeManagerAddress']}: on a cluster, a model's folder, and the"
                " --output of a run to --resume, must be on every node at the same path, or on a disk that all share"
            )


def check_model(model: str, needs: str = "ForCausalLM") -> dict:
    """Returns the sizes that tell two models apart. Raises RunError if transformers cannot load its configuration,
    tokenizer or processor, or if it cannot be trained with the class that it `needs`; a "Config" only has to load."""
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
    names = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    sizes = config.get_text_config().to_dict()
    return {name: sizes.get(name) for name in names}


def _problem(model: str, needs: str) -> str:
    """Why a model cannot be used with the class that it `needs`, as its configuration says; "" if it can."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig
    from transformers.models.auto import modeling_auto as auto
    from transformers.utils import find_adapter_config_file

    if adapters := find_adapter_config_file(model):
        base = adapted_model(Path(adapters).parent)
        return f"has adapters: give the model that they adapt, {base}, or merge them into it"
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


def check_critic(critic: str, model: str) -> None:
    """Raise RunError if the critic cannot read all that this model may sample."""
    check_model(critic, "ForSequenceClassification")
    check_vocabulary(f"the critic {critic}", critic, model, "--critic-model")


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


def check_reward_model(path: str, is_chat: bool = False) -> None:
    """Raise RunError for a model without a head of one output, whose tokenizer has more tokens than it embeds, or that
    has no template for prompts that are chat messages."""
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
    if is_chat and not tokenizer.chat_template:
        raise RunError(f"the reward model {path} has no chat template, and the prompts are chat messages")


def first_line(error: Exception) -> str:
    """Of an error's text; the name of an error without one."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: a kill at any moment leaves either the old text or the new one."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    flush_to_disk(unfinished)
    unfinished.rename(path)


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
