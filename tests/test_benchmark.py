"""benchmarks/sync.py on a small shape: every way is timed, and leaves exactly the weights that a reload does.

pytest tests/test_benchmark.py
"""

import json

from conftest import cpu_only


@cpu_only
def test_every_way_is_timed_and_exact(script, tmp_path):
    text = script("benchmarks/sync.py", "--rounds", 3, "--output", "run").finish(180)
    assert text.splitlines()[-1].startswith("OK: "), text
    results = json.loads((tmp_path / "run" / "sync.json").read_text())
    assert [row["way"] for row in results["ways"]] == [
        "raw broadcast", "one RPC a parameter", "ours, reload", "ours",
    ]  # fmt: skip
    assert [row["exact"] for row in results["ways"]] == [None, True, True, True]
    assert all(len(row["rounds"]) == 3 and min(row["rounds"]) > 0 for row in results["ways"])
    assert (tmp_path / "run" / "sync.png").read_bytes().startswith(b"\x89PNG")
