"""train_distill.py: its loss against the KL over the whole vocabulary, the teacher's scores, what is refused, and runs.

pytest tests/test_distill.py            one run, with two engines
pytest tests/test_distill.py -m long    a resumed run
"""

import asyncio
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import arguments_of, cpu_only, metrics_of, timeless
from safetensors.torch import load_file

import train_distill
from trainer.errors import RunError
from trainer.learning.distill import DistillLearner, DistillLossConfig
from trainer.learning.objectives import reverse_kl, token_losses
from trainer.learning.rollout import Rollout
from trainer.rollouts.engine import EngineActor
from trainer.rollouts.options import llm_options
from trainer.rollouts.teacher import TeacherActor, differing_ends, shared_length
from trainer.run.actors import ActorGroup, LearnerActor
from trainer.run.models import Models, choose_teacher
from trainer.tasks.tiny_model import byte_tokenizer
from trainer.topologies import base, separate

TEACHER = "trainer.tasks.tiny_model:build_tiny_base"


# --- What is learned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [5, 3])
@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_expected_gradient_is_the_whole_vocabularys_kl(loss, tokens):
    """Three contexts, in each of which the student samples one of five tokens or, with --top-k 3, one of three. The
    teacher's probabilities are those among five."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5).log_softmax(-1)
    student, teacher = logits[:, :tokens].log_softmax(-1), teacher[:, :tokens]
    (expected,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    old, mask = student.detach(), torch.ones(3, tokens)
    losses, _ = token_losses(student, old, old, -reverse_kl(old, teacher, mask), mask, DistillLossConfig(loss=loss))
    (gradient,) = torch.autograd.grad((old.exp() * losses).sum(), logits)
    torch.testing.assert_close(gradient, expected)


def test_step_learns_from_each_token_and_weighted_rewards(model):
    """In a step's only update the ratio is 1: the loss is minus the mean advantage."""

    def learner(**changes):
        config = arguments_of(
            train_distill, group_size=2, max_tokens=4, learning_rate=1e-3, advantage="dr_grpo", **changes
        )
        return DistillLearner(model, config, torch.device("cpu"))

    student, distances = learner(), ([0.5, -1.0, 9.0], [2.0])  # from the teacher; a tool has answered with the third
    drafts = [Rollout([5, 6], [7, 8, 9], [], sampled=[True, True, False]), Rollout([5, 6], [10], [])]
    (logprobs,) = student.model.score_all(drafts)
    rollouts = [
        Rollout(
            draft.prompt_ids,
            draft.completion_ids,
            own[: len(far)].tolist(),
            sampled=draft.sampled,
            teacher_logprobs=np.float32(own[: len(far)] - torch.tensor(far)),
        )
        for draft, own, far in zip(drafts, logprobs, distances, strict=True)
    ]
    metrics = student.learn(rollouts)
    assert metrics["distill/reverse_kl"] == pytest.approx(1.5 / 3, abs=1e-5)
    assert metrics["loss"] == pytest.approx(1.5 / 3, abs=1e-5)
    assert metrics["grad_norm"] > 0
    assert metrics["logprobs/mismatch"] < 1e-6

    rewarded = [Rollout(**vars(rollout) | {"reward": reward}) for rollout, reward in zip(rollouts, (3, 1), strict=True)]
    assert learner().learn(rewarded)["loss"] == pytest.approx(1.5 / 3, abs=1e-5)
    # Advantages of 1 for the first two tokens, and of -1 for the last.
    assert learner(reward_coef=0.5).learn(rewarded)["loss"] == pytest.approx((1.5 - 0.5 * (2 - 1)) / 3, abs=1e-5)


# --- The teacher ------------------------------------------------------------------------------------------------------


def test_model_runner_v2_is_asked_for_completions_tokens_alone():
    """For V1, tests/test_engine.py compares the scores with those of the engine that has sampled the tokens."""

    async def generate(prompt, params, request_id, priority):
        ids, rows = prompt["prompt_token_ids"], params.prompt_logprob_token_ids
        first = params.prompt_logprob_start + 1  # row i predicts token start + i + 1, the last one is left out
        assert rows[:, 0].tolist() == ids[first:]
        assert params.max_tokens == 1
        assert params.skip_reading_prefix_cache
        output = SimpleNamespace(finish_reason="length")
        yield SimpleNamespace(prompt_token_id_logprobs=-rows.astype(np.float32), outputs=[output])

    teacher = TeacherActor(0)
    teacher.llm = SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=True), generate=generate)
    teacher.since = 0.0
    completions = [(np.int32([1, 2]), np.int32([3, 4, 5])), (np.int32([6]), np.int32([7]))]
    assert [scores.tolist() for scores in asyncio.run(teacher.score(completions))] == [[-3, -4, -5], [-7]]


def changed(folder, file, **settings):
    """The folder, with these settings in a file of JSON."""
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | settings))
    return folder


def test_teacher_with_other_token_ids_is_refused(tmp_path, model):
    def choose(name, temperature=1.0):
        return choose_teacher(tmp_path, arguments_of(train_distill, teacher=name, temperature=temperature), model)

    teacher = str(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((tmp_path / "other" / "config.json").read_text()) | {"vocab_size": 512}
    config |= {"quantization_config": {"quant_method": "fp8"}}  # as a model to learn, it would be refused
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert choose(teacher) == teacher
    with pytest.raises(RunError, match=r"^--teacher is missing"):
        choose(None)
    with pytest.raises(RunError, match=r"^--temperature 0\.7: a teacher's log-probabilities are those at 1$"):
        choose(teacher, temperature=0.7)
    with pytest.raises(RunError, match=r"^cannot load the model /no/such/model: no such folder"):
        choose("/no/such/model")
    for file, settings, message in (
        ("config.json", {"model_type": "qwen"}, r"is of the type qwen, for which .* no class \.\.\.Config; code that"),
        ("adapter_config.json", {"base_model_name_or_path": "some/model"}, "has adapters: give .* some/model, or"),
    ):
        unusable = shutil.copytree(teacher, tmp_path / file)
        (unusable / file).write_text(json.dumps(config | settings))
        with pytest.raises(RunError, match=message):
            choose(str(unusable))
    larger = str(changed(shutil.copytree(model, tmp_path / "larger"), "config.json", vocab_size=512))
    with pytest.raises(RunError, match=r"^the teacher .* has 258 embeddings, and .*larger 512, so it may sample an id"):
        choose_teacher(tmp_path, arguments_of(train_distill, teacher=model), larger)
    assert choose_teacher(tmp_path, arguments_of(train_distill, teacher=larger), model) == larger
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(teacher)
    with pytest.raises(RunError, match=r"^the teacher .* has another tokenizer than .*--teacher needs the same vocab"):
        choose(teacher)


@pytest.mark.parametrize("end", [5, [1, 5]])
def test_teacher_that_ends_a_text_with_another_token_is_named(tmp_path, model, end):
    assert differing_ends(model, model) == ""
    teacher = shutil.copytree(model, tmp_path / "teacher")
    for file in ("generation_config.json", "config.json"):  # vLLM reads the second if there is no first
        changed(teacher, file, eos_token_id=end)
    for _ in range(2):
        said = differing_ends(str(teacher), model)
        assert re.match(r"\nthe teacher ends a text with .* or .*, and the student with '[^']+': the student may", said)
        (teacher / "generation_config.json").unlink(missing_ok=True)


@pytest.mark.parametrize(("engine", "teacher", "longest"), [(64, 128, 64), (64, 64, 63), (64, 32, 31)])
def test_teacher_too_short_for_the_students_texts_is_refused(engine, teacher, longest):
    """A teacher samples a token itself, for which there has to be room."""
    remark = lambda limit, tokens: "" if 20 + tokens <= limit else "it ends before"  # noqa: E731
    task = SimpleNamespace(check_lengths=lambda limit: None, length_remark=remark)
    assert shared_length(task, engine, teacher, longest - 20) == longest
    if longest == engine:
        assert shared_length(task, engine, teacher, longest) == longest
    else:
        with pytest.raises(RunError, match=rf"^the teacher scores {longest} tokens, .* lower --max-tokens"):
            shared_length(task, engine, teacher, longest - 19)


@pytest.fixture
def placed(monkeypatch):
    """The topology on so many GPUs, and the number of bundles that it has reserved."""

    def place(gpus, **arguments):
        reserved = []
        monkeypatch.setattr(separate.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": float(gpus)})
        monkeypatch.setattr(separate, "reserve", lambda bundles, _: reserved.extend(bundles))
        monkeypatch.setattr(separate, "by_node", lambda _: list(range(len(reserved))))
        args = arguments_of(train_distill, **arguments)
        session = SimpleNamespace(wait=lambda phase, *groups: [[*calls.values()] for calls in groups])
        task = SimpleNamespace(args=args.task, eval_rows=[])
        return train_distill.BesideTeacher(args, task, None, session), len(reserved)

    return place


def test_teacher_has_its_own_gpus_or_half_of_the_engines(placed):
    def places(gpus, **arguments):
        """The number of bundles, the engine's share of memory, and the workers of trainers, engines and teachers."""
        topology, reserved = placed(gpus, **arguments)
        seats = topology.trainer_seats, topology.engine_seats, topology.teacher_seats
        assert {seat.options["num_gpus"] for seat in topology.engine_seats + topology.teacher_seats} <= {0, 0.5}
        assert topology.remark.startswith("engines and teacher share GPUs: ") == (topology.memory_share == 0.4)
        return reserved, topology.memory_share, *([seat.bundles for seat in each] for each in seats)

    two_by_two = {"teacher_engines": 2, "teacher_tensor_parallel_size": 2}
    assert places(3) == (3, 0.8, [[0]], [[1]], [[2]])
    assert places(2) == (2, 0.4, [[0]], [[1]], [[1]])
    assert places(7, engines=2, **two_by_two) == (7, 0.8, [[0]], [[1], [2]], [[3, 4], [5, 6]])
    assert places(6, engines=2, **two_by_two) == (5, 0.4, [[0]], [[1], [2]], [[1, 2], [3, 4]])
    assert places(3, tensor_parallel_size=2) == (3, 0.4, [[0]], [[1, 2]], [[2]])
    with pytest.raises(RunError, match=r"wants 2 GPUs, 1 for the trainer and 1 that engines and teacher share, .* 1$"):
        places(1)
    assert placed(5)[0].remark == "2 GPUs stay unused: --trainers and --engines take more"


def test_without_gpus_teachers_have_the_engines_bundles(placed):
    topology, reserved = placed(0, trainers=2, engines=2, teacher_engines=3)
    assert reserved == 4
    assert topology.remark.startswith("no GPU: the trainer and a TP=1 engine run on CPU, with gloo")
    strategies = [seat.options["scheduling_strategy"] for seat in topology.engine_seats + topology.teacher_seats]
    assert [strategy.placement_group_bundle_index for strategy in strategies] == [2, 3, 2, 3, 2]


@pytest.mark.parametrize(("gpus", "share"), [(3, 0.8), (2, 0.4)])
def test_teacher_starts_first_does_not_decode_and_is_no_engine_of_a_sync(placed, monkeypatch, gpus, share):
    """On a GPU that it may share, beside the student's engines, whose KV cache is of their own share."""
    answers, started = {"trainer": (3, "remarks"), "engine": 64, "teacher": 128}, []

    class Group(ActorGroup):
        def __init__(self, session, name, cls, seats):
            self.session, self.seats = session, {name: seats[0]}

        def begin(self, method, *args, each=None):
            started.extend((name, *args) for name in self.seats if method is EngineActor.start)
            return {name: answers[name] for name in self.seats}

        def call(self, phase, method, *args, **each):
            answer = {LearnerActor.gpu: SimpleNamespace(memory=80e9), LearnerActor.address: ("127.0.0.1", 1)}.get(
                method
            )
            return [answer] if answer else super().call(phase, method, *args, **each)

    for module in (base, train_distill):
        monkeypatch.setattr(module, "ActorGroup", Group)
    size = SimpleNamespace(kv_cache_bytes=lambda memory, workers: memory / 2)
    monkeypatch.setattr(base, "ModelSize", SimpleNamespace(of=lambda model: size))
    topology, _ = placed(gpus)
    topology.teacher = "teacher"
    topology.start_actors(train_distill.Trainer, "student")
    assert topology.start(Models("student", "student", None)) == (3, "remarks", 64)
    assert topology.teacher_max_model_len == 128
    asked = []
    for name, model, engine, setting, _ in started:
        options, _ = llm_options(replace(engine, exact="off"), model, setting, [1])
        names = "worker_extension_cls", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes"
        asked.append((name, model, *map(options.get, names)))
    assert asked == [
        ("teacher", "teacher", None, True, share, None),
        ("engine", "student", "rlhf_utils.WorkerExtension", None, share, share * 80e9 / 2),
    ]


# --- Runs -------------------------------------------------------------------------------------------------------------


def run_four_steps(script, tmp_path):
    flags = "--teacher", TEACHER, "--dataset", "trainer.tasks.uppercase:prompts", "--eval-share", 0.25
    run = script("train_distill.py", *flags, "--steps", 4, "--save-every", 2, "--output", "run")
    return run.finish(), tmp_path / "run"


@pytest.mark.slow
@cpu_only
def test_student_comes_closer_to_its_teacher_without_any_reward(script, tmp_path):
    text, run = run_four_steps(script, tmp_path)
    assert text.splitlines()[-1].startswith("OK: reverse KL "), text
    assert "reward: none\n" in text
    assert "nothing is learned" not in text
    metrics = metrics_of(run)
    assert metrics[0]["distill/reverse_kl"] > metrics[-1]["distill/reverse_kl"] + 0.1
    assert max(row["logprobs/mismatch"] for row in metrics) < 1e-5
    assert all(row["time/score"] > 0 for row in metrics)
    assert "advantage" not in json.loads((run / "completions.jsonl").read_text().splitlines()[0])
    weights = [load_file(run / name / "model.safetensors") for name in ("teacher", "checkpoint-000004")]
    assert not all(tensor.equal(weights[1][name]) for name, tensor in weights[0].items())


@cpu_only
@pytest.mark.long
def test_resumed_run_goes_on_bit_for_bit(script, tmp_path):
    _, whole = run_four_steps(script, tmp_path)
    run = shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(run / "checkpoint-000004")  # as if it had been killed before
    text = script("train_distill.py", "--resume", "resumed").finish()
    assert text.splitlines()[-1].startswith("OK: reverse KL "), text
    assert timeless(whole) == timeless(run)
    ours, theirs = (load_file(folder / "checkpoint-000004" / "model.safetensors") for folder in (run, whole))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
