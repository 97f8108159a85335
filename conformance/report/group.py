"""Which bad findings are one story: the first divergence of a case, and cases that fail alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from conformance.causes import Cause
from conformance.report.lines import Reported, Role
from conformance.verdicts import BAD, Finding, Verdict, told_first


@dataclass(frozen=True, kw_only=True)
class CaseFailure:
    """What went wrong on one case: its first divergence.

    Attributes:
        finding: the earliest bad finding; that a rank died, if one did.
        later: the other checks that failed or were blocked.
    """

    finding: Finding
    later: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Cases whose first divergence is of the same check with the same cause, or exception."""

    failures: tuple[CaseFailure, ...]

    @property
    def unexplained(self) -> bool:
        """Whether they are like no known defect."""
        return self.failures[0].finding.cause is Cause.UNEXPLAINED


def families(reported: Sequence[Reported]) -> list[Family]:
    """All failures of the judged adapters, in the order in which the first of each kind came.

    Those that are like no known defect come last: what is explained may explain them too.
    """
    groups: dict[tuple[str, ...], list[CaseFailure]] = {}
    for failure in failures_of(reported):
        finding = failure.finding
        what = _exception(finding.sentence) if finding.cause is Cause.EXCEPTION else ""
        key = (finding.adapter, finding.verdict, finding.check, str(finding.cause), what)
        groups.setdefault(key, []).append(failure)
    found = [Family(failures=tuple(group)) for group in groups.values()]
    return sorted(found, key=lambda family: family.unexplained)


def _exception(sentence: str) -> str:
    """Type and beginning of the message, without numbers: ``RuntimeError: no group #``."""
    return re.sub(r"\d+", "#", sentence.partition(": ")[2])[:60]


def failures_of(reported: Sequence[Reported]) -> list[CaseFailure]:
    """One entry per case with bad findings. An XPASS is a story of its own."""
    cases: dict[tuple[str, str, str], list[Finding]] = {}
    failures: list[CaseFailure] = []
    for item in reported:
        finding = item.finding
        if item.role is not Role.JUDGED:
            continue
        if finding.verdict is Verdict.XPASS:
            failures.append(CaseFailure(finding=finding, later=()))
        elif finding.verdict in BAD or finding.verdict is Verdict.BLOCKED:
            cases.setdefault((finding.adapter, finding.variant, finding.case), []).append(finding)
    for findings in cases.values():
        bad = [f for f in findings if f.verdict in BAD]
        if bad:
            first = min(bad, key=lambda f: told_first(f.verdict, f.moment))
            later = tuple(f.check for f in findings if f is not first)
            failures.append(CaseFailure(finding=first, later=later))
    return failures
