"""What a stored run is worth that was cut short: its last case may have lost findings. No ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from conformance.cli.repeating import comparison_text, judge_again, recheck_command
from conformance.item import Item
from conformance.matrix import Matrix, NotStored
from conformance.report.lines import Log, Reported, read_log
from conformance.report.log import RunLog
from tests.cli.literal import ADAPTER, finding, header

CASES = ("mlp/train/accumulation=1,optimizer=sgd", "tiny/train/accumulation=1,optimizer=sgd")
CHECKS = ("run.completed", "losses.value", "gradients.value")


def of(case: str, *verdicts: str) -> list[Reported]:
    return [
        Reported(finding=finding(verdict, check, case=case))
        for check, verdict in zip(CHECKS, verdicts, strict=False)
    ]


WHOLE = {CASES[0]: of(CASES[0], "PASS", "PASS", "PASS"), CASES[1]: of(CASES[1], *["FAIL"] * 3)}
"""What judging the histories gives, by case."""


def stored(folder: Path, reported: Sequence[Reported], *, finished: bool = False) -> Log:
    with RunLog(folder, header(checks=list(CHECKS), cases=2)) as log:
        for one in reported:
            log.add(one)
        if finished:
            log.finish(stale=(), seconds=1.0)
    return read_log(folder / "run.jsonl")


@pytest.fixture(autouse=True)
def histories(monkeypatch) -> None:
    def report(self: Matrix, item: Item) -> list[Reported]:
        return WHOLE[str(item.planned.case)]

    monkeypatch.setattr(Matrix, "report", report)


def test_a_case_in_which_the_log_was_cut_short_is_named_and_not_judged(
    tmp_path: Path, capsys
) -> None:
    stored(tmp_path, [*WHOLE[CASES[0]], *WHOLE[CASES[1]][:1]])
    assert recheck_command(tmp_path) == 2  # its failures are not the run's
    shown = capsys.readouterr().out
    assert "new: " not in shown
    assert "FAIL" not in shown
    assert "so far 1 of 2 cases: 3 PASS" in shown
    told = "unfinished, and not judged, though the log has 1 finding of it:\n"
    assert f"{told}      {ADAPTER}/{CASES[1]}#0\n" in shown


def test_a_partial_log_that_ends_between_two_cases_has_no_unfinished_one(
    tmp_path: Path, capsys
) -> None:
    stored(tmp_path, [*WHOLE[CASES[0]], *WHOLE[CASES[1]]])
    assert recheck_command(tmp_path) == 1
    shown = capsys.readouterr().out
    assert "recheck: all 6 findings are the same (6 judged)\n" in shown
    assert "unfinished" not in shown
    # which is no consequence of what is missing
    assert shown.endswith(
        "the run is partial, so not everything was judged; what was makes the exit status 1\n"
    )


@pytest.mark.parametrize(
    ("lines", "finished"),
    [
        ([*WHOLE[CASES[0]][:2], *WHOLE[CASES[1]]], False),  # not the last case of a partial log
        ([*WHOLE[CASES[0]], *WHOLE[CASES[1]][:2]], True),  # the last case of a whole log
    ],
)
def test_a_finding_that_no_cut_can_have_taken_is_new(
    tmp_path: Path,
    lines: list[Reported],
    finished: bool,  # noqa: FBT001
) -> None:
    log = stored(tmp_path, lines, finished=finished)
    again = judge_again(log, tmp_path)
    assert not again.unfinished
    assert comparison_text(log, again).startswith("new: ")


def test_an_unfinished_case_is_not_among_those_without_history(tmp_path: Path, monkeypatch) -> None:
    def report(self: Matrix, item: Item) -> list[Reported]:
        if str(item.planned.case) == CASES[0]:
            raise NotStored
        return WHOLE[CASES[1]]

    monkeypatch.setattr(Matrix, "report", report)
    log = stored(tmp_path, [*WHOLE[CASES[0]], *WHOLE[CASES[1]][:2]])
    unfinished, _, missing = comparison_text(log, judge_again(log, tmp_path)).splitlines()
    assert "though the log has 2 findings of it" in unfinished
    assert missing == "not judged again: 3 findings, of 1 case without history"
