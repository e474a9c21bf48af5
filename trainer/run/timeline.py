"""timeline.json: what every process of a run did when, in Chrome's trace event format, for Perfetto or chrome://tracing.

The driver writes all of it, by its own clock: a call of an actor lasts from when it is made until its answer is seen.
The processes of the file are the driver with its steps, in which it waits, each actor with the methods that it was
called for, each engine's prompts, and rewards. What a process does at the same time is in several lanes (`tid`).
"""

import json
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path

DRIVER = "driver"


class Timeline:
    """A new file at this path; None: nothing is recorded. Each event is written at once, so a killed run leaves all of
    them, without the last bracket, which the format does not want."""

    def __init__(self, path: Path | None = None):
        self.file = path and path.open("w", buffering=1)
        self.lock = threading.Lock()
        self.lanes: dict[str, list[int]] = {}  # by process: when the last span of each of its lanes ended
        self.calls: dict[Hashable, tuple[str, str, int]] = {}  # actor, method and beginning of calls without an answer
        self.part_began, self.separator = time.time_ns(), "["

    def begin(self, call: Hashable, actor: str, method: str) -> None:
        """This call has been made."""
        if self.file:
            self.calls[call] = (actor, method, time.time_ns())

    def end(self, call: Hashable) -> None:
        """This call has an answer."""
        if call in self.calls:
            self.record(*self.calls.pop(call))

    def end_part(self, name: str) -> None:
        """A part of the run, such as a step, ends: it began where the last one ended."""
        self.record(DRIVER, name, self.part_began, lane=0)
        self.part_began = time.time_ns()

    @contextmanager
    def span(self, process: str, name: str) -> Iterator[None]:
        """What a process does inside this context."""
        began = time.time_ns()
        try:
            yield
        finally:
            self.record(process, name, began)

    def record(self, process: str, name: str, began: int, lane: int | None = None) -> None:
        """Write what a process did from `began`, in nanoseconds since the epoch, until now. It takes the first lane
        that was free then, unless it is told one, to enclose what is there."""
        with self.lock:
            if not self.file:
                return
            if process not in self.lanes:
                self.lanes[process] = []
                self._write(process, "process_name", ph="M", tid=0, args={"name": process})
            ends, now = self.lanes[process], time.time_ns()
            if lane is None:
                lane = next((lane for lane, end in enumerate(ends) if end <= began), len(ends))
            ends[lane : lane + 1] = [now]
            self._write(process, name, ph="X", tid=lane, ts=began / 1e3, dur=(now - began) / 1e3)

    def close(self) -> None:
        with self.lock:
            if self.file:
                self.file.write("\n]\n" if self.lanes else "[]\n")
                self.file.close()
            self.file = None

    def _write(self, process: str, name: str, **event) -> None:
        event = {"name": name, "pid": [*self.lanes].index(process)} | event
        self.file.write(f"{self.separator}\n{json.dumps(event)}")
        self.separator = ","
