"""Faults in a run: it ends within seconds, says what happened, leaves nothing behind, and --resume goes on from there.

pytest tests/test_faults.py            one fault of each kind
pytest tests/test_faults.py -m slow    every process killed in every phase (20 minutes a script)
"""

import json
import re
import subprocess
import time

import psutil
import pytest
from conftest import ROOT, cpu_only

pytestmark = cpu_only
FAULT_SECONDS = 30
SCRIPTS = ["rlhf.py", "rlhf_colocate.py", "rlhf_nccl.py", "rlhf_online_quant.py"]
FAULTS = [
    ("syncing 3 kill VLLM::Worker_TP1", "engine .*died"),
    ("generating 2 kill VLLM::EngineCore", "the engine died while generating"),
    ("saving 2 kill ray::Trainer", "the trainer died while saving"),
    ("learning 2 kill raylet/raylet", "Ray's raylet died while learning"),
    ("starting 1 kill VLLM::Worker_TP0", "the engine .* while starting"),
    ("syncing 3 fill", "the trainer failed while saving: .*No space left on device"),
    ("connecting 1 take", r"no group at [\d.:]+: .*Address already in use"),
    ("learning 2 interrupt", "interrupted"),
    ("syncing 3 terminate", "interrupted"),
]
VICTIMS = {"VLLM::Worker": "engine", "VLLM::EngineCore": "engine", "ray::Trainer": "trainer", "raylet/raylet": "raylet"}
PHASES = ("starting 1", "generating 2", "learning 2", "syncing 3", "saving 2")
EVERY_KILL = [
    (f"{phase} kill {victim}", f"{side}.* (died|failed)") for victim, side in VICTIMS.items() for phase in PHASES
]


@pytest.fixture
def small_disk(tmp_path):
    """The run folder, on a disk of 64 MiB. Yields whether it is."""
    folder = tmp_path / "run"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    yield mounted
    if mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        pytest.param("rlhf.py", FAULTS, id="rlhf.py"),
        *(pytest.param(name, EVERY_KILL, id=f"{name}-every-kill", marks=pytest.mark.slow) for name in SCRIPTS),
    ],
)
def test_run_ends_at_a_fault_and_goes_on_after_it(script, tmp_path, subtests, small_disk, name, faults):
    """One run with one fault after the other: each begins where the one before has ended."""
    run, done = tmp_path / "run", 0
    how = ["--output", "run", "--save-every", 1, "--steps", 10_000]
    for fault, message in faults:
        with subtests.test(fault):
            if "fill" in fault and not small_disk:
                pytest.skip("filling a disk needs the right to mount a small one")
            (tmp_path / "fault.json").unlink(missing_ok=True)
            process = script("tests/fault.py", fault, ROOT / name, *how)
            how = ["--resume", "run"]
            text = process.finish(180)
            print(text)
            happened = json.loads((tmp_path / "fault.json").read_text())
            assert time.time() - happened["time"] < FAULT_SECONDS
            process.assert_failed_cleanly(text, [psutil.Process(p) for p in happened["family"] if psutil.pid_exists(p)])
            assert re.search(message, text.splitlines()[-1]), text
            (run / "filler").unlink(missing_ok=True)
            checkpoints = sorted(run.glob("checkpoint-*"))
            assert int(checkpoints[-1].name[-6:]) > done or fault.startswith(("starting", "connecting"))
            done = int(checkpoints[-1].name[-6:])

    process = script(name, *how, "--steps", done + 2)
    beside = script(name, "--output", "beside", "--steps", 1)
    process.wait_for("run folder")  # which this run holds from now on
    again = script(name, "--resume", "run").finish(60)
    assert again.splitlines()[-1].startswith("error: another run is using "), again
    for text in (process.finish(180), beside.finish(180)):
        assert text.splitlines()[-1].startswith("OK: "), text
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, done + 3))
