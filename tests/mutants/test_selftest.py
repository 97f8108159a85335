"""What becomes of a mutant: told by hand, and measured on a handful with real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conformance.causes import Cause
from conformance.mutants import MUTANTS
from conformance.selftest import Kill, assess, diagonal
from conformance.session import Setting
from conformance.verdicts import Finding, Verdict

ROW = MUTANTS["step_counted_twice"]


def finding(check: str, verdict: Verdict = Verdict.PASS, cause: Cause | None = None) -> Finding:
    return Finding(
        check=check,
        adapter=ROW.base,
        variant="default",
        case=ROW.case,
        seed=0,
        verdict=verdict,
        cause=cause,
    )


RIGHT = finding(ROW.check, Verdict.FAIL, ROW.cause)
OTHER = finding("losses.value", Verdict.FAIL, Cause.STALE)
QUIET = [finding("losses.value"), finding(ROW.check)]


@pytest.mark.parametrize(
    ("mutated", "base", "expected"),
    [
        ([RIGHT, OTHER], QUIET, Kill.KILLED),
        (QUIET, QUIET, Kill.SURVIVED),
        ([OTHER, finding(ROW.check)], QUIET, Kill.SURVIVED),
        ([OTHER], QUIET, Kill.SURVIVED),
        ([OTHER, finding(ROW.check, Verdict.BLOCKED)], QUIET, Kill.SURVIVED),
        ([OTHER, RIGHT], QUIET, Kill.NOT_FIRST),
        ([replace(RIGHT, cause=Cause.ZERO)], QUIET, Kill.WRONG_CAUSE),
        ([replace(RIGHT, verdict=Verdict.CRASH)], QUIET, Kill.WRONG_CAUSE),
        ([RIGHT], [OTHER], Kill.FALSE_ALARM),
        ([RIGHT], [finding("losses.value", Verdict.ERROR)], Kill.FALSE_ALARM),
    ],
)
def test_a_mutant_is_killed_only_by_its_check_first_with_its_cause(
    mutated: list[Finding], base: list[Finding], expected: Kill
) -> None:
    result = assess(ROW, mutated, base)
    assert result.kill is expected, result.sentence
    assert result.mutant == ROW.name


def test_a_world_that_is_too_small_is_said_and_nothing_runs(tmp_path: Path) -> None:
    results = diagonal(Setting(world=1, directory=tmp_path), [replace(ROW, world=2)])
    assert [result.kill for result in results] == [Kill.WORLD_TOO_SMALL]
    assert list(tmp_path.iterdir()) == []


def test_a_defect_of_streams_is_not_looked_for_where_there_are_none(tmp_path: Path) -> None:
    rows = [row for row in MUTANTS.values() if row.device is not None]
    assert rows
    results = diagonal(Setting(directory=tmp_path), rows)
    assert {result.kill for result in results} == {Kill.OTHER_DEVICE}
    assert list(tmp_path.iterdir()) == []
    assert all(row.shows_on("other") and not row.shows_on("cpu") for row in rows)


def test_trouble_with_one_mutant_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = replace(ROW, name="broken", case="no-such-model/train")
    told: list[str] = []
    results = diagonal(
        Setting(directory=tmp_path), [broken], done=lambda result: told.append(result.mutant)
    )
    assert [result.kill for result in results] == [Kill.ERROR]
    assert "no-such-model" in results[0].sentence
    assert told == ["broken"]


HANDFUL = ("step_counted_twice", "wrapper_prefix_in_keys", "moments_shifted_by_load", "rank_killed")


def test_a_handful_is_killed_and_mislabelled_ones_are_not(tmp_path: Path) -> None:
    mislabelled = {
        replace(ROW, cause=Cause.ZERO): Kill.WRONG_CAUSE,
        replace(ROW, check="optimizer.state"): Kill.NOT_FIRST,
        replace(ROW, check="gradients.scale"): Kill.SURVIVED,
        replace(ROW, check="resume.model"): Kill.SURVIVED,
    }
    chosen = [*(MUTANTS[name] for name in HANDFUL), *mislabelled]
    results = diagonal(Setting(directory=tmp_path), chosen)
    expected = [*(Kill.KILLED for _ in HANDFUL), *mislabelled.values()]
    assert [result.kill for result in results] == expected, [r.sentence for r in results]
