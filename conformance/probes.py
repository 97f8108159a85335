"""What came of trying out a capability that an adapter does not claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conformance.plan import Planned
from conformance.verdicts import COMPLETED, REFUSED, Finding, Verdict

CLAIM_PREFIX = "claim."


def claim_finding(planned: Planned, findings: Sequence[Finding]) -> Finding:
    """One UNSUPPORTED finding for the capabilities that `planned` tried out.

    A check that needs yet another capability says nothing of these, nor does a machine with too few
    devices; a refused build does.
    """
    names = " and ".join(planned.probe)
    passed = [f.check for f in findings if f.verdict is Verdict.PASS]
    unjudged = [
        f
        for f in findings
        if f.verdict is Verdict.UNSUPPORTED and not f.sentence.startswith(REFUSED)
    ]
    bad = next((f for f in findings if f.verdict is not Verdict.PASS and f not in unjudged), None)
    works = bad is None and any(check != COMPLETED for check in passed)
    if works:
        sentence = (
            f"not claimed, but it works here ({', '.join(passed)} pass): you may claim {names}"
        )
    elif bad is not None:
        sentence = f"not claimed, and it does not work here: {bad.check}: {bad.sentence}"
    else:
        why = f": {unjudged[0].check}: {unjudged[0].sentence}" if unjudged else ""
        sentence = f"not claimed, and nothing judged whether it works here{why}"
    first = findings[0]
    check = CLAIM_PREFIX + "+".join(planned.probe)
    return replace(
        first,
        check=check,
        verdict=Verdict.UNSUPPORTED,
        cause=None,
        sentence=sentence,
        error=None,
        bound=None,
        where={"capabilities": list(planned.probe), "works": works},
        moment=None,
        repro=first.repro.replace(f"{first.check}@", f"{check}@", 1),
    )


def probed_capabilities(check: str) -> tuple[str, ...]:
    """The capabilities that a ``claim.…`` id is about; empty for any other id."""
    if not check.startswith(CLAIM_PREFIX):
        return ()
    return tuple(check.removeprefix(CLAIM_PREFIX).split("+"))
