"""Plain lines for output that is no terminal: one a finding, or a few for all of a case."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.report.lines import Reported, Role
from conformance.report.words import number, shortened
from conformance.verdicts import REFUSED, UNCLAIMED, Finding, Verdict

_EXPECTED = {Verdict.XFAIL: "as expected", Verdict.XPASS: "expected to fail"}
"""How the reason of an expectation is told, by the verdict that it led to."""
_PASSED = ("PASS",)
_UNCLAIMED = (UNCLAIMED,)


def finding_text(reported: Reported) -> str:
    """One plain line per finding, for output that is no terminal."""
    finding = reported.finding
    tail = shortened(finding.sentence) or _margin(finding)
    known = _EXPECTED.get(finding.verdict, "expected")
    reason = f" [{known}: {reported.reason}]" if reported.reason else ""
    place = f"{finding.id}{_role(reported)}"
    return f"{finding.verdict:<11} {place}{'  ' + tail if tail else ''}{reason}"


def case_lines(reported: Sequence[Reported]) -> list[str]:
    """The findings of one case: a line for each reason why something is not PASS, one for PASS.

    What is not claimed is counted only, and a claim that was tried out unasked is not told.
    """
    stories: dict[tuple[str, ...], list[Reported]] = {}
    for one in reported:
        stories.setdefault(_story(one), []).append(one)
    unclaimed = len(stories.pop(_UNCLAIMED, ()))
    lines: list[str] = []
    for story, members in stories.items():
        first, later = members[0], len(members) - 1
        if story == _PASSED:
            place = f"{first.finding.id.partition('@')[2]}{_role(first)}"
            besides = f", {unclaimed} not claimed" if unclaimed else ""
            lines.append(f"PASS        {place}  {number(later + 1, 'check')}{besides}")
        else:
            more = f" (and {number(later, 'later check')})" if later else ""
            lines.append(f"{finding_text(first)}{more}")
    return lines


def _story(one: Reported) -> tuple[str, ...]:
    """What findings of one case have in common that say the same of it."""
    finding = one.finding
    if finding.verdict is Verdict.PASS:
        return _PASSED
    if finding.verdict is Verdict.UNSUPPORTED:
        if finding.sentence.startswith((UNCLAIMED, "none is claimed")):
            return _UNCLAIMED
        if finding.sentence.startswith(REFUSED):
            return (REFUSED,)
    # one exception is told by the check that it is a FAIL of and by those that it blocks
    return (finding.sentence, one.reason) if finding.sentence else (finding.check,)


def _role(reported: Reported) -> str:
    return "" if reported.role is Role.JUDGED else f" ({reported.role})"


def _margin(finding: Finding) -> str:
    if finding.error is None or finding.bound is None:
        return ""
    return f"error {finding.error:.2g}, bound {finding.bound:.2g}"
