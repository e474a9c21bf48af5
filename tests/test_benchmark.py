"""The benchmarks: every way is timed and leaves exactly the weights that a reload does; what they make of faults.

pytest tests/test_benchmark.py
"""

import asyncio
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import psutil
import pytest
import ray
import torch
from conftest import ROOT, arguments_of, cpu_only
from learners import chat_tokenizer
from pair import gpus

from rlhf_utils import WeightSyncError
from trainer.errors import RunError
from trainer.tasks.tiny_model import build_tiny_model

CEILINGS = {"nccl": "raw broadcast", "ipc": "device copy"}
NATIVE = ["vLLM native, unpacked", "vLLM native, packed"]


@pytest.fixture
def sync(monkeypatch):
    """The benchmark's module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import sync

    return sync


def assert_every_way_is_exact(run, expected):
    results = json.loads((run / "sync.json").read_text())
    assert [row["way"] for row in results["ways"]] == expected
    assert [row["exact"] for row in results["ways"]] == [None] + [True] * (len(expected) - 1)
    assert all(len(row["rounds"]) == 2 and min(row["rounds"]) > 0 for row in results["ways"])
    transfers = {row["way"]: (row["transfer"], row["seconds"]) for row in results["ways"] if "transfer" in row}
    assert list(transfers) == [way for way in expected if way.startswith("ours")]
    assert all(0 < transfer < until_returned for transfer, until_returned in transfers.values())
    assert (run / "sync.png").read_bytes().startswith(b"\x89PNG")


@cpu_only
@pytest.mark.parametrize(("topology", "quantized"), [("nccl", True), ("ipc", False)])
@pytest.mark.long
def test_every_way_is_timed_and_exact(script, tmp_path, topology, quantized):
    arguments = ["--topology", topology, "--rounds", 2, "--output", "run"] + ["--quantization", "auto"] * quantized
    text = script("benchmarks/sync.py", *arguments).finish()
    assert text.splitlines()[-1].startswith("OK: "), text
    assert_every_way_is_exact(tmp_path / "run", [CEILINGS[topology], "ours, reload", "ours, default"])


@pytest.mark.parametrize(
    ("topology", "where"),
    [
        pytest.param("nccl", slice(0, 3), marks=pytest.mark.gpu(3)),
        pytest.param("ipc", slice(-1, None), marks=pytest.mark.gpu(1)),  # of several GPUs not the first
    ],
)
def test_every_way_is_exact_on_gpus(script, tmp_path, topology, where):
    arguments = ["--topology", topology, "--shape", "opt-125m", "--rounds", 2, "--output", "run"]
    text = script("benchmarks/sync.py", *arguments, CUDA_VISIBLE_DEVICES=gpus(where)).finish()
    assert text.splitlines()[-1].startswith("OK: "), text
    assert_every_way_is_exact(tmp_path / "run", [CEILINGS[topology], *NATIVE, "ours, reload", "ours, replay"])


@pytest.mark.parametrize(("topology", "extension"), [("nccl", "PeerExtension"), ("ipc", "ColocatePeerExtension")])
def test_engine_has_what_its_topology_needs(sync, monkeypatch, topology, extension):
    found = []

    async def prepare(device, bundles):
        monkeypatch.setattr(os, "environ", dict(os.environ))

    async def load(model, options):
        backend = options["weight_transfer_config"]["backend"]
        found.append((options["worker_extension_cls"], backend, options["distributed_executor_backend"]))

    engine = sync.BenchEngine(0)
    engine.prepare, engine.load, engine.llm = prepare, load, MagicMock()
    asyncio.run(engine.start("model", arguments_of(sync, topology=topology), "cuda", [1, 2]))
    assert found == [(f"peers.{extension}", topology, "mp")]


def test_gpus_are_asked_by_the_fields_that_nvidia_smi_knows(sync, tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    answer = r'printf "NVIDIA H200\nNVIDIA H200\n"'
    fake.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu=name ] && {answer}')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sync.device_kind() == "NVIDIA H200"


def test_weights_are_overwritten_before_a_ways_clock_starts(sync, monkeypatch):
    import peers

    happened, layer = [], torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append(layer.weight.isnan().all().item()))
    worker = object.__new__(peers.PeerExtension)
    worker.device, worker.model_runner = torch.device("cuda"), SimpleNamespace(get_model=lambda: layer)
    worker.poison()
    assert happened == [True]


def test_adapters_are_timed_with_one_trainer_alone(sync):
    with pytest.raises(RunError, match="--lora-rank is for one trainer"):
        sync.main(arguments_of(sync, lora_rank=4, trainers=2))


@pytest.mark.parametrize("fault", ["raises", "waits"])
def test_way_that_would_wait_for_ever_ends(sync, monkeypatch, fault):
    def get(call, timeout):
        raise ray.exceptions.RayError("no luck") if fault == "raises" else ray.exceptions.GetTimeoutError

    monkeypatch.setattr(sync, "ray", SimpleNamespace(get=get, exceptions=ray.exceptions))
    monkeypatch.setattr(sync, "ROUND_SECONDS", 20 if fault == "raises" else 0.2)
    monkeypatch.setattr(sync, "wait", lambda futures, timeout: wait(futures, 0.1))
    ended, trainer = threading.Event(), object.__new__(sync.BenchTrainer)
    trainer.thread = ThreadPoolExecutor(1)
    trainer.engines = [sync.Watched(SimpleNamespace(rpc=SimpleNamespace(remote=lambda method: method)))]
    trainer.way = lambda: (trainer.engine.rpc.remote("receive"), ended.wait())
    with pytest.raises(
        WeightSyncError, match="the engine failed: no luck" if fault == "raises" else "way was not done"
    ):
        trainer.run("way")
    ended.set()


@pytest.fixture
def step(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import step

    return step


@cpu_only
@pytest.mark.long
@pytest.mark.parametrize("images", [{}, {"--shape": "tiny-vl", "--image-side": 112}], ids=["text", "images"])
def test_whole_step_is_timed_beside_trls(script, tmp_path, images):
    flags = {"--prompts": 2, "--completions": 4, "--tokens": 8, "--prompt-tokens": 8, "--steps": 3, "--trl-batch": 4}
    arguments = [text for flag in (flags | images).items() for text in flag]
    text = script("benchmarks/step.py", *arguments, "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: "), text
    results = json.loads((tmp_path / "run" / "step.json").read_text())
    assert results["failed"] == {}
    assert [row["way"] for row in results["ways"]] == ["ours", "TRL"]
    for row in results["ways"]:
        assert len(row["steps"]) == 2
        for one in row["steps"]:
            assert min(one["rollout"], one["learn"], one["rest"]) > 0
            assert one["rollout"] + one["learn"] + one["sync"] + one["rest"] == pytest.approx(one["whole"])
        assert 0.2 < row["peak_GB"] < 20
        assert 5 < row["start"] < 300
        assert row["tokens_per_second"] == pytest.approx(2 * 4 * 8 / row["whole"])
    assert results["ways"][0]["steps"][0]["sync"] > 0
    assert (tmp_path / "run" / "step.png").read_bytes().startswith(b"\x89PNG")


@cpu_only
@pytest.mark.long
def test_several_ranks_feed_several_engines_beside_their_ceiling(script, tmp_path):
    arguments = "--trainers", 2, "--engines", 2, "--tensor-parallel-size", 1, "--rounds", 2, "--output", "run"
    text = script("benchmarks/sync.py", *arguments).finish()
    assert text.splitlines()[-1].startswith("OK: "), text
    assert "2 trainer -> 2 x TP=1, NCCL" in text
    assert_every_way_is_exact(tmp_path / "run", ["raw broadcast", "ours, reload", "ours, default"])


@cpu_only
@pytest.mark.long
def test_runs_on_separate_devices_are_timed_with_lengths_that_vary(script, tmp_path):
    flags = {"--topology": "separate", "--prompts": 2, "--completions": 4, "--tokens": 32, "--mean-tokens": 8}
    arguments = [text for flag in (flags | {"--prompt-tokens": 8, "--steps": 3}).items() for text in flag]
    text = script("benchmarks/step.py", *arguments, "--output", "run").finish()
    assert text.splitlines()[-1].startswith("OK: "), text
    results = json.loads((tmp_path / "run" / "step.json").read_text())
    assert [row["way"] for row in results["ways"]] == ["ours", "async"]
    for row in results["ways"]:
        logged = [json.loads(line) for line in (tmp_path / "run" / row["way"] / "run" / "metrics.jsonl").open()][1:]
        lengths = [one["completions/mean_length"] for one in logged]
        assert len(set(lengths)) == 2
        assert max(lengths) < 32
        assert [one["tokens"] for one in row["steps"]] == [2 * 4 * length for length in lengths]
        for one in row["steps"]:
            assert one["rollout"] + one["learn"] + one["sync"] + one["rest"] == pytest.approx(one["whole"])
            assert min(one["rollout"], one["learn"], one["sync"], one["rest"]) > 0
            assert 0 < one["engine_idle"] <= 1
            assert 0 < one["trainer_idle"] < 1
        assert row["tokens_per_second"] == pytest.approx(sum(lengths) * 4 / row["whole"])
        assert row["MFU"] is None
    apart, ahead = results["ways"]
    assert [one["engine_idle"] + one["trainer_idle"] for one in apart["steps"]] == pytest.approx([1, 1])
    assert [one["engine_idle"] for one in ahead["steps"]] == [one["async/engine_idle"] for one in logged]
    longer = max(apart["rollout"], apart["learn"] + apart["sync"])
    assert results["async_over_bound"] == pytest.approx(ahead["whole"] / longer)
    assert f"async: a step is {results['async_over_bound']:.2f} times the longer" in text
    assert (tmp_path / "run" / "step.png").read_bytes().startswith(b"\x89PNG")


def test_flops_of_learning_are_of_matrices_and_attention(step):
    args = step.Arguments(shape="qwen2.5-0.5b", prompts=2, completions=3, tokens=5, prompt_tokens=7)
    block = 896 * 896 * 2 + 2 * 896 * 128 + 3 * 896 * 4864  # queries and output, keys and values, gate, up and down
    vectors = 24 * (896 + 2 * 128 + 2 * 896) + 896  # biases and norms
    per_token = 24 * block + vectors + 24 * 896 * 12
    assert step.learning_flops(args) == 6 * (2 * 3) * (per_token * 12 + 896 * 151936 * 5)
    args.shape = "qwen3-30b-a3b-4l"
    block = 2048 * 4096 * 2 + 2 * 2048 * 512 + 2048 * 128 + 8 * 3 * 2048 * 768  # the router, and 8 experts
    vectors = 4 * (2 * 2048 + 2 * 128) + 2048
    per_token = 4 * block + vectors + 4 * (32 * 128) * 12  # the heads are wider than the model
    assert step.learning_flops(args) == 6 * (2 * 3) * (per_token * 12 + 2048 * 151936 * 5)


def test_summary_has_medians_and_what_is_in_no_part(step):
    parts = {"whole": 10.0, "rollout": 3.0, "learn": 2.0, "sync": 1.0, "tokens": 60, "start": 9}
    steps = [{name: i * value for name, value in parts.items()} for i in (1, 2, 9)]
    row = step.summary("ours", steps, 1.0, flops=8e12, peak_flops=1e13)
    assert {name: row[name] for name in ("whole", "rollout", "learn", "sync", "rest")} == {
        "whole": 20.0, "rollout": 6.0, "learn": 4.0, "sync": 2.0, "rest": 8.0,
    }  # fmt: skip
    assert (row["tokens_per_second"], row["MFU"]) == (120 / 20, 0.2)
    assert step.summary("ours", steps, 1.0, 8e12, peak_flops=0)["MFU"] is None


def test_shorter_completions_and_a_command_that_fails_are_errors(step, tmp_path):
    with pytest.raises(RunError, match=r"TRL: completions have 7\.5 tokens on average, and not 8"):
        step.step_tokens("TRL", 7.5, step.Arguments(tokens=8))
    ends = "print('[rank0]: ValueError: no memory\\nChildFailedError: \\n====='); exit(1)"  # as torchrun's output does
    for name, code in (("one", "raise ValueError('no memory')"), ("ranks", ends)):
        with pytest.raises(RunError, match=rf"{name}: .*ValueError: no memory \(all of it in .*/{name}/output\.txt\)"):
            step.run_way(tmp_path / name, ["-c", code], gpus="")
    with pytest.raises(RunError, match="--trl-batch 16 does not divide the 24 completions"):
        step.trl_step(tmp_path, step.Arguments(prompts=3, completions=8), gpus="")


def test_trls_server_has_the_other_gpus_and_ends_with_the_trainer(step, monkeypatch, tmp_path):
    python, output, commands = tmp_path / "python", tmp_path / "trl-server" / "output.txt", []
    python.write_text("#!/bin/sh\necho $$ $CUDA_VISIBLE_DEVICES $@\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(step.sys, "executable", str(python))

    def run_way(folder, command, gpus):
        commands.append((command, gpus))
        while not output.read_text():
            time.sleep(0.01)
        raise RunError("out of memory")

    monkeypatch.setattr(step, "run_way", run_way)
    args = step.Arguments(topology="separate", trainers=2, engines=3, tensor_parallel_size=2)
    with pytest.raises(RunError, match="out of memory"):
        step.trl_step(tmp_path / "trl", args, "4,5,6,7,0,1,2,3")
    pid, gpus, *flags = output.read_text().split()
    assert not psutil.pid_exists(int(pid))
    assert gpus == "6,7,0,1,2,3"
    assert {"--data-parallel-size=3", "--tensor-parallel-size=2", f"--model={tmp_path}/model"} <= set(flags)
    ((command, seen),) = commands
    assert "--nproc-per-node=2" in command
    assert json.loads(command[-1])["gpus"] == "4,5"
    assert seen == "4,5,6,7,0,1,2,3"  # whose memory is counted


@pytest.mark.parametrize(
    ("options", "gpus", "message"),
    [
        ({"tokens": 8, "mean_tokens": 8}, 0, "--mean-tokens 8 is not below --tokens 8"),
        ({"ways": ["async"]}, 0, "--ways: there is no async here, but ours"),
        ({"topology": "separate", "ways": ["TRL"]}, 0, "--ways: there is no TRL here, but ours, async"),
        ({"topology": "separate"}, 1, "--topology separate takes 2 GPUs, and there are 1"),
        ({"topology": "separate", "tensor_parallel_size": 2}, 2, "--topology separate takes 3 GPUs, and there are 2"),
        ({"trainers": 2}, 2, "as many --trainers as the engines have workers"),
        ({"tensor_parallel_size": 2}, 2, "as many --trainers as the engines have workers"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_is_written(
    step, monkeypatch, tmp_path, options, gpus, message
):
    monkeypatch.setattr(step, "device_kind", lambda: "NVIDIA H200" if gpus else "CPU")
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(RunError, match=message):
        step.main(step.Arguments(output=tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("visible", "topology", "gpus"), [(None, "shared", "0"), (None, "separate", "0,1"), ("3,1,2", "separate", "3,1")]
)
def test_ways_get_the_first_visible_gpus(step, monkeypatch, visible, topology, gpus):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert step.choose_gpus(step.Arguments(topology=topology)) == gpus


def test_flags_that_a_topology_lacks_are_not_passed(step, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(step, "run_way", lambda folder, command, gpus: commands.append(command) or 1.0)
    for topology in ("shared", "separate"):
        ways = step.choose_ways(step.Arguments(topology=topology, options="--offload-optimizer"), "0,1")
        ways.pop("TRL", None)
        for way, measure in ways.items():
            folder = tmp_path / topology / way / "run"
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text("")
            measure(tmp_path / topology / way)
    scripts = [os.path.basename(command[0]) for command in commands]
    assert scripts == ["train_grpo.py"] * 6
    given = [next(flag for flag in command if flag.startswith("--topology")) for command in commands]
    assert given == ["--topology=shared"] * 3 + ["--topology=separate"] * 3
    assert ["--max-staleness" in command for command in commands] == [False] * 4 + [True, False]
    assert ["--trainers=1" in command for command in commands] == [False] * 3 + [True] * 3
    exact = [command[command.index("--exact") + 1] if "--exact" in command else "" for command in commands]
    assert exact == ["off", "on", "", "off", "off", "on"]
    assert ["step_trl" in command for command in commands] == [False, False, True, False, False, False]
    assert all("--offload-optimizer" in command and "--tensor-parallel-size=1" in command for command in commands)


@pytest.fixture
def no_model(step, monkeypatch):
    """None is made."""
    process = SimpleNamespace(start=lambda: None, join=lambda: None, exitcode=0)
    context = SimpleNamespace(Process=lambda target, args: process)
    monkeypatch.setattr(step.multiprocessing, "get_context", lambda kind: context)


def test_mfu_is_of_all_gpus_that_learn(step, monkeypatch, tmp_path, no_model):
    parts = {"whole": 4.0, "rollout": 2.0, "learn": 1.0, "sync": 0.5, "tokens": 8, "start": 60.0, "engine_idle": 0.5}
    monkeypatch.setattr(step, "our_step", lambda *_, **__: ([parts | {"trainer_idle": 0.5}], 1.0))
    monkeypatch.setattr(step, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(step, "learning_flops", lambda args: 989e12)
    for trainers, mfu in ((1, 1.0), (2, 0.5)):
        output = tmp_path / str(trainers)
        step.main(step.Arguments(topology="separate", trainers=trainers, ways=["ours"], output=output))
        assert json.loads((output / "step.json").read_text())["ways"][0]["MFU"] == mfu


@pytest.mark.parametrize(("failing", "ways"), [("TRL", None), ("TRL", ["TRL"]), ("ours", None)])
def test_trl_that_fails_is_a_result_only_beside_ours(step, monkeypatch, tmp_path, capsys, no_model, failing, ways):
    def measure(way):
        def run(folder, **_):
            if way == failing:
                raise RunError(f"{way}: out of memory")
            return [{"whole": 4.0, "rollout": 2.0, "learn": 1.0, "sync": 0.5, "tokens": 8, "start": 9.0}], 1.0

        return run

    monkeypatch.setattr(step, "our_step", measure("ours"))
    monkeypatch.setattr(step, "trl_step", measure("TRL"))
    monkeypatch.setattr(step, "device_kind", lambda: "CPU")
    args = step.Arguments(output=tmp_path / "run", ways=ways)
    if failing == "ours" or ways:
        with pytest.raises(RunError, match=f"{failing}: out of memory"):
            step.main(args)
        return
    step.main(args)
    assert json.loads((tmp_path / "run" / "step.json").read_text())["failed"] == {"TRL": "TRL: out of memory"}
    assert "TRL            TRL: out of memory" in capsys.readouterr().out


@pytest.fixture
def learning(monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import learning

    return learning


@pytest.fixture
def stand_in(learning, monkeypatch):
    """Runs that print two steps, of which way "off" gets so much right as its seed says. Returns those that were done,
    with their GPUs."""
    done = []

    def command_of(way, seed, args, model, gpus):
        done.append((way, seed, gpus))
        right = f"0.{seed}" if way == "off" else "0.5"
        lines = "step 0/2  eval 0.250\nstep 1/2  reward 0.125  mismatch 2.0e-02  rollout 1.00 s\n 0.50 'step 1/2 '"
        lines += f"\nstep 2/2  reward 0.375  mismatch 0.0e+00  eval {right}\n"
        return ["-c", f"print({lines!r}, end=''); exit({int(way == 'lora')})"]

    monkeypatch.setattr(learning, "command_of", command_of)
    return done


def test_runs_that_are_there_are_not_done_again(learning, stand_in, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    options = {"folder": tmp_path / "all", "model": str(tmp_path), "steps": 2, "seeds": [4, 5]}
    learning.main(learning.Arguments(ways=["off"], **options))
    learning.main(learning.Arguments(ways=["off", "trl"], jobs=2, **options))
    assert sorted(stand_in) == [("off", 4, ""), ("off", 5, ""), ("trl", 4, ""), ("trl", 5, "")]
    head, off, trl = capsys.readouterr().out.splitlines()[-4:-1]
    columns = "seeds", "reward, first", "reward, last", "held-out, before", "held-out, after", "mismatch"
    assert re.split("  +", head.strip()) == [*columns, "s to step 1", "s to the end"]
    assert re.split("  +", off)[:6] == ["off", "2", *["0.25 (0.25 to 0.25)"] * 3, "0.45 (0.4 to 0.5)"]
    assert re.split("  +", trl)[-3:] == ["0.01 (0.01 to 0.01)", "-", "-"]  # two runs at a time on one CPU
    first, before, *steps = map(json.loads, (tmp_path / "all" / "off-4.jsonl").read_text().splitlines())
    assert (first["way"], first["alone"], first["workload"]["steps"]) == ("off", True, 2)
    assert [step.pop("seconds") < first["seconds"] for step in (before, *steps)] == [True] * 3
    assert before == {"step": 0, "eval": 0.25}
    assert steps[1] == {"step": 2, "reward": 0.375, "mismatch": 0.0, "eval": 0.4}
    assert (tmp_path / "all" / "learning.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunError, match=r"off-4.jsonl is of another workload"):
        learning.main(learning.Arguments(ways=["off"], **options | {"steps": 3}))


def test_run_that_fails_is_an_error_after_the_others(learning, stand_in, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    args = learning.Arguments(ways=["lora", "off"], seeds=[3], steps=2, folder=tmp_path / "all", model=str(tmp_path))
    with pytest.raises(RunError, match="1 of 2 runs failed: lora-3: step 2/2"):
        learning.main(args)
    assert "0.3" in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "all" / "lora-3.jsonl").exists()
    args.steps = 4
    with pytest.raises(RunError, match=r"off-4: not every step is in .*off-4/output.txt"):
        learning.learn("off", 4, args, "model", "CPU", "")


@pytest.mark.parametrize(
    ("ours", "trls", "is_below"),
    [
        ([0.30, 0.32, 0.31], [0.36, 0.35, 0.34], True),
        ([0.30, 0.35, 0.31], [0.36, 0.35, 0.34], False),
        ([0.30, 0.32, 0.31], [0.36, 0.37, 0.31], False),
        ([0.4, 0.4], [0.3, 0.3], False),
        ([0.1], [0.4, 0.4], False),  # nobody knows how far apart two seeds would be
    ],
)
def test_less_than_trl_by_more_than_the_spread_is_an_error(learning, ours, trls, is_below):
    def runs(way, values):
        steps = [{"step": 1, "seconds": 1.0, "reward": 0.5}, {"step": 2, "seconds": 2.0, "reward": 0.5}]
        return [learning.Run(way, 0, "CPU", True, {}, 3.0, [steps[0], steps[1] | {"eval": value}]) for value in values]

    with pytest.raises(RunError, match=r"off is below TRL: 0.31 .* and 0.35") if is_below else nullcontext():
        learning.check({"off": runs("off", ours), "trl": runs("trl", trls), "lora": runs("lora", [0.0, 0.0])})


def test_all_ways_get_the_same_workload(learning, tmp_path):
    config = {"chain_sum": {"size": 30, "min_digits": 3}}
    own = {"prompts": 4, "completions": 8, "tokens": 16, "steps": 5, "learning_rate": 2e-5, "tags": True}
    own["trl_batch"] = 16
    args = learning.Arguments(folder=tmp_path, dataset_config=json.dumps(config), **own)
    commands = {way: learning.command_of(way, 7, args, "smol", "3") for way in learning.WAYS}
    (_, workload), flat = commands.pop("trl"), commands.pop("flat")
    expected = own | {"seed": 7, "gpus": "3", "accumulation": 2, "model": "smol"}
    assert json.loads(workload).items() >= expected.items()
    common = ["--model=smol", "--steps=5", "--prompts-per-step=4", "--group-size=8", "--max-tokens=16"]
    assert {*common, "--learning-rate=2e-05"} <= set(flat)
    (prompts,) = tmp_path.glob("prompts-7.jsonl")
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert f"--prompts={prompts}" in flat
    assert len(rows) == 30
    assert [message["role"] for message in rows[0]["prompt"]] == ["user", "assistant"] * 2 + ["user"]
    for way, command in commands.items():
        assert {*common, "--seed=7", "--map=learning_trl:with_examples", "--eval-every=10"} <= set(command)
        assert f"--learning-rate={2e-4 if way == 'lora' else 2e-5}" in command
        assert command[-2:] == learning.FLAGS[way].split()[-2:]
    with pytest.raises(RunError, match="--trl-batch 16 does not divide the 20 completions"):
        args.prompts, args.completions = 5, 4
        learning.command_of("trl", 7, args, "smol", "3")


def test_answers_are_right_only_in_tags_after_examples_that_have_them(learning):
    from learning_trl import correct_in_tags, rows_of

    (row, *_), _ = rows_of('{"gcd": {"size": 20}}', tags=True)
    columns = {name: [row[name]] * 3 for name in ("problem", "source")}
    assert correct_in_tags([f"<answer>{row['answer']}</answer>", row["answer"], "<answer>-1</answer>"], **columns) == [
        1.0, 0.0, 0.0,
    ]  # fmt: skip
    examples = [message["content"] for message in row["prompt"] if message["role"] == "assistant"]
    assert [text.startswith("<answer>") for text in examples] == [True, True]


@pytest.mark.parametrize(
    ("count", "visible", "jobs", "groups"),
    [
        (0, None, 2, ["", ""]),
        (1, "5", 2, ["5", "5"]),
        (4, None, 2, ["0,1", "2,3"]),
        (3, "4,5,6", 3, ["4", "5", "6"]),
    ],
)
def test_jobs_share_the_visible_gpus(learning, monkeypatch, count, visible, jobs, groups):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert learning.gpus_of_jobs(learning.Arguments(jobs=jobs)) == groups
    if groups[0].isdigit():
        with pytest.raises(RunError, match=f"stale2 takes 2 GPUs, and each of {jobs} jobs has 1 of {count}"):
            learning.gpus_of_jobs(learning.Arguments(jobs=jobs, ways=["stale2"]))


@cpu_only
@pytest.mark.long
def test_ours_and_trl_learn_the_same_problems(learning, script, tmp_path):
    build_tiny_model(tmp_path / "model")
    chat_tokenizer(tmp_path / "model")
    flags = {"--ways": "off", "--seeds": 0, "--steps": 2, "--prompts": 2, "--completions": 4, "--tokens": 8}
    flags |= {"--eval-every": 1, "--model": "model", "--dataset-config": '{"chain_sum": {"size": 40}}'}
    arguments = [text for flag in flags.items() for text in flag]
    arguments.insert(2, "trl")
    text = script("benchmarks/learning.py", *arguments, "--folder", "all").finish()
    assert text.splitlines()[-1] == f"OK: {tmp_path}/all", text
    for way in ("off", "trl"):
        _, *steps = map(json.loads, (tmp_path / "all" / f"{way}-0.jsonl").read_text().splitlines())
        assert [step["step"] for step in steps] == [0, 1, 2]
        assert all("eval" in step for step in steps)
        assert all("reward" in step for step in steps[1:])
        seconds = [step["seconds"] for step in steps]
        assert seconds == sorted(seconds)


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import quantized_memory

    return quantized_memory


def test_memory_table_takes_no_more_gpus_than_there_are(memory, monkeypatch):
    reserve = Mock()
    monkeypatch.setattr(memory, "reserve", reserve)
    monkeypatch.setattr(memory.ray, "cluster_resources", lambda: {"GPU": 1.0})
    assert memory.place(1)[0] == "cuda"
    assert reserve.call_args.args[0] == [{"GPU": 1}]
    with pytest.raises(RunError, match="--tensor-parallel-size 2 takes as many GPUs, and there are 1"):
        memory.place(2)
