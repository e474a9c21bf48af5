"""The whole loop for half an hour: as much memory at the end as after half of it. Only for those who ask for it:

SOAK_SECONDS=1800 pytest tests/test_soak.py -m slow -s
"""

import os
import time

import psutil
import pytest
from conftest import Script, cpu_only, metrics_of, shared_memory_of, title_of

pytestmark = cpu_only
SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))
# Megabytes of private memory, of all processes together. vLLM's CPU workers alone, without a sync, grow as they touch
# their KV cache and allocate: by 320 MB each in 800 rollouts of the built-in model, ever more slowly.
MAX_GROWTH = 128
PASSING = ("sh ", "sleep", "grep")  # the shell that outlives an engine, and what it runs


@pytest.mark.slow
@pytest.mark.skipif(not SECONDS, reason="takes half an hour: SOAK_SECONDS=1800; in less, vLLM's own growth has no end")
def test_memory_of_the_whole_loop_is_flat(script, tmp_path):
    run = tmp_path / "run"
    process = script(
        "train_grpo.py", "--topology", "separate", "--steps", 1_000_000, "--save-every", 10, "--output", "run"
    )
    process.wait_for_step(run, 1)
    started, samples = time.monotonic(), []
    try:
        for share in (0, 1 / 6, 1 / 2, 1):
            while time.monotonic() - started < share * SECONDS:
                assert process.process.poll() is None, process.text()
                time.sleep(1)
            samples.append(footprint(process))
            steps = len((run / "metrics.jsonl").read_text().splitlines())
            print(f"{time.monotonic() - started:6.0f} s  step {steps}  {samples[-1]}")
    finally:
        family = process.descendants()
        process.process.terminate()
    text = process.finish(60)
    process.assert_failed_cleanly(text, family)
    assert text.splitlines()[-1] == "error: interrupted", text

    *_, before, after = samples
    assert after["processes"] == before["processes"], samples
    assert after["descriptors"] <= before["descriptors"], samples
    assert after["shared files"] <= before["shared files"], samples
    assert sum(after["private MB"].values()) - sum(before["private MB"].values()) < MAX_GROWTH, samples
    rows = metrics_of(run)
    assert max(row["logprobs/mismatch"] for row in rows) < 1e-5
    assert rows[-1]["reward/mean"] > 0.9


def footprint(script: Script) -> dict:
    """What the run's processes hold, their private memory by what they are."""
    family = [psutil.Process(script.process.pid), *script.descendants()]
    family = [process for process in family if not title_of(process).startswith(PASSING)]
    private = dict.fromkeys(("driver", "trainer", "engine", "Ray"), 0.0)
    for process in family:
        title = title_of(process)
        engine = "VLLM" in title or "ray::Engine" in title
        side = "engine" if engine else "trainer" if "ray::Trainer" in title else "Ray"
        private["driver" if process is family[0] else side] += process.memory_full_info().uss / 1e6
    return {
        "private MB": {side: round(megabytes, 1) for side, megabytes in private.items()},
        "processes": len(family),
        "descriptors": sum(process.num_fds() for process in family),
        "shared files": len(shared_memory_of(family)),
    }
