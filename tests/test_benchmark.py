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
@pytest.mark.parametrize("topology", WAYS)
def test_every_way_is_timed_and_exact(script, tmp_path, topology):
    text = script("benchmarks/sync.py", "--topology", topology, "--rounds", 3, "--output", "run").finish(180)
    assert text.splitlines()[-1].startswith("OK: "), text
    results = json.loads((tmp_path / "run" / "sync.json").read_text())
    assert [row["way"] for row in results["ways"]] == WAYS[topology]
    assert [row["exact"] for row in results["ways"]] == [None, True, True, True]
    assert all(len(row["rounds"]) == 3 and min(row["rounds"]) > 0 for row in results["ways"])
    assert (tmp_path / "run" / "sync.png").read_bytes().startswith(b"\x89PNG")
