"""Expected findings: what a line does to a verdict, and when it is stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.errors import UsageError
from conformance.expectations import Expectation, Expectations, read_expectations
from conformance.globs import matches
from conformance.verdicts import Verdict
from tests.cli.literal import finding

FILE = """\
# what this version gets wrong
losses.value@torch.fully_shard[hybrid]/*: the loss is late, reported upstream: 17

known-flaky:
run.completed@*: slow machine
"""


@pytest.fixture
def expected(tmp_path: Path) -> Expectations:
    path = tmp_path / "expected.txt"
    path.write_text(FILE)
    return read_expectations(path)


@pytest.mark.parametrize(
    ("verdict", "becomes"),
    [
        ("FAIL", "XFAIL"),
        ("HANG", "XFAIL"),
        ("DESYNC", "XFAIL"),
        ("CRASH", "XFAIL"),
        ("PASS", "XPASS"),
        ("UNSUPPORTED", "UNSUPPORTED"),
        ("ERROR", "ERROR"),
        ("VACUOUS", "VACUOUS"),
    ],
)
def test_an_expected_finding_changes_its_verdict(
    expected: Expectations, verdict: str, becomes: str
) -> None:
    found, reason = expected.apply(finding(verdict, variant="hybrid"))
    assert found.verdict == becomes
    changed = verdict != becomes
    assert reason == ("the loss is late, reported upstream: 17" if changed else "")


@pytest.mark.parametrize(("verdict", "becomes"), [("FAIL", "XFAIL"), ("PASS", "PASS")])
def test_a_flaky_finding_may_pass(expected: Expectations, verdict: str, becomes: str) -> None:
    assert expected.apply(finding(verdict, "run.completed"))[0].verdict == becomes


def test_other_findings_keep_their_verdict(expected: Expectations) -> None:
    assert expected.apply(finding("FAIL"))[0].verdict is Verdict.FAIL


def test_a_line_is_stale_until_a_finding_matches_it(expected: Expectations) -> None:
    pattern = "losses.value@torch.fully_shard[hybrid]/*"
    assert expected.stale(["torch.fully_shard"]) == [pattern]
    assert expected.stale(["torch.DistributedDataParallel"]) == []
    expected.apply(finding("UNSUPPORTED", variant="hybrid"))
    assert expected.stale(["torch.fully_shard"]) == []


@pytest.mark.parametrize(
    ("verdict", "becomes"),
    [("FAIL", "XFAIL"), ("BLOCKED", "XFAIL"), ("VACUOUS", "XFAIL"), ("PASS", "PASS")],
)
def test_a_line_for_every_check_is_about_a_case_that_ends_early(verdict: str, becomes: str) -> None:
    line = Expectation(pattern="*@torch.fully_shard/*", reason="raises")
    assert Expectations([line]).apply(finding(verdict))[0].verdict == becomes


def test_a_line_for_every_check_is_stale_until_something_bad_matches_it() -> None:
    lines = Expectations([Expectation(pattern="*@torch.fully_shard/*", reason="raises")])
    lines.apply(finding("PASS"))
    assert lines.stale(["torch.fully_shard"]) == ["*@torch.fully_shard/*"]
    lines.apply(finding("CRASH"))
    assert lines.stale(["torch.fully_shard"]) == []


def test_expectations_survive_the_header(expected: Expectations) -> None:
    assert Expectations.of(expected.as_json()).lines == expected.lines


@pytest.mark.parametrize("line", ["losses.value@a/b", "losses.value: no adapter", "a@b/c: "])
def test_a_line_without_pattern_or_reason_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "expected.txt"
    path.write_text(f"\n{line}\n")
    with pytest.raises(UsageError, match=r"expected\.txt', line 2: .* is not 'finding pattern"):
        read_expectations(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_expectations(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("pattern", "held"),
    [
        ("a[b=*]/c", True),
        ("a[?=1]/c", True),
        ("a[b=1]/c", True),
        ("a[bc]/c", False),
        ("a[b=1]", False),
        ("A[b=1]/c", False),
    ],
)
def test_brackets_of_a_pattern_are_plain(pattern: str, held: bool) -> None:  # noqa: FBT001
    assert matches("a[b=1]/c", pattern) is held
