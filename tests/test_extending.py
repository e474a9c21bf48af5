"""The Python of docs/extending.md, docs/cluster.md and the README's sync, as printed, and what is copied into another
project; a copied script runs in test_grpo.py.

pytest tests/test_extending.py
"""

import ast
import inspect
import subprocess
import sys
from textwrap import indent

import pytest
from conftest import ROOT, SYNC, Script, code_of, copy, cpu_only, metrics_of
from pair import CORE_IN_PROCESS

from trainer.learning.grpo import GRPOLearner
from trainer.run.actors import LearnerProtocol
from trainer.tasks.tiny_model import build_tiny_model

ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **CORE_IN_PROCESS}

PRELUDE = """
import os
import sys

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.utils.network_utils import get_open_port

import rlhf_utils

if __name__ == "__main__":
    assert os.path.dirname(rlhf_utils.__file__) == os.getcwd()
    path, (address, port, world_size) = sys.argv[1], ("127.0.0.1", get_open_port(), 3)
    options = {"tensor_parallel_size": 2, "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 128 << 20}
    options |= {"distributed_executor_backend": "mp", "load_format": "dummy"}
    model, device = AutoModelForCausalLM.from_pretrained(path), torch.device("cpu")
    prompts, layer_name = ["Hello"], "model.decoder.final_layer_norm"
"""

ASYNC = """
import asyncio

from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from rlhf_utils import WeightSender, stateless_init_process_group


async def main():
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(path, worker_extension_cls="rlhf_utils.WorkerExtension", **options))
    try:
        arguments = address, port, 1, world_size
        joining = asyncio.create_task(llm.collective_rpc("init_weight_update_group", args=arguments))
        group = await asyncio.to_thread(stateless_init_process_group, address, port, 0, world_size, device)
        sender, params = WeightSender(group), SamplingParams(max_tokens=200, ignore_eos=True)
        await joining
        async for output in llm.generate("Hello", params, "request"):
            if len(output.outputs[0].token_ids) in (1, 50):
                await sync(llm, sender, model)
        assert len(output.outputs[0].token_ids) == 200
        print("OK", flush=True)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
"""

TRAINER = """
import os
import sys

from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
fully_shard(model)
sender = connect(torch.device("cpu"))
for _ in range(2):
    sync(sender, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
print("OK", flush=True)
dist.barrier()
os._exit(0)  # not through Python's own way out: gloo's threads may still want the GIL
"""


@cpu_only
@pytest.mark.slow
def test_copied_sync_runs_the_readmes_snippet_and_own_extension(tmp_path):
    path = build_tiny_model(tmp_path / "model")
    snippet = next(code for code in code_of("README.md") if "WeightSender(" in code)
    extension, use, *_ = code_of("docs/extending.md")
    assert extension.startswith("# my_extension.py\n")
    given = 'worker_extension_cls="rlhf_utils.WorkerExtension", ...'
    assert given in snippet
    snippet = snippet.replace(given, 'worker_extension_cls="my_extension.MyExtension", **options')
    check = """
half = [stats["num_parameters"] for stats in llm.collective_rpc("get_model_stats")]
assert half[0] == half[1] < sum(parameter.numel() for parameter in model.parameters())
with torch.no_grad():
    hidden = model.model.decoder(**{"input_ids": torch.tensor([llm.get_tokenizer().encode(prompts[0])])})
expected = hidden.last_hidden_state[0]
distance = float((torch.tensor(activations) - expected).abs().max())
assert torch.tensor(activations).shape == expected.shape
assert 0 < distance < 0.3, distance  # not exact: int8
print("OK", flush=True)
"""
    folder = copy(tmp_path / "project", *SYNC)
    (folder / "my_extension.py").write_text(extension)
    snippet, end = snippet.split("    finally:")
    body = snippet + indent(use + check, " " * 8) + "    finally:" + end
    (folder / "main.py").write_text(PRELUDE + indent(body, " " * 4))
    text = Script(folder, sys.executable, "main.py", str(path), **ENVIRONMENT, PYTHONPATH=str(folder)).finish()
    assert "\nOK\n" in text, text[-3000:]
    assert "[{'version': 1}, {'version': 1}]" in text


@cpu_only
@pytest.mark.long
def test_readmes_sync_of_an_async_llm_within_a_completion(tmp_path):
    path, folder = build_tiny_model(tmp_path / "model"), copy(tmp_path / "project", *SYNC)
    (snippet,) = (code for code in code_of("docs/sync.md") if code.startswith("async def sync("))
    (folder / "main.py").write_text(PRELUDE + snippet + ASYNC)
    text = Script(folder, sys.executable, "main.py", str(path), **ENVIRONMENT, PYTHONPATH=str(folder)).finish()
    assert "\nOK\n" in text, text[-3000:]
    assert "[{'version': 1}, {'version': 1}]" in text
    assert "[{'version': 2}, {'version': 2}]" in text


@cpu_only
@pytest.mark.long
def test_trainer_of_ones_own_brings_its_shards_to_two_servers(tmp_path):
    from vllm.utils.network_utils import get_open_port

    path, folder = build_tiny_model(tmp_path / "model"), copy(tmp_path / "project", *SYNC)
    environment = {"VLLM_SERVER_DEV_MODE": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--enable-scale-out"]
    command += ["--worker-extension-cls", "rlhf_utils.WorkerExtension", "--dtype", "float32", "--enforce-eager"]
    command += ["--load-format", "dummy", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(64 << 20)]
    ports, servers = [get_open_port(), get_open_port()], []
    for i, port in enumerate(ports):
        own = environment | {"VLLM_CPU_OMP_THREADS_BIND": str(i)}
        servers.append(Script(folder, *command, "--port", str(port), **own))
    (trainer,) = code_of("docs/cluster.md")
    for port, name in zip(ports, "ab", strict=True):
        given = f'"http://{name}:8000": 2'
        assert given in trainer
        trainer = trainer.replace(given, f'"http://127.0.0.1:{port}": 1')
    given = '"10.0.0.1", 29600'
    assert given in trainer
    (folder / "trainer.py").write_text(trainer.replace(given, f'"127.0.0.1", {get_open_port()}') + TRAINER)
    for server in servers:
        server.wait_for("Application startup complete")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "trainer.py"]
    text = Script(folder, *run, str(path), **environment).finish()
    assert text.count("OK\n") == 2, text[-3000:]
    assert "[[{'version': 1}], [{'version': 1}]]" in text
    assert "[[{'version': 2}], [{'version': 2}]]" in text


def trainer_of_ones_own() -> tuple[str, str]:
    """The trainer of docs/extending.md, and the line of a script that makes it."""
    *_, trainer, use = code_of("docs/extending.md")
    assert trainer.startswith("# reinforce.py\n")
    return trainer, use


def test_learners_have_the_methods_of_the_protocol():
    own = {}
    exec(trainer_of_ones_own()[0], own)
    methods = {name: method for name, method in vars(LearnerProtocol).items() if not name.startswith("_")}
    assert "learn" in methods
    for name, method in methods.items():
        asked = list(inspect.signature(method).parameters)
        for learner in (GRPOLearner, own["Reinforce"]):
            assert list(inspect.signature(getattr(learner, name)).parameters)[: len(asked)] == asked


@cpu_only
@pytest.mark.long
def test_trainer_of_ones_own_learns_in_the_loop_of_train_grpo(tmp_path):
    """And goes on in another topology, where it shares its device with an engine."""
    trainer, use = trainer_of_ones_own()
    folder = copy(tmp_path / "project", *SYNC, "trainer")
    (folder / "reinforce.py").write_text(trainer)
    script, named = (ROOT / "train_grpo.py").read_text(), "    learner_class = GRPOLearner\n"
    assert script.count(named) == 1
    script = script.replace(named, use)
    script = script.replace("import torch\n", "import torch\nfrom reinforce import Reinforce\n")
    (folder / "train_grpo.py").write_text(script)
    new = "--topology", "separate", "--tensor-parallel-size", "1", "--output", "run", "--save-every", "1"
    for steps, *flags in ((2, *new), (3, "--resume", "run", "--topology", "shared", "--engines", "1")):
        text = Script(folder, sys.executable, "train_grpo.py", "--steps", str(steps), *flags).finish()
        assert text.splitlines()[-1].startswith("OK: reward "), text
        assert "REINFORCE on cpu" in text
    rows = metrics_of(folder / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["logprobs/mismatch"] for row in rows) < 1e-5


@pytest.mark.slow
def test_installed_sync_is_found_from_anywhere(tmp_path):
    source = copy(tmp_path / "source", *SYNC, "pyproject.toml", "README.md", "LICENSE")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site"), str(source)]
    subprocess.run([sys.executable, *install], check=True)
    found = "import rlhf_utils, weight_sync; print(rlhf_utils.__file__, weight_sync.__file__)"
    command = [sys.executable, "-c", found]
    ran = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": "site"}, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [
        str(tmp_path / "site" / name) for name in ("rlhf_utils.py", "weight_sync/__init__.py")
    ]


@pytest.mark.parametrize("file", sorted(ROOT.glob("weight_sync/*.py")), ids=lambda path: path.name)
def test_weight_sync_stands_alone(file):
    """Relative imports among itself and, outside functions, torch, triton and what Python brings."""
    for node in ast.parse(file.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"torch"}
