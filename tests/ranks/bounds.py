"""Bounds of jobs that count from where the ranks are meant to be, however long they take to come.

A job whose ranks hang is tested with a bound of a second or two. On a busy machine ranks may need
that only to get there, and what is found then is not what was meant.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from conformance.ranks.supervise import Supervisor, _Watched

ARRIVED = "it has come to where it stays"
PATIENCE = 120.0
"""Seconds after which the bound counts in any case."""


def say_arrived() -> None:
    """Called on a rank that works on without end from here on."""
    sys.stdout.write(f"{ARRIVED}\n")
    sys.stdout.flush()


def count_bounds_from(
    monkeypatch: pytest.MonkeyPatch, there: Callable[[Sequence[_Watched]], bool]
) -> None:
    """Count the bound of every job from the last moment at which its ranks were not `there`."""
    real = Supervisor._must_stop

    def must_stop(self: Supervisor, watched: Sequence[_Watched], deadline: float) -> bool:
        begun, now = deadline - self.timeout, time.monotonic()
        if now - begun < PATIENCE and not there(watched):
            vars(self)["absent"] = now
        return real(self, watched, vars(self).get("absent", begun) + self.timeout)

    monkeypatch.setattr(Supervisor, "_must_stop", must_stop)


def rest(watched: Sequence[_Watched]) -> bool:
    """Whether each rank has ended, waits for something in all of its threads, or has arrived."""
    return all(
        not item.waiting or _sleeps(item.process.pid) or ARRIVED in item.output.tail()
        for item in watched
    )


def _sleeps(pid: int) -> bool:
    """Whether no thread of a process would go on if it got a processor; True where none is seen."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = thread.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "S":
            return False
    return True
