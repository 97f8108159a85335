"""Whatever one rank does, a test ends in time with the right verdict, and the next one runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from conformance.ranks import RankPool, supervise
from tests.testing.faults import BoundedFaults, Faults
from tests.testing.running import MARK, expected_processes, marked_processes, run_one

NEXT = "finds_everything_as_it_was"


class Row(NamedTuple):
    """A fault, its verdict, what its message holds, and the seconds that it may take."""

    method: str
    verdict: str
    parts: tuple[str, ...] = ()
    seconds: float = 4.0
    cls: type[Faults] = Faults


CRASH = "CRASH: rank 1 died without a report "

ROWS = (
    Row("exception", "failure", ("ERROR: rank 1: ValueError: rank 1 has its reasons",)),
    Row(
        "exception_on_all_ranks", "failure", ("ERROR: rank 1: KeyError: 'reason of rank 1'; rank",)
    ),
    Row("same_exception_on_all_ranks", "failure", ("ERROR: all ranks: KeyError: 'the same",)),
    Row("sigkill", "failure", (CRASH + "(signal SIGKILL)", "its last collective was all_reduce")),
    Row("sigkill_with_nothing_left_to_do", "failure", (CRASH + "(signal SIGKILL)",)),
    Row("sigsegv", "failure", (CRASH + "(signal SIGSEGV)", "Segmentation fault")),
    Row("sigabrt", "failure", (CRASH + "(signal SIGABRT)",)),
    Row("os_exit_0", "failure", (CRASH + "(exit 0)",)),
    Row("os_exit_3", "failure", (CRASH + "(exit 3)",)),
    Row("sys_exit_0", "failure", (CRASH + "(exit 0)",)),
    Row("skip_on_one_rank", "failure", ("ERROR: rank 1 skipped (not here), rank 0 did not",)),
    Row(
        "endless_python_loop",
        "failure",
        ("HANG: rank 1 did not end within 1.5 s, it is at endless_python_loop", "Python stacks"),
        cls=BoundedFaults,
    ),
    Row(
        "endless_native_loop",
        "failure",
        ("HANG: rank 1 did not end within 1.5 s", "in endless_native_loop"),
        cls=BoundedFaults,
    ),
    Row(
        "never_enters_a_collective",
        "failure",
        ("HANG: rank 1 never entered all_reduce 1 of group default; rank 0 waits there since",),
        cls=BoundedFaults,
    ),
    Row("wait_for_rank_1", "failure", ("HANG: rank 1 ended and never entered all_reduce 1",)),
    Row("another_collective", "failure", ("DESYNC: rank ", "different op")),
    Row("another_shape", "failure", ("DESYNC: rank ", "different numel")),
    Row("another_dtype", "failure", ("DESYNC: rank ", "different dtype")),
    Row("ignores_sigterm", "failure", ("HANG: rank 1 did not end within",), cls=BoundedFaults),
    Row("writes_100_megabytes", "pass", seconds=10.0),
    Row("a_child_outlives_it", "pass"),
    Row("a_thread_never_ends", "pass"),
    Row("out_of_memory", "failure", ("ERROR: rank 1: RuntimeError:", "DefaultCPUAllocator")),
    Row("corrupt_report", "failure", ("CRASH: rank 1 sent a report that cannot be read",)),
    Row("dies_where_a_failure_is_expected", "failure", (CRASH + "(exit 0)",)),
    Row("fails_where_a_failure_is_expected", "expected failure", ("ValueError: expected",)),
    Row("fails_in_teardown", "failure", ("ERROR: all ranks: AssertionError: the cleanup fails",)),
    Row("leaves_default_dtype", "pass"),
    Row("leaves_patched_function", "pass"),
    Row("leaves_environment", "pass"),
    Row("leaves_random_state", "pass"),
)


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """Every process that these tests start carries it."""
    value = str(os.getpid())
    os.environ[MARK] = value
    yield value
    pool().close()
    del os.environ[MARK]


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE", 0.7)


def pool() -> RankPool:
    return Faults(NEXT)._ranks().pool()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.method)
def test_a_fault_has_its_verdict_and_the_next_test_runs(row: Row, mark: str) -> None:
    before = run_one(Faults, NEXT)  # starts the pool outside of the time
    assert before.verdict == "pass", before.text
    ran = run_one(row.cls, row.method)
    assert ran.verdict == row.verdict, ran.text
    for part in row.parts:
        assert part in ran.text
    assert ran.seconds < row.seconds
    after = run_one(Faults, NEXT)
    assert after.verdict == "pass", after.text
    assert marked_processes(mark) == expected_processes(pool())


def test_each_traceback_is_shown_once_and_the_first_rank_first(mark: str) -> None:
    text = run_one(Faults, "exception_on_all_ranks").text
    assert text.count("Traceback (most recent call last)") == 2
    assert 0 < text.index("traceback of rank 1") < text.index("traceback of rank 0")
    assert "conformance/testing/rank.py" not in text
    text = run_one(Faults, "same_exception_on_all_ranks").text
    assert text.count("traceback of all ranks") == 1
    assert text.count('raise KeyError("the same reason")') == 1
