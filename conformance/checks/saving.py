"""Saving is an observation: it changes nothing, and training goes on from what was saved."""

from __future__ import annotations

from typing import Any

from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger, observed, place
from conformance.checks.names import one_sided
from conformance.checks.optimizer import compare_count, compare_options, is_value
from conformance.checks.registry import check
from conformance.history import Observation, as_tensor
from conformance.scenarios.checkpoint import STEPS_BEFORE

SHOWN = 3
"""How many names of what has changed a sentence tells."""

SAVED = {"step": STEPS_BEFORE - 1}
"""Where the last observation before the save was made."""


def held_when_saved(evidence: Evidence, rank: int) -> dict[str, Any]:
    """Buffers and parameters of a rank, by name, as they were before the save."""
    get = evidence.history.get
    return {**get(rank, "buffers", **SAVED), **get(rank, "parameters", **SAVED)}


@check("save.unchanged", profile="checkpoint", scenarios=frozenset({"checkpoint"}))
def save_unchanged(evidence: Evidence, ledger: Ledger) -> None:
    """Saving changes nothing, and training goes on from what was saved."""
    for rank in range(evidence.world):
        for what in ("parameters", "buffers", "optimizer_state"):
            for seen in _kept(evidence, what, rank):
                _compare_kept(evidence, ledger, seen, what, rank)
        for seen in _kept(evidence, "hyperparameters", rank):
            got = evidence.history.get(rank, seen.what, **seen.where)
            due = evidence.history.get(rank, "hyperparameters", **SAVED)
            where = {"rank": rank, **seen.where}
            compare_options(ledger, seen.moment, got, due, f"after the save, rank {rank},", **where)
        _compare_going_on(evidence, ledger, rank)


@check("save.surroundings", profile="checkpoint", scenarios=frozenset({"checkpoint"}))
def save_surroundings(evidence: Evidence, ledger: Ledger) -> None:
    """A save, and a load, leave modes, flags, random numbers and global state as they were."""
    for rank, seen, changed in observed(evidence, "surroundings_changed"):
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        ledger.hold(
            not changed,
            moment=seen.moment,
            cause=Cause.NOT_RESTORED,
            sentence=f"after the {seen.where['act']}, rank {rank} has other values of"
            f" {', '.join(changed[:SHOWN])}{more}",
            rank=rank,
            got=", ".join(changed),
            **seen.where,
        )


def _kept(evidence: Evidence, what: str, rank: int) -> list[Observation]:
    """The oracle's observation of the saved pair right after the save."""
    return [s for s in evidence.expected(f"kept_{what}", rank) if dict(s.where) == SAVED]


def _compare_kept(
    evidence: Evidence, ledger: Ledger, seen: Observation, what: str, rank: int
) -> None:
    got = evidence.history.get(rank, seen.what, **seen.where)
    before = evidence.history.get(rank, what, **SAVED)
    for key in sorted({*got, *before}):
        name = f"{key} after the save, rank {rank},"
        where = {"rank": rank, "fqn": key, **seen.where}
        if key not in got or key not in before:
            cause, text = one_sided(key, got, before)
            ledger.hold(False, moment=seen.moment, cause=cause, sentence=f"{name} {text}", **where)
            continue
        now, then = as_tensor(got[key]), as_tensor(before[key])
        ledger.hold(
            now.dtype == then.dtype,
            moment=seen.moment,
            cause=Cause.WRONG_DTYPE,
            sentence=f"{name} is {now.dtype}, it was {then.dtype}: {MEANING[Cause.WRONG_DTYPE]}",
            **where,
        )
        if what == "optimizer_state" and not is_value(key):
            compare_count(ledger, seen, name, now, then, where)
        else:
            ledger.number(now, then, 0.0, name=name, moment=seen.moment, **where)


def _compare_going_on(evidence: Evidence, ledger: Ledger, rank: int) -> None:
    """Losses and parameters of the saved pair's next step are the oracle's."""
    for seen in evidence.expected("kept_loss", rank):
        ledger.number(
            evidence.history.get(rank, seen.what, **seen.where),
            seen.value,
            evidence.oracle.bound(rank, seen.what, dict(seen.where)),
            name=f"loss after the save at {place(seen.where, rank)}",
            moment=seen.moment,
            rank=rank,
            **seen.where,
        )
    for seen in evidence.expected("kept_parameters", rank):
        if dict(seen.where) == SAVED:
            continue
        got = evidence.history.get(rank, seen.what, **seen.where)
        for key in sorted(got.keys() & seen.value.keys()):
            ledger.number(
                got[key],
                seen.value[key],
                evidence.oracle.bound(rank, seen.what, dict(seen.where), key),
                name=f"{key} after the save at {place(seen.where, rank)}",
                moment=seen.moment,
                rank=rank,
                fqn=key,
                **seen.where,
            )
