"""The ledger of claims: what an adapter claims, and what the findings of a run say of each claim.

A finding bears on a claim if its check is about it, or if its case is there only because of it.
Pure: lines of the log in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conformance.adapter import state_claims
from conformance.case import Case
from conformance.checks import CHECKS
from conformance.scenarios import SCENARIOS
from conformance.verdicts import BAD, Finding, Verdict

SEEING = frozenset({"gradients", "clip.gradients"})
"""What a scenario only needs in order to look; checks that are about it say so themselves."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One capability that is claimed.

    Attributes:
        capability: its name.
        passed: how many findings about it are PASS.
        broken: those that are bad, expected ones too.
    """

    capability: str
    passed: int
    broken: tuple[Finding, ...]

    @property
    def verified(self) -> bool:
        """Whether something passed that is about it, and nothing failed."""
        return bool(self.passed) and not self.broken


def ledger(capabilities: Iterable[str], findings: Sequence[Finding]) -> list[Claim]:
    """Every claim of an adapter with what its own findings say of it, in the order given."""
    about = [(finding, bears_on(finding)) for finding in findings]
    return [
        Claim(
            capability=name,
            passed=sum(name in names and f.verdict is Verdict.PASS for f, names in about),
            broken=tuple(
                f for f, names in about if name in names and f.verdict in BAD | {Verdict.XFAIL}
            ),
        )
        for name in capabilities
    ]


def bears_on(finding: Finding) -> frozenset[str]:
    """The capabilities that a finding says something about."""
    case = Case.parse(finding.case)
    known = CHECKS.get(finding.check)
    about = known.needs | known.any_of if known else frozenset[str]()
    scenario = SCENARIOS.get(case.scenario)
    wants = scenario.needs - SEEING if scenario else frozenset[str]()
    kind = dict(case.options).get("kind")
    return about | wants | frozenset(state_claims(kind) if kind else ())


def claims_line(claims: Sequence[Claim], *, whole: bool) -> str:
    """One sentence: how many claims are verified, which are broken and which nothing judged.

    Args:
        claims: of one adapter.
        whole: whether the run left nothing out, so that what was not judged is worth a word.
    """
    broken = [claim for claim in claims if claim.broken]
    unjudged = [claim.capability for claim in claims if not claim.passed and not claim.broken]
    verified = sum(claim.verified for claim in claims)
    parts = [f"claims: {verified} of {len(claims)} verified"]
    if broken:
        parts.append("broken " + ", ".join(map(_told, broken)))
    if unjudged and whole:
        parts.append("not judged " + ", ".join(unjudged))
    return "; ".join(parts) if claims else ""


def _told(claim: Claim) -> str:
    checks = list(dict.fromkeys(finding.check for finding in claim.broken))
    more = f" and {len(checks) - 1} more" if len(checks) > 1 else ""
    return f"{claim.capability} ({checks[0]}{more})"
