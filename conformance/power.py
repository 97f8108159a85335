"""Whether a check could have failed at all in the world of a run, read from its mutants."""

from __future__ import annotations

from dataclasses import replace

from conformance.mutants import MUTANTS
from conformance.report.words import number
from conformance.verdicts import Finding, Verdict


def without_power(finding: Finding, world: int) -> Finding:
    """A PASS that no mutant could have spoilt in this world becomes NO_POWER, with the reason."""
    if finding.verdict is not Verdict.PASS:
        return finding
    own = [mutant for mutant in MUTANTS.values() if mutant.check == finding.check]
    if not own or any(mutant.world <= world for mutant in own):
        return finding
    needed = min(mutant.world for mutant in own)
    names = ", ".join(sorted(mutant.name for mutant in own))
    return replace(
        finding,
        verdict=Verdict.NO_POWER,
        sentence=f"cannot fail with {number(world, 'rank')}: its mutants ({names}) show from"
        f" {number(needed, 'rank')} on",
    )
