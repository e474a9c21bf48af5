"""timeline.json, as the driver writes it: lanes, and files of runs that were killed. Runs have it in other tests.

pytest tests/test_timeline.py
"""

import json
import time

import pytest
from conftest import ROOT, spans_of, timeline_of

from trainer.errors import RunError
from trainer.run.timeline import DRIVER, Timeline


def test_what_is_done_at_the_same_time_is_in_lanes_of_its_own(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    for name in ("a", "b", "c"):
        timeline.begin(name, "engine", f"call {name}")
        time.sleep(0.001)
    timeline.end("b")
    with timeline.span("engine", "d"):  # b's lane is free
        time.sleep(0.001)
    timeline.end("a")
    timeline.end("c")
    timeline.end("never begun")
    timeline.close()
    lanes = {span["name"]: span["tid"] for span in timeline_of(tmp_path)}
    assert lanes == {"call b": 0, "d": 0, "call a": 1, "call c": 2}


def test_steps_enclose_what_is_done_in_them(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    before = time.time_ns() / 1e3
    for part in ("start", "step 1", "step 2"):
        with pytest.raises(ValueError), timeline.span(DRIVER, "learning"):
            raise ValueError
        timeline.end_part(part)
    timeline.close()
    spans = timeline_of(tmp_path)
    steps, inside = (spans_of(spans, DRIVER, name) for name in ("st", "learning"))
    assert all(step[0] <= inner[0] <= inner[1] <= step[1] for step, inner in zip(steps, inside, strict=True))
    assert steps[0][1] <= steps[1][0]
    assert 0 < steps[0][1] - before < 30e6  # microseconds since the epoch
    assert {span["tid"] for span in spans} == {0}


def test_killed_run_leaves_all_its_events(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    for i in range(3):
        timeline.end_part(f"step {i}")
    text = (tmp_path / "timeline.json").read_text()  # nothing waits in a buffer
    names = [event["name"] for event in json.loads(text + "]")]
    assert names == ["process_name", "step 0", "step 1", "step 2"]
    timeline.close()
    timeline.end_part("too late")  # a thread may go on
    assert json.loads((tmp_path / "timeline.json").read_text())[-1]["name"] == "step 2"


def test_run_without_a_timeline_keeps_nothing():
    timeline = Timeline()
    timeline.begin("call", "engine", "sample")
    timeline.end_part("step 1")
    assert not timeline.calls and not timeline.lanes
    timeline.close()


def test_picture_is_of_the_steps_asked_for_also_of_a_killed_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from timeline import Arguments, main

    timeline = Timeline(tmp_path / "timeline.json")
    for step in (1, 2):
        with timeline.span("engine: prompts", f"step {step}"), timeline.span("trainer", "learn"):
            time.sleep(0.001)
        timeline.end_part(f"step {step}")
    options = {"file": tmp_path / "timeline.json", "output": tmp_path / "timeline.png"}
    main(Arguments(first=2, last=2, **options))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunError, match="has no step 3"):
        main(Arguments(first=2, last=3, **options))
