"""benchmarks/sync.py on a small shape: every way is timed, and leaves exactly the weights that a reload does.

pytest tests/test_benchmark.py
"""

import json

import pytest
from conftest import cpu_only

WAYS = {
    "nccl": ["raw broadcast", "one RPC a parameter", "ours, reload", "ours, default"],
    "ipc": ["device copy", "ZMQ + IPC buckets", "ours, reload", "ours, default"],
}


@cpu_only
@pytest.mark.parametrize(("topology", "quantized"), [("nccl", False), ("nccl", True), ("ipc", False)])
def test_every_way_is_timed_and_exact(script, tmp_path, topology, quantized):
    arguments = ["--topology", topology, "--rounds", 3, "--output", "run"] + ["--quantized"] * quantized
    text = script("benchmarks/sync.py", *arguments).finish(180)
    assert text.splitlines()[-1].startswith("OK: "), text
    results = json.loads((tmp_path / "run" / "sync.json").read_text())
    ways = [way for way in WAYS[topology] if not quantized or way != "one RPC a parameter"]
    assert [row["way"] for row in results["ways"]] == ways
    assert [row["exact"] for row in results["ways"]] == [None] + [True] * (len(ways) - 1)
    assert all(len(row["rounds"]) == 3 and min(row["rounds"]) > 0 for row in results["ways"])
    assert (tmp_path / "run" / "sync.png").read_bytes().startswith(b"\x89PNG")
