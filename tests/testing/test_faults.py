"""Whatever one rank does, a test ends in time with the right verdict, and the next one runs."""

from __future__ import annotations

import pytest

from conformance.ranks import RankPool
from tests.testing.faults import CRASH, ROWS, SOON, Row
from tests.testing.faulty import BoundedFaults, Faults
from tests.testing.running import Ran, only_expected_processes, run_one

pytestmark = pytest.mark.usefixtures("_bounds")
NEXT = "finds_everything_as_it_was"


def pool() -> RankPool:
    return Faults(NEXT)._ranks().pool()


def commit(cls: type[Faults], method: str, mark: str) -> Ran:
    """Run one test method, then another one, which finds everything as it was."""
    before = run_one(Faults, NEXT)  # starts the pool outside of the time
    assert before.verdict == "pass", before.text
    ran = run_one(cls, method)
    after = run_one(Faults, NEXT)
    assert after.verdict == "pass", after.text
    assert only_expected_processes(mark, pool())
    return ran


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_fault_has_its_verdict_and_the_next_test_runs(row: Row, mark: str) -> None:
    ran = commit(BoundedFaults if row.bounded else Faults, row.name, mark)
    assert ran.verdict == row.verdict, ran.text
    for part in row.says:
        assert part in ran.text
    assert ran.seconds < SOON


@pytest.mark.parametrize(
    ("method", "verdict", "part"),
    [
        ("dies_where_a_failure_is_expected", "failure", f"CRASH: {CRASH}(exit 0)"),
        ("fails_where_a_failure_is_expected", "expected failure", "ValueError: expected"),
        ("fails_in_teardown", "failure", "all ranks: AssertionError: the cleanup fails"),
    ],
)
def test_a_fault_of_unittest_has_its_verdict(
    method: str, verdict: str, part: str, mark: str
) -> None:
    ran = commit(Faults, method, mark)
    assert ran.verdict == verdict, ran.text
    assert part in ran.text
    assert ran.seconds < SOON


def test_each_traceback_is_shown_once_and_the_first_rank_first(mark: str) -> None:
    text = run_one(Faults, "exception_on_all_ranks").text
    assert text.count("Traceback (most recent call last)") == 2
    assert 0 < text.index("traceback of rank 1") < text.index("traceback of rank 0")
    assert "conformance/testing/rank.py" not in text
    text = run_one(Faults, "same_exception_on_all_ranks").text
    assert text.count("traceback of all ranks") == 1
    assert text.count('raise KeyError("the same reason")') == 1
