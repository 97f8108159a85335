"""Whatever an adapter's verb does on a rank, its case has the right verdict, the next job runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.case import Case
from conformance.checks import CHECKS
from conformance.ranks import Job, RankVerdict
from conformance.session import Session, Setting
from conformance.stored import judge_stored
from conformance.subject import Subject
from conformance.verdicts import COMPLETED, Finding, Verdict
from tests.testing.faults import ROWS, SOON, Row
from tests.testing.faulty import FAULTY_STEP, FaultyAdapter, look
from tests.testing.running import marked_processes, only_expected_processes

ADAPTER = f"{FaultyAdapter.__module__}:{FaultyAdapter.__name__}"
CASE = Case.parse("mlp/eval_first/accumulation=1,optimizer=sgd")
JUDGED = (COMPLETED, "losses.value", "parameters.end")
BOUND = 1.5
TELLING = {
    *("exception", "skip_on_one_rank", "sigkill", "os_exit_0", "corrupt_report"),
    *("never_enters_a_collective", "waits_for_a_rank_that_ended", "another_dtype"),
    *("a_session_outlives_it", "leaves_patched_function", "writes_100_megabytes"),
}
"""One or two for every verdict, and for all that a rank may leave; `test_faults` commits all."""


@pytest.fixture(scope="module")
def others(mark: str) -> frozenset[int]:
    """Marked processes that live already."""
    return frozenset(marked_processes(mark))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, others: frozenset[int]) -> Iterator[Session]:
    directory = tmp_path_factory.mktemp("faults")
    with Session(Setting(directory=directory, timeout=120.0)) as made:
        yield made


def judged(session: Session, variant: str, timeout: float | None = None) -> dict[str, Finding]:
    directory: Path = session.run(Subject(adapter=ADAPTER, variant=variant), CASE, timeout=timeout)
    checks = [CHECKS[id] for id in JUDGED]
    findings = judge_stored(directory, session.setting.directory, checks)
    assert sorted(finding.check for finding in findings) == sorted(JUDGED)
    return {finding.check: finding for finding in findings}


@pytest.mark.usefixtures("_bounds")
@pytest.mark.parametrize(
    "row",
    [r if r.name in TELLING else pytest.param(r, marks=pytest.mark.long) for r in ROWS],
    ids=lambda row: row.name,
)
def test_a_fault_has_its_verdict_and_the_next_job_runs(
    row: Row, session: Session, mark: str, others: frozenset[int]
) -> None:
    found = judged(session, row.name, BOUND if row.bounded else None)
    completed = found[COMPLETED]
    assert (completed.verdict, completed.cause) == row.judged, completed.sentence
    assert row.tells in completed.sentence
    assert completed.seconds < SOON
    if completed.verdict is Verdict.FAIL:
        assert completed.where["phase"] == f"step {FAULTY_STEP}"
    if completed.verdict is not Verdict.PASS:
        assert found["losses.value"].verdict in (Verdict.BLOCKED, Verdict.FAIL)
        assert found["parameters.end"].verdict in (Verdict.BLOCKED, Verdict.FAIL)
    pool = session._pool(session.setting.world)
    after = pool.run(Job.of(look))
    assert after.verdict is RankVerdict.OK, after
    assert only_expected_processes(mark, pool, others)


def test_a_case_without_a_fault_passes_after_all_that(session: Session) -> None:
    found = judged(session, "default")
    assert {finding.verdict for finding in found.values()} == {Verdict.PASS}
