"""The ledger of claims: what an adapter claims, and what the findings of a run say of each claim.

A finding bears on a claim if its check is about it, or if its case is there only because of it. It
breaks the claim if what it is about was seen to be wrong: what an exception, a hang or a crash cut
off was not seen, unless the claim is what was being tried.

Pure: lines of the log in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conformance import models
from conformance.adapter import state_claims
from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.optimizers import WHOLE_TENSOR
from conformance.plan import needed_by
from conformance.report.words import number
from conformance.scenarios import SCENARIOS
from conformance.verdicts import BAD, Finding, Verdict

SEEING = frozenset({"gradients", "clip.gradients"})
"""What a scenario only needs in order to look; checks that are about it say so themselves."""

NORMS = "clip.p"
"""What the names of the norms to clip by begin with; a finding about one says which."""

ENDED_EARLY = frozenset({Cause.EXCEPTION, Cause.HUNG, Cause.CRASHED, Cause.DESYNCHRONISED})

_RIGHT = frozenset({Verdict.PASS, Verdict.XPASS})
_WRONG = BAD - _RIGHT | {Verdict.XFAIL, Verdict.BLOCKED}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One capability that is claimed.

    Attributes:
        capability: its name.
        passed: how many findings about it are PASS.
        broken: those that show it broken.
        known: those that do, but were expected to.
        unseen: cases that ended before it could be seen.
    """

    capability: str
    passed: int
    broken: tuple[Finding, ...] = ()
    known: tuple[Finding, ...] = ()
    unseen: frozenset[str] = frozenset()

    @property
    def verified(self) -> bool:
        """Whether something passed that is about it, and nothing that was seen failed."""
        return bool(self.passed) and not self.broken and not self.known

    @property
    def never_seen(self) -> bool:
        """Whether nothing says anything of it."""
        return not (self.passed or self.broken or self.known)


def ledger(capabilities: Iterable[str], findings: Sequence[Finding]) -> list[Claim]:
    """Every claim of an adapter with what its own findings say of it, in the order given."""
    about = [(finding, bears_on(finding)) for finding in findings]
    return [
        _claim(name, [(f, name in shown_by(f)) for f, on in about if name in on])
        for name in capabilities
    ]


def _claim(name: str, about: Sequence[tuple[Finding, bool]]) -> Claim:
    """One claim, from the findings about it and whether each shows what it says of it."""
    wrong = [(f, shows) for f, shows in about if f.verdict in _WRONG]
    seen = [f for f, shows in wrong if shows]
    right = [f for f, _ in about if f.verdict in _RIGHT]
    return Claim(
        capability=name,
        passed=len(right),
        broken=tuple(f for f in seen if f.verdict is not Verdict.XFAIL),
        known=tuple(f for f in seen if f.verdict is Verdict.XFAIL),
        unseen=_places(f for f, shows in wrong if not shows) - _places(right) - _places(seen),
    )


def _places(findings: Iterable[Finding]) -> frozenset[str]:
    return frozenset(finding.case for finding in findings)


def bears_on(finding: Finding) -> frozenset[str]:
    """The capabilities that a finding says something about."""
    known = CHECKS.get(finding.check)
    about = known.needs | known.any_of if known else frozenset[str]()
    norm = norm_of(finding)
    if norm:
        about = frozenset(name for name in about if not name.startswith(NORMS)) | norm
    return about | tried_by(finding)


def tried_by(finding: Finding) -> frozenset[str]:
    """The capabilities that the finding's case is there for."""
    case = Case.parse(finding.case)
    scenario = SCENARIOS.get(case.scenario)
    wants = scenario.needs - SEEING if scenario else frozenset[str]()
    kind = dict(case.options).get("kind")
    whole = ["optimizer.whole"] if case.optimizer in WHOLE_TENSOR else []
    model = models.cases().get(case.model)
    wants |= needed_by(model) if model else frozenset()
    return wants | frozenset([*(state_claims(kind) if kind else ()), *whole])


def norm_of(finding: Finding) -> frozenset[str]:
    """The norm that the finding is about, by its capability; empty if it names none."""
    norm = finding.where.get("p")
    return frozenset({f"{NORMS}{norm}"}) if norm is not None else frozenset()


def shown_by(finding: Finding) -> frozenset[str]:
    """The capabilities that a finding that is not a PASS shows to be wrong.

    A comparison shows what it is about. The early end of a case shows what was being tried: the
    norm that was asked for, or what the case is there for, once it has come that far.
    """
    if finding.cause is None and finding.verdict is not Verdict.FAIL:
        return frozenset()  # blocked, whatever was expected of it
    if finding.cause not in ENDED_EARLY:
        return bears_on(finding)
    built = finding.moment is not None and finding.moment[0] > 0
    trains_first = "kind" in dict(Case.parse(finding.case).options)
    training = trains_first and str(finding.where.get("phase", "")).startswith("step ")
    return norm_of(finding) | (tried_by(finding) if built and not training else frozenset())


def claims_line(claims: Sequence[Claim], *, whole: bool) -> str:
    """How many claims are verified, which are broken and which nothing judged, in one line.

    Args:
        claims: of one adapter.
        whole: whether the run left nothing out, so that what was not judged is worth a word.
    """
    broken = [claim for claim in claims if claim.broken]
    known = [claim for claim in claims if claim.known and not claim.broken]
    never = [c.capability for c in claims if c.never_seen and (whole or c.unseen)]
    parts = [f"claims: {sum(claim.verified for claim in claims)} of {len(claims)} verified"]
    if broken:
        parts.append("broken: " + ", ".join(map(_told, broken)))
    if known:
        told = (f"{claim.capability} ({_cases(claim.known)})" for claim in known)
        parts.append("broken as expected: " + ", ".join(told))
    if never:
        parts.append("never seen: " + ", ".join(never))
    parts += _cut_short([claim for claim in claims if claim.verified])
    return "; ".join(parts) if claims else ""


def _cut_short(verified: Sequence[Claim]) -> list[str]:
    """Of what other cases verified, how many ended before it: one part for each number."""
    groups: dict[int, list[str]] = {}
    for claim in verified:
        groups.setdefault(len(claim.unseen), []).append(claim.capability)
    return [
        f"{number(times, 'case')} ended before {'it' if times == 1 else 'they'} showed"
        f" {', '.join(names)}"
        for times, names in sorted(groups.items())
        if times
    ]


def _cases(findings: Sequence[Finding]) -> str:
    return number(len(_places(findings)), "case")


def _told(claim: Claim) -> str:
    checks = list(dict.fromkeys(finding.check for finding in claim.broken))
    more = f" and {number(len(checks) - 1, 'more check')}" if len(checks) > 1 else ""
    return f"{claim.capability} ({checks[0]}{more})"
