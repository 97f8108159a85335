"""When something happened that has a label but no observation of its own.

Collectives carry the label of the part of the scenario in which they were issued; the oracle has
none, so their moment is that of its observation of the same part.
"""

from __future__ import annotations

from conformance.checks.evidence import Moment
from conformance.history import History

_OBSERVED_IN = {"clip": "grad_norm", "optimizer": "parameters", "after": "parameters"}


def moment_of(reference: History, label: str) -> Moment:
    """The moment of ``step 3/micro 1`` and the like; at worst the start of its phase."""
    phase, _, part = label.partition("/")
    ordinals = {p.name: p.ordinal for p in reference.ranks[0].phases}
    start = (ordinals.get(phase, 0), -1)
    step = phase.removeprefix("step ")
    if not step.isdigit() or not part:
        return start
    kind, _, index = part.partition(" ")
    what = _OBSERVED_IN.get(kind, "gradients")
    if kind == "micro":
        loss = reference.find(0, "loss", {"step": int(step), "micro": int(index)})
        if loss is not None:
            return loss.moment
    for seen in reference.every(what):
        if seen.where.get("step") == int(step):
            return seen.moment
    return start
