"""Run one test method of a class as unittest does, and look for processes that it left."""

from __future__ import annotations

import os
import time
import unittest
from dataclasses import dataclass
from pathlib import Path

from conformance.ranks import RankPool

MARK = "FSDP_TEST_FAULTS_MARK"
PATIENCE = 60.0
"""Seconds after which a process that was ended is one that was not."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How one test ended."""

    verdict: str
    text: str
    seconds: float


def run_one(cls: type[unittest.TestCase], method: str) -> Ran:
    result = unittest.TestResult()
    started = time.monotonic()
    cls(method).run(result)
    seconds = time.monotonic() - started
    assert result.testsRun == 1
    for verdict, found in (
        ("error", result.errors),
        ("failure", result.failures),
        ("skip", result.skipped),
        ("expected failure", result.expectedFailures),
    ):
        if found:
            assert len(found) == 1, found
            return Ran(verdict=verdict, text=found[0][1], seconds=seconds)
    if result.unexpectedSuccesses:
        return Ran(verdict="unexpected success", text="", seconds=seconds)
    return Ran(verdict="pass", text="", seconds=seconds)


def marked_processes(value: str) -> set[int]:
    """Living processes that were started with `MARK=value` in their environment."""
    wanted = f"{MARK}={value}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            dead = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not dead and wanted in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
        except OSError:
            continue
    return found - {os.getpid()}


def only_expected_processes(
    value: str, pool: RankPool, others: frozenset[int] = frozenset()
) -> bool:
    """Whether the forkserver and the ranks that the pool keeps live, and soon no other ones.

    Who was killed lives on until it gets a processor, on a busy machine for a while.
    """
    server = pool._server
    assert server is not None
    expected = {server._process.pid} | {rank.pid for rank in pool._kept}
    deadline = time.monotonic() + PATIENCE
    while (found := marked_processes(value) - others) != expected:
        if not expected <= found or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
