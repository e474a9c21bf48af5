"""What only GPUs can show: the runs over NCCL and CUDA IPC, replay, the digest's kernel, memory. Skips where they are
too few.

make test-gpu    (REQUIRE_GPU=1 makes a skip a failure)
"""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, arguments_of, metrics_of, settings_of
from learners import build
from pair import Pair, assert_adapters_are_exact, assert_memory_is_flat, assert_syncs_are_exact, compare, gpus
from test_multimodal import build as build_multimodal
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

import train_grpo
import train_ppo
from rlhf_utils import WeightSyncError
from trainer.learning import layout
from trainer.learning.exact import match_engine
from trainer.learning.grpo import GRPOLearner
from trainer.learning.rollout import Rollout
from trainer.rollouts.options import DECODE_GRAPHS
from trainer.rollouts.quantization import quantize_by_torchao
from trainer.tasks.tiny_model import build_tiny_base, build_tiny_model, byte_tokenizer
from trainer.topologies.link import MAX_QUANTIZED_MISMATCH as MAX_MISMATCH
from weight_sync.copies import digest
from weight_sync.lora import LoRAWeight, Merge
from weight_sync.staging import COMPARED_SYNCS

# --- The scripts, as a user runs them ---------------------------------------------------------------------------------

REPLAY = r"from now on by replay"
COMPARED = r"[1-9]\d* quantized weights are what was sent, but for rounding$"
FP8 = r"torchao's Float8DynamicActivationFloat8WeightConfig$"
SETTLED = r"^--sleep (none|kv) from now on: learning takes"
NEIGHBOURS = r"^GPU-\S+ +{} +{} +{}$"  # trainer rank, engine, worker
RUNS = [
    # flags of train_grpo.py, GPUs, the least reward at its end, what it says on its way
    ("--topology separate", 3, 0.75, [REPLAY]),
    ("--max-staleness 2", 3, 0.75, [REPLAY]),
    ("", 1, 0.75, [REPLAY, NEIGHBOURS.format(0, 0, 0), NEIGHBOURS.format(0, 1, 0), SETTLED]),
    ('--sleep none --task with_settings --engine-args={"compilation_config":{}}', 1, 0.75, [REPLAY]),
    ("--sleep weights --offload-optimizer", 1, 0.75, [REPLAY]),
    ("--lora-rank 8", 1, 0.75, [REPLAY]),
    ("", 4, 0.75, [REPLAY, NEIGHBOURS.format(0, 0, "[01]"), NEIGHBOURS.format(3, 1, "[01]")]),
    ("--trainers 2 --engines 2 --tensor-parallel-size 1", 4, 0.75, [REPLAY]),
    ("--max-staleness 2 --trainers 2 --engines 2 --tensor-parallel-size 1", 4, 0.75, [REPLAY]),
    ("--topology separate --quantization auto", 3, 0.5, [REPLAY, FP8, COMPARED]),
    ("--quantization auto", 1, 0.5, [REPLAY, FP8, COMPARED]),
]


@pytest.mark.parametrize(
    ("flags", "count", "reward", "says"),
    [pytest.param(*run, marks=pytest.mark.gpu(run[1]), id=f"{run[0]}-{run[1]}gpu") for run in RUNS],
)
def test_run_learns_and_proves_every_sync(script, tmp_path, flags, count, reward, says):
    model = (build_tiny_base if "--lora-rank" in flags else build_tiny_model)(tmp_path / "model")
    options = "--learning-rate", "3e-3", "--gpu-memory-utilization", 0.1, "--save-every", 30, "--output", "run"
    settings_of(tmp_path, compile=True, gradient_checkpointing="false")
    command = "train_grpo.py", *flags.split(), "--model", model, *options
    run = script(*command, CUDA_VISIBLE_DEVICES=gpus(slice(count)))
    text = run.finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    for pattern in says:
        assert re.search(pattern, text, re.MULTILINE), text
    rows = metrics_of(tmp_path / "run")
    assert len(rows) == 30
    assert rows[0]["reward/mean"] < 0.25
    assert rows[-1]["reward/mean"] > reward  # a step of which the engine had other weights would have ended the run


PPO = [
    # options, GPUs, which trainer rank is beside which worker of the engine
    ("", 1, [NEIGHBOURS.format(0, 0, 0)]),
    ("--sleep weights", 1, [NEIGHBOURS.format(0, 0, 0)]),
    ("--tensor-parallel-size 2", 2, [NEIGHBOURS.format(0, 0, "[01]"), NEIGHBOURS.format(1, 0, "[01]")]),
    ("--topology separate", 2, []),
    ("--topology separate", 3, []),
]


@pytest.mark.parametrize(
    ("options", "count", "says"),
    [pytest.param(*run, marks=pytest.mark.gpu(run[1]), id=f"{run[0]}-{run[1]}gpu") for run in PPO],
)
def test_ppo_learns_with_all_five_actors(script, tmp_path, options, count, says):
    build_tiny_model(tmp_path / "model")
    flags = f"--model model --learning-rate 3e-3 --gpu-memory-utilization 0.1 --save-every 30 --output run {options}"
    text = script("train_ppo.py", *flags.split(), CUDA_VISIBLE_DEVICES=gpus(slice(count))).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    for pattern in (REPLAY, *says):
        assert re.search(pattern, text, re.MULTILINE), text
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 1
    assert rows[-1]["ppo/explained_variance"] > 0.3


@pytest.mark.parametrize("count", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (2, 3)])
def test_student_learns_from_a_teacher_beside_its_engine_or_apart(script, tmp_path, count):
    """Its own model agrees with every token: scores are of the right tokens."""

    def reverse_kls(teacher):
        flags = f"--model model --teacher {teacher} --output {teacher[-5:]} --learning-rate 3e-3 --prompts-per-step 32"
        options = "--gpu-memory-utilization", 0.1, "--save-every", 0
        run = script("train_distill.py", *flags.split(), *options, CUDA_VISIBLE_DEVICES=gpus(slice(count)))
        text = run.finish()
        assert text.splitlines()[-1].startswith("OK: reverse KL "), text
        assert re.search(REPLAY, text), text
        assert ("engines and teacher share GPUs" in text) == (count == 2)
        lines = (tmp_path / teacher[-5:] / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["distill/reverse_kl"] for line in lines]

    build_tiny_model(tmp_path / "model")
    assert abs(reverse_kls("model")[0]) < 0.01
    before, *after = reverse_kls("trainer.tasks.tiny_model:build_tiny_base")
    assert sum(after[-5:]) / 5 < before / 2  # of one step alone, it may be more


@pytest.mark.gpu(1)
def test_five_models_of_half_a_billion_parameters_share_a_gpu(script, tmp_path):
    """Weights of Qwen2.5-0.5B's shape, random. Each is on the GPU in its own turn alone."""
    shape = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    for name, kind in (("model", Qwen2ForCausalLM), ("reward", Qwen2ForSequenceClassification)):
        kind(shape).bfloat16().save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    flags = "--model model --reward-model reward --steps 3 --max-tokens 256 --max-model-len 512 --save-every 0"
    run = script("train_ppo.py", *flags.split(), "--output", "run", CUDA_VISIBLE_DEVICES=gpus(slice(1)))
    text = run.finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text

    for cls, name in ((train_ppo.Critic, "model"), (train_ppo.Reference, "model"), (train_ppo.Reward, "reward")):
        torch.cuda.empty_cache()
        others, rank = torch.cuda.memory_reserved(), cls(0)
        rank.load(str(tmp_path / name), None, arguments_of(train_ppo), "cuda")
        weights = sum(parameter.nbytes for parameter in rank.model.module.parameters())
        for _ in range(2):
            assert torch.cuda.memory_reserved() - others < 0.2 * weights, name
            with rank.on_device():
                assert torch.cuda.memory_reserved() - others > weights, name


# --- Log-probabilities that are the engine's, bit for bit -------------------------------------------------------------


SMALL_QWEN2 = {"vocab_size": 258, "num_hidden_layers": 4, "intermediate_size": 1024, "num_key_value_heads": 2}
HEADS = {64: {"hidden_size": 512, "num_attention_heads": 8}, 128: {"hidden_size": 512, "num_attention_heads": 4}}


def small_qwen2(folder, head_dim: int = 64):
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SMALL_QWEN2, **HEADS[head_dim])).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


DIFFER = r"\d+ of \d+ log-probabilities are not the engine's bit for bit"
FLIPS = [
    # topology, GPUs, after which sync, --exact, exit status, what the run says
    ("shared", 1, 1, "auto", 0, rf"step 1: not exact: {DIFFER}; .*correct for that$"),
    ("shared", 1, 3, "auto", 0, rf"step 3: not exact: {DIFFER}; .*correct for that$"),
    ("shared", 1, 3, "on", 1, rf"error: .*--exact on: at step 3 {DIFFER}$"),
    ("separate", 3, 3, "auto", 0, rf"step 3: not exact: {DIFFER}; .*correct for that$"),
]


@pytest.mark.parametrize(
    ("topology", "count", "sync", "exactly", "status", "says"),
    [pytest.param(*flip, marks=pytest.mark.gpu(flip[1])) for flip in FLIPS],
)
def test_flipped_bit_in_the_engine_shows_in_the_next_step(
    script, tmp_path, monkeypatch, topology, count, sync, exactly, status, says
):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import step

    step.build_model(model := tmp_path / "model", step.Arguments(shape="qwen2.5-0.5b"), "cuda")
    options = ["--model", model, "--steps", 5, "--max-tokens", 64, "--save-every", 0, "--output", "run", "--engines", 1]
    options += ["--topology", topology, "--exact", exactly]
    options += ["--gpu-memory-utilization", 0.1, "--tensor-parallel-size", max(1, count - 1)]
    extension = "FlippingColocateExtension" if topology == "shared" else "FlippingExtension"
    engine = {"worker_extension_cls": f"exact_fault.{extension}", "kv_cache_memory_bytes": 2 << 30}
    options += ["--engine-args", json.dumps(engine)]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"FLIP_AFTER": str(sync), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": gpus(slice(count))}
    run = script("train_grpo.py", *options, **environment)
    text = run.finish()
    assert run.process.returncode == status, text
    assert re.search(says, text, re.MULTILINE), text
    if sync > 1:  # the next sync has put it right
        rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        assert [row["logprobs/different_tokens"] > 0 for row in rows] == [False] * 2 + (
            [True, False, False] * (not status)
        )


MIXTURES = [("Mixtral", 1), ("Qwen3Moe", 1), ("Qwen3Moe", 3)]  # and GPUs


@pytest.mark.parametrize(("architecture", "count"), [pytest.param(*m, marks=pytest.mark.gpu(m[1])) for m in MIXTURES])
def test_mixture_of_experts_computes_as_its_engine(script, tmp_path, architecture, count):
    sizes = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
    build(architecture, tmp_path / "model", **sizes, initializer_range=0.1, max_position_embeddings=512)
    topology = "shared" if count == 1 else "separate"  # with TP=2
    options = "--model model --exact on --steps 5 --max-tokens 64 --learning-rate 1e-3 --save-every 0 --output run"
    options = *options.split(), "--topology", topology, "--gpu-memory-utilization", 0.1
    run = script("train_grpo.py", *options, CUDA_VISIBLE_DEVICES=gpus(slice(count)))
    text = run.finish()
    assert run.process.returncode == 0, text
    assert re.search(r"step 1: exact: all \d+ log-probabilities are the engine's, bit for bit$", text, re.MULTILINE), (
        text
    )
    rows = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    assert [row["logprobs/different_tokens"] for row in rows] == [0] * 5
    assert any(row["grad_norm"] > 0 for row in rows)


CUTS = [("--top-p 0.9", "on"), ("--top-k 20 --min-p 0.01 --temperature 0.7", "on"), ("--top-p 0.9", "off")]  # --exact


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("cut", "exactly"), CUTS)
def test_trainer_normalizes_over_the_tokens_that_its_engine_has_left(script, tmp_path, cut, exactly):
    """The evaluation is greedy, which such an engine does not know."""
    small_qwen2(tmp_path / "model")
    options = f"--model model {cut} --exact {exactly} --steps 5 --max-tokens 64 --learning-rate 1e-3 --save-every 0"
    options = *options.split(), "--eval-share", 0.25, "--eval-every", 5, "--kl-coef", 0.01, "--output", "run"
    command = "train_grpo.py", *options, "--gpu-memory-utilization", 0.1
    run = script(*command, CUDA_VISIBLE_DEVICES=gpus(slice(1)))
    text = run.finish()
    assert run.process.returncode == 0, text
    assert ("--top-p comes with --top-k 1024" in text) == ("--top-k" not in cut), text
    first, *rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())  # first: evaluated
    assert "eval/reward" in first and "eval/reward" in rows[-1]
    assert [row["logprobs/mismatch"] < 0.02 for row in rows] == [True] * 5
    assert [row.get("logprobs/different_tokens", 0) for row in rows] == [0] * 5
    assert all(row["entropy"] < math.log(258 if "--top-p" in cut else 20) for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)


@pytest.mark.gpu(1)
def test_images_are_the_same_to_engine_and_trainer(script, tmp_path):
    flags = "--task colour --steps 5 --save-every 0 --gpu-memory-utilization 0.2 --output run"
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {"CUDA_VISIBLE_DEVICES": gpus(slice(1)), "PYTHONPATH": path}
    text = script("train_grpo.py", *flags.split(), **environment).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text  # a mismatch above its bound would have ended the run
    assert re.search(REPLAY, text), text


@pytest.mark.gpu(1)
def test_linear_attention_serves_what_was_sent(script, tmp_path):
    build_multimodal("Qwen3_5", tmp_path / "model", loudness=1)
    flags = "--model model --task uppercase --steps 3 --max-tokens 16 --save-every 0 --gpu-memory-utilization 0.2"
    command = "train_grpo.py", *flags.split(), "--output", "run"
    text = script(*command, CUDA_VISIBLE_DEVICES=gpus(slice(1))).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert re.search(REPLAY, text), text


def measure_exact_model(_, folder) -> None:
    """Log-probabilities and gradient of four completions of one prompt: as transformers computes them in fp32, and as a
    trainer does, exact or not, in rows of their own and behind the prompt."""
    match_engine()
    options = {"group_size": 4, "max_tokens": 300, "gradient_checkpointing": "false"}
    learner = GRPOLearner(str(folder / "model"), arguments_of(train_grpo, **options), torch.device("cuda"))
    model, generator = learner.model, torch.Generator().manual_seed(0)
    prompt, *drawn = (torch.randint(2, 258, (n,), generator=generator).tolist() for n in (600, 300, 300, 280, 17))
    rollouts, weights = (
        [Rollout(prompt, ids, [], 0.0) for ids in drawn],
        torch.randn(4, 300, generator=generator).cuda(),
    )

    def result(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        learner.optimizer.zero_grad()
        with model.differentiating():
            (logprobs * weights).sum().backward()
        return logprobs.detach().cpu(), torch.cat([p.grad.flatten().cpu() for p in learner.parameters])

    precise = torch.zeros(4, 300, device="cuda")
    for row, ids in enumerate(drawn):
        logits = model.module(torch.tensor([prompt + ids], device="cuda")).logits[0, len(prompt) - 1 : -1]
        precise[row, : len(ids)] = logits.log_softmax(-1).gather(1, torch.tensor(ids, device="cuda")[:, None])[:, 0]
    results = {"fp32": result(precise)}
    for exactly in (False, True):
        model.make_exact(int(exactly))
        for shared, layout.SHARED_TOKENS in (("rows", 10**9), ("shared", 512)):
            with model.computing():
                results[f"{'exact' if exactly else 'plain'} {shared}"] = result(model.score(rollouts, 300)[0])
    torch.save(results, folder / "results.pt")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("head_dim", HEADS)
def test_exact_gradients_are_as_near_to_fp32_as_others(tmp_path, head_dim):
    small_qwen2(tmp_path / "model", head_dim)
    torch.multiprocessing.spawn(measure_exact_model, (tmp_path,))  # its environment is not for other tests
    results = torch.load(tmp_path / "results.pt")
    logprobs, gradient = results.pop("fp32")
    off = {name: float((own - gradient).norm() / gradient.norm()) for name, (_, own) in results.items()}
    print(off, {name: float((own - logprobs).abs().mean()) for name, (own, _) in results.items()})
    assert off["plain rows"] < 0.05
    assert max(off.values()) < 1.2 * off["plain rows"]
    assert results["exact shared"][0].equal(results["exact rows"][0])


# --- An engine on GPUs of its own, and one on the trainer's -----------------------------------------------------------


GRAPHS = {"enforce_eager": False, "compilation_config": DECODE_GRAPHS, "max_num_seqs": 8}  # as the scripts' engines
COMPILED = {"enforce_eager": False, "max_num_seqs": 8}  # vLLM's own default: compiled, with graphs of all batches


APART = min(2, max(1, torch.cuda.device_count() - 1))  # workers of an engine on GPUs of its own


def start(folder, workers: int, **options) -> Pair:
    return Pair(build_tiny_model(folder), workers, **options)


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    with start(tmp_path_factory.mktemp("model"), APART, enable_sleep_mode=True, **GRAPHS) as pair:
        yield pair


@pytest.fixture(scope="module")
def colocated(tmp_path_factory):
    with start(tmp_path_factory.mktemp("model"), 1, enable_sleep_mode=True, colocated=True) as pair:
        yield pair


@pytest.fixture(scope="module")
def with_graphs(tmp_path_factory):
    with start(tmp_path_factory.mktemp("model"), 1, enable_sleep_mode=True, colocated=True, **GRAPHS) as pair:
        yield pair


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    with start(tmp_path_factory.mktemp("model"), 1, enable_sleep_mode=True, colocated=True, **COMPILED) as pair:
        yield pair


@pytest.fixture(
    params=[
        pytest.param("separate", marks=pytest.mark.gpu(2)),
        *(pytest.param(name, marks=pytest.mark.gpu(1)) for name in ("colocated", "with_graphs", "compiled")),
    ]
)
def pair(request):
    """The pair after a sync of its original weights."""
    pair = request.getfixturevalue(request.param)
    restore(pair)
    return pair


def restore(pair: Pair) -> list[int]:
    """Sync the original weights. Returns the workers' digests."""
    pair.set(pair.original)
    assert pair.sync().loader == "replay"
    return pair.rpc("digest")


def assert_replayed(pair: Pair, seed: int) -> None:
    """Other values arrive by replay, and are what a reload would have left."""
    pair.set(pair.perturbed(seed))
    assert pair.sync().loader == "replay"
    pair.mismatch()
    assert all(pair.rpc("check_weights_changed"))


def test_replay_survives_other_values(pair):
    original = pair.rpc("digest")
    for seed in range(3):
        assert_replayed(pair, seed)
        assert not set(pair.rpc("digest")) & set(original)
    assert restore(pair) == original


def test_captured_graphs_compute_with_what_was_sent(request, pair):
    pair.rpc("count_graph_replays")
    generated = pair.generate()
    replays = pair.rpc("count_graph_replays")
    eager = request.node.callspec.params["pair"] == "colocated"
    assert all(count == 0 if eager else count > 0 for count in replays), replays
    assert_syncs_are_exact(pair)
    assert pair.generate() == generated


@pytest.mark.parametrize("level", [1, 2])
def test_replay_survives_sleep(pair, level):
    original = pair.rpc("digest")
    pair.llm.sleep(level=level)
    pair.llm.wake_up(tags=["weights"])
    if level == 1:  # the weights went to host memory and came back; on level 2 they are lost
        assert pair.rpc("digest") == original
    assert pair.sync(reset_prefix_cache=False).loader == "replay"
    assert pair.rpc("digest") == original
    pair.llm.wake_up(tags=["kv_cache"])
    assert_replayed(pair, seed=level)


def test_replay_is_recorded_anew_for_other_tensors(pair):
    original = pair.rpc("digest")
    halves = {name: tensor.bfloat16() for name, tensor in pair.learner.model.named_tensors().items()}
    assert pair.sync(reversed(halves.items())).loader == "replay"
    assert pair.rpc("digest") == original  # bf16 is what the engine keeps
    assert_replayed(pair, seed=5)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_colocated_worker_reads_the_trainers_memory_wherever_it_moves(request, colocated, dtype):
    original = restore(colocated)
    model = colocated.learner.model.module.to(dtype)
    request.addfinalizer(model.float)
    colocated.connect()
    for seed in range(3):
        assert restore(colocated) == original
        assert_replayed(colocated, seed)
        assert colocated.sender.sending.maps_tensors
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


@pytest.mark.gpu(1)
def test_replay_that_went_wrong_is_found(request, colocated):
    colocated.connect()
    restore(colocated)
    request.addfinalizer(lambda: (colocated.connect(), restore(colocated)))
    colocated.rpc("spoil_replay")
    with pytest.raises(WeightSyncError, match="what the engine now serves is not what the trainer has"):
        for _ in range(COMPARED_SYNCS):
            colocated.sync()
    assert colocated.rpc("check_weights_changed") == [False]


def test_adapters_arrive_merged_by_peft_and_no_other_way(pair):
    pair.connect()  # anew: a worker maps what a session begins with
    assert_adapters_are_exact(pair, syncs=20)
    pair.connect()


def test_memory_is_flat_over_200_syncs(pair):
    assert_memory_is_flat(pair, syncs=200)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    options, _ = quantize_by_torchao()
    with start(tmp_path_factory.mktemp("model"), APART, max_mismatch=MAX_MISMATCH, **GRAPHS, **options) as pair:
        yield pair


@pytest.mark.gpu(2)
def test_scales_that_a_replay_left_behind_fail_the_comparison(quantized):
    for seed in range(2):
        assert_replayed(quantized, seed)
        assert compare(quantized) == 8 * APART  # fused and split linear layers of each worker
    quantized.rpc("keep_scales", True)
    quantized.set({name: 1.03 * tensor for name, tensor in quantized.perturbed(1).items()})
    assert quantized.sync().loader == "replay"
    assert all(quantized.rpc("check_weights_changed"))
    with pytest.raises(WeightSyncError, match="quantized weights are not what was sent"):
        compare(quantized)
    quantized.rpc("keep_scales", False)
    assert_replayed(quantized, seed=2)
    assert compare(quantized) == 8 * APART


@pytest.mark.gpu(1)
def test_what_an_engine_is_forked_from_has_not_initialized_cuda():
    code = "import trainer.rollouts.preload, torch; print(torch.cuda.is_initialized())"
    answer = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    assert answer.splitlines()[-1] == "False"


# --- Kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_digest_on_the_gpu_is_the_one_on_cpu(dtype):
    tensors = [torch.randint(0, 100, shape).to(dtype) for shape in [(5000,), (300, 7), (3,), (), (1 << 21,)]]
    assert digest([tensor.cuda() for tensor in tensors]) == digest(tensors)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rank", "scaling"), [(1, 32.0), (8, 4.0), (20, 1.3), (32, 0.7), (64, 0.3), (256, 0.125)])
def test_merging_kernel_writes_what_torch_computes(dtype, transposed, rank, scaling):
    for rows, columns, first in [(3584, 512, 0), (3584, 18944, 1000), (1001, 889, 7)]:
        base = torch.randn(rows, columns, device="cuda").to(dtype)[first:]
        outputs, inputs = (columns, rows) if transposed else (rows, columns)
        lora_A = torch.randn(rank, inputs, device="cuda") * 0.02
        lora_B = torch.randn(outputs, rank, device="cuda") * 0.02
        weight, merged = LoRAWeight(base, lora_A, lora_B, scaling, transposed), torch.empty_like(base)
        merge = Merge(weight, base, first)
        merge(merged)
        assert merged.equal(merge.merged().to(dtype))
