"""What several checks know about gradients: their common scale, and what a wrong one looks like.

Registers no check: modules of checks import it without disturbing their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case
from conformance.causes import Cause
from conformance.checks.evidence import Evidence, Suspects
from conformance.checks.registry import TRAINING
from conformance.checks.rows import misplaced_rows
from conformance.explain import Suspect
from conformance.history import History, Observation
from conformance.models import ModelCase

ANY_TRAINING = TRAINING | {
    "eval_first",
    "eval_in_step",
    "dropped_gradients",
    "checkpoint",
    "resume",
    "sequence",
}
GRADIENTS = frozenset({"gradients"})


def one_micro_batch(case: Case, model: ModelCase) -> bool:
    """A step is a single backward."""
    return case.accumulation == 1


def several_micro_batches(case: Case, model: ModelCase) -> bool:
    """A step accumulates."""
    return case.accumulation > 1


def common_factor(
    evidence: Evidence, rank: int, seen: Observation, got: Mapping[str, Any]
) -> tuple[float | None, float, float]:
    """(factor over all gradients, largest relative deviation from it, its bound)."""
    pairs = [
        (got[key].double().flatten(), expected.double().flatten(), key)
        for key, expected in seen.value.items()
        if isinstance(expected, Tensor)
        and isinstance(got.get(key), Tensor)
        and got[key].shape == expected.shape
    ]
    square = sum(float(e @ e) for _, e, _ in pairs)
    product = sum(float(g @ e) for g, e, _ in pairs)
    if square == 0 or not math.isfinite(product):  # what is no number is judged by value
        return None, 0.0, 0.0
    factor = product / square
    scale = max(float(e.abs().max()) for _, e, _ in pairs)
    error = max(float((g - factor * e).abs().max()) for g, e, _ in pairs) / scale
    bounds = (evidence.oracle.bound(rank, "gradients", dict(seen.where), k) for _, _, k in pairs)
    return factor, error, max(bounds) / scale * max(1.0, abs(factor)) + 1e-6


def gradient_suspects(evidence: Evidence) -> Suspects:
    """Candidates for a wrong gradient: see `conformance.explain`."""
    reference = evidence.oracle.reference

    def suspects(rank: int, seen: Observation, key: str) -> list[Suspect]:
        expected = seen.value[key]
        found: list[Suspect] = [
            (Cause.SUMMED_NOT_AVERAGED, expected * evidence.world),
            (Cause.DIVIDED_TWICE, expected / evidence.world),
        ]
        if evidence.case.accumulation > 1:
            found.append((Cause.DIVIDED_TWICE, expected / evidence.case.accumulation))
        found += _found(
            reference, 0, "gradients_last_micro", seen, key, Cause.LAST_MICRO_BATCH_ONLY
        )
        found += _found(reference, 0, "gradients_doubled", seen, key, Cause.COUNTED_TWICE)
        found += _found(reference, rank, "gradients_of_rank", seen, key, Cause.NOT_REDUCED)
        for other in range(evidence.world):
            if other != rank:
                found += _found(reference, other, "gradients_of_rank", seen, key, Cause.OTHER_RANK)
        before = {**seen.where, "step": int(seen.where["step"]) - 1}
        earlier = reference.find(rank, "gradients", before)
        if earlier is not None and earlier.value.get(key) is not None:
            found.append((Cause.STALE, earlier.value[key]))
        dropped = reference.find(rank, "gradients_dropped", {})
        if dropped is not None and dropped.value.get(key) is not None:
            found.append((Cause.NOT_DROPPED, expected + dropped.value[key]))
        found += _accumulated(evidence, rank, seen, key)
        found += misplaced_rows(expected, evidence.shards)
        found += [
            (Cause.PERMUTED, other)
            for name, other in seen.value.items()
            if name != key and isinstance(other, Tensor) and other.shape == expected.shape
        ]
        return found

    return suspects


def _accumulated(evidence: Evidence, rank: int, seen: Observation, key: str) -> list[Suspect]:
    """What becomes of micro-batches that wait rounded, or that never leave their replica.

    Nothing where the oracle did not observe each micro-batch of each rank.
    """
    find, where = evidence.oracle.reference.find, {"step": seen.where["step"]}
    micro = range(evidence.case.accumulation)
    own = [
        [find(r, "gradients_of_micro", {**where, "micro": m}) for m in micro]
        for r in range(evidence.world)
    ]
    values = [[None if one is None else one.value.get(key) for one in row] for row in own]
    of_rank = [[v for v in row if isinstance(v, Tensor)] for row in values]
    if len(micro) < 2 or any(len(row) < len(micro) for row in of_rank):
        return []
    share = evidence.world if evidence.conventions.gradients == "mean" else 1
    alone = evidence.shards if evidence.conventions.gradients == "mean" else 1
    reduced = [total([row[m] for row in of_rank]) / share for m in micro]
    found: list[Suspect] = []
    for short in (torch.bfloat16, torch.float16):
        waited = total([rounded_while_waiting(row, short) for row in of_rank]) / share
        found.append((Cause.DTYPE_ROUND_TRIP, waited))
        kept = [rounded_while_waiting(row, short).to(short).to(row[0].dtype) for row in of_rank]
        found.append((Cause.DTYPE_ROUND_TRIP, total(kept) / share))
        found.append((Cause.DTYPE_ROUND_TRIP, rounded_while_waiting(reduced, short)))
    if evidence.replicas > 1:
        first = rank // evidence.shards * evidence.shards
        replica = of_rank[first : first + evidence.shards]
        inside = [total([row[m] for row in replica]) / alone for m in micro]
        found.append((Cause.NOT_REDUCED, total([*inside[:-1], reduced[-1]])))
        found.append((Cause.NOT_REDUCED, total(inside)))
    return found


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum, in order."""
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def rounded_while_waiting(parts: Sequence[Tensor], short: torch.dtype) -> Tensor:
    """The sum of `parts`, kept in `short` before the last one is added."""
    kept = parts[0].to(short)
    for part in parts[1:-1]:
        kept = (kept.to(part.dtype) + part).to(short)
    return kept.to(parts[-1].dtype) + parts[-1]


def _found(
    history: History, rank: int, what: str, seen: Observation, key: str, cause: Cause
) -> list[Suspect]:
    other = history.find(rank, what, seen.where)
    value = None if other is None else other.value.get(key)
    return [] if value is None else [(cause, value)]
