"""What stands in a pair after a load that errs: candidates by which a cause is named.

Registers no check: see `conformance.checks.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from conformance.causes import MEANING, Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.evidence import Evidence
from conformance.checks.names import one_sided
from conformance.checks.recut import recut_suspects
from conformance.checks.rows import misplaced_rows
from conformance.checks.saving import SAVED
from conformance.explain import Suspect
from conformance.history import Observation, as_tensor
from conformance.models import ModelCase
from conformance.scenarios.checkpoint import STEPS_AFTER, STEPS_BEFORE
from conformance.scenarios.run import PERTURBATION

AT_LAST = {"step": STEPS_BEFORE + STEPS_AFTER - 1}
"""Where the last observation before the load of a second directory was made."""


def when_saved(what: str, loaded: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and place of what was saved as that `what` which was observed at `loaded` after a load.

    A second directory is written by the saved pair, a step after the first.
    """
    return (what, SAVED) if dict(loaded) == SAVED else (f"kept_{what}", loaded)


def other_values(evidence: Evidence, rank: int, key: str) -> list[Suspect]:
    """What else may come out of a load: nothing loaded, another moment's value, another rank's."""
    history, found = evidence.history, []
    for what in ("parameters", "buffers"):
        start = evidence.oracle.reference.find(rank, what, {"step": -1})
        if start is not None and key in start.value:
            fresh = as_tensor(start.value[key])
            fresh = fresh + PERTURBATION if fresh.is_floating_point() else fresh
            found.append((Cause.NOT_LOADED, fresh))
    for what, cause in (
        ("kept_parameters", Cause.ALIASED),
        ("kept_buffers", Cause.ALIASED),
        ("parameters", Cause.STALE),
    ):
        step = STEPS_BEFORE if cause is Cause.ALIASED else -1
        seen = history.find(rank, what, {"step": step})
        if seen is not None and key in seen.value:
            found.append((cause, as_tensor(seen.value[key])))
    for other in range(evidence.saver.world):
        seen = evidence.saver.find(other, "buffers", SAVED)
        if other != rank and seen is not None and key in seen.value:
            found.append((Cause.OTHER_RANK, as_tensor(seen.value[key])))
    return found


def other_values_again(evidence: Evidence, rank: int, key: str) -> list[Suspect]:
    """What else may come out of the second directory: what stood there before, or in the first."""
    return [
        (cause, as_tensor(seen.value[key]))
        for what in ("parameters", "buffers")
        for cause, where in ((Cause.NOT_LOADED, AT_LAST), (Cause.STALE, SAVED))
        if (seen := evidence.history.find(rank, what, where)) is not None and key in seen.value
    ]


def one_sided_state(
    model: ModelCase, key: str, got: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> tuple[Cause, str]:
    """A key that only one side has; of two names of one parameter each has the state of both."""
    name, _, rest = key.rpartition("/")
    for other in next((group for group in anatomy(model).tied if name in group), ()):
        if key in saved and f"{other}/{rest}" in got:
            return Cause.UNTIED, f"only {other} has one: {MEANING[Cause.UNTIED]}"
    return one_sided(key, got, saved)


def other_states(
    evidence: Evidence, saved: Mapping[str, Tensor], rank: int, seen: Observation, key: str
) -> list[Suspect]:
    """Rows in wrong places, other states of one shape, and what another cut or moment would give.

    Only where there was another cut, after growing or shrinking, or another moment.
    """
    found = [
        *misplaced_rows(saved[key], evidence.shards),
        *(
            (Cause.PERMUTED, value)
            for other, value in saved.items()
            if other != key and value.shape == saved[key].shape
        ),
    ]
    if evidence.first is not None:
        worlds = (evidence.saver.world, evidence.world)
        before, after = (max(world // evidence.replicas, 1) for world in worlds)
        found += recut_suspects(saved[key], before, after)
    if dict(seen.where) != SAVED:
        for cause, where in ((Cause.NOT_LOADED, AT_LAST), (Cause.STALE, SAVED)):
            then = evidence.history.find(rank, "optimizer_state", where)
            if then is not None and key in then.value:
                found.append((cause, as_tensor(then.value[key])))
    return found
