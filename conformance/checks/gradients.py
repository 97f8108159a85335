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
from conformance.tolerance import distance

ANY_TRAINING = TRAINING | {
    "eval_first",
    "eval_in_step",
    "dropped_gradients",
    "checkpoint",
    "resume",
    "sequence",
}
GRADIENTS = frozenset({"gradients"})
SAME_WEIGHT = 1e-4
"""Parts of a sum whose weights differ by less than this fraction weigh the same."""


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
        expected, world = seen.value[key], evidence.world_at(seen.moment)
        found: list[Suspect] = [
            *_of_few_ranks(evidence, rank, seen, key),
            (Cause.SUMMED_NOT_AVERAGED, expected * world),
            (Cause.DIVIDED_TWICE, expected / world),
        ]
        if evidence.case.accumulation > 1:
            found.append((Cause.DIVIDED_TWICE, expected / evidence.case.accumulation))
        found += _found(
            reference, 0, "gradients_last_micro", seen, key, Cause.LAST_MICRO_BATCH_ONLY
        )
        found += _found(reference, 0, "gradients_doubled", seen, key, Cause.COUNTED_TWICE)
        found += _found(reference, rank, "gradients_of_rank", seen, key, Cause.NOT_REDUCED)
        for other in range(world):
            if other != rank:
                found += _found(reference, other, "gradients_of_rank", seen, key, Cause.OTHER_RANK)
        before = {**seen.where, "step": int(seen.where["step"]) - 1}
        earlier = reference.find(rank, "gradients", before)
        if earlier is not None and earlier.value.get(key) is not None:
            found.append((Cause.STALE, earlier.value[key]))
        found += _with_dropped(reference, rank, expected, key)
        found += _reduced_in_short(evidence, seen, key)
        found += _accumulated(evidence, rank, seen, key)
        found += misplaced_rows(expected, max(world // evidence.replicas, 1))
        found += [
            (Cause.PERMUTED, other)
            for name, other in seen.value.items()
            if name != key and isinstance(other, Tensor) and other.shape == expected.shape
        ]
        return found + _weighed(evidence, rank, seen, key)

    return suspects


def _of_few_ranks(evidence: Evidence, rank: int, seen: Observation, key: str) -> list[Suspect]:
    """What becomes of a parameter that other ranks used and some did not.

    Where one rank used it, its own gradient, the mean over those that did and the sum over all are
    one number. The first is not on every rank; the last is what all parameters have.
    """
    world, find = evidence.world_at(seen.moment), evidence.oracle.reference.find
    seen_own = [find(other, "gradients_of_rank", seen.where) for other in range(world)]
    own = [one.value for one in seen_own if one is not None]
    seen_held = [evidence.history.find(other, seen.what, seen.where) for other in range(world)]
    held = [one.value for one in seen_held if one is not None]
    used = {name: sum(tree.get(name) is not None for tree in own) for name in seen.value}
    if used[key] in (0, world) or len(own) < world or len(held) < world:
        return []

    def alike(name: str, got: Any, other: Tensor) -> bool:
        bound = evidence.oracle.bound(rank, seen.what, dict(seen.where), name)
        there = isinstance(got, Tensor) and got.shape == other.shape
        return there and distance(got, other) <= bound

    expected = seen.value[key]
    if not all(alike(key, tree.get(key), held[rank][key]) for tree in held):
        return [(Cause.NOT_REDUCED, own[rank].get(key, torch.zeros_like(expected)))]
    by_all = [name for name, users in used.items() if users == world]
    right = all(alike(name, held[rank].get(name), seen.value[name]) for name in by_all)
    if not right or evidence.conventions.gradients == "sum":
        return []
    return [(Cause.UNEQUAL_WEIGHTS, expected * (world / used[key]))]


def _with_dropped(history: History, rank: int, expected: Tensor, key: str) -> list[Suspect]:
    """`expected` and what was given up before it: reduced, not yet reduced, or both."""
    seen = {
        what: history.find(of, what, {})
        for what, of in (("gradients_dropped", rank), ("gradients_unreduced", 0))
    }
    values = [None if one is None else one.value.get(key) for one in seen.values()]
    parts = [value for value in values if isinstance(value, Tensor)]
    return [
        (Cause.NOT_DROPPED, expected + total(given_up))
        for given_up in (*([part] for part in parts), parts)
        if given_up
    ]


def _reduced_in_short(evidence: Evidence, seen: Observation, key: str) -> list[Suspect]:
    """What a reduction in a shorter dtype leaves, of gradients divided before it or after it."""
    world = evidence.world_at(seen.moment)
    own = [
        evidence.oracle.reference.find(rank, "gradients_of_rank", seen.where)
        for rank in range(world)
    ]
    parts = [None if one is None else one.value.get(key) for one in own]
    of_rank = [part for part in parts if isinstance(part, Tensor)]
    share = world if evidence.conventions.gradients == "mean" else 1
    found: list[Suspect] = []
    for short in (torch.bfloat16, torch.float16) if len(of_rank) == world else ():
        whole = of_rank[0].dtype
        after = total([part.to(short) for part in of_rank])
        before = total([(part / share).to(short) for part in of_rank])
        found += [
            (Cause.DTYPE_ROUND_TRIP, after.to(whole) / share),
            (Cause.DTYPE_ROUND_TRIP, (after / share).to(whole)),
            (Cause.DTYPE_ROUND_TRIP, before.to(whole)),
        ]
    return found


def _weighed(evidence: Evidence, rank: int, seen: Observation, key: str) -> list[Suspect]:
    """The sum of what ranks computed in micro-batches that comes closest to all gradients.

    Nothing where all of them weigh the same in it, or there are too few elements to tell.
    """
    step = {"step": seen.where["step"]}
    got, parts = evidence.history.find(rank, "gradients", step), _parts(evidence, seen)
    if got is None or len(parts) < 2:
        return []
    trees = [got.value, *parts]
    names = [name for name in got.value if all(isinstance(t.get(name), Tensor) for t in trees)]
    columns = [torch.cat([t[n].double().flatten() for n in names]) for t in trees if names]
    whole = min((len(column) for column in columns), default=0)
    if key not in names or whole < 2 * len(parts) or any(len(c) > whole for c in columns):
        return []
    if not all(bool(column.isfinite().all()) for column in columns):
        return []
    weights = torch.linalg.lstsq(torch.stack(columns[1:], 1), columns[0]).solution  # (parts,)
    if float(weights.max() - weights.min()) <= SAME_WEIGHT * float(weights.abs().max()):
        return []
    pairs = zip(parts, weights.tolist(), strict=True)
    return [(Cause.UNEQUAL_WEIGHTS, total([part[key] * weight for part, weight in pairs]))]


def _parts(evidence: Evidence, seen: Observation) -> list[Mapping[str, Any]]:
    """What each rank computed in each micro-batch of a step; empty if it was not observed."""
    micro, step = range(evidence.case.accumulation), seen.where["step"]
    what = "gradients_of_micro" if len(micro) > 1 else "gradients_of_rank"
    found = [
        evidence.oracle.reference.find(
            rank, what, {"step": step, "micro": m} if len(micro) > 1 else {"step": step}
        )
        for rank in range(evidence.world_at(seen.moment))
        for m in micro
    ]
    observed = [one.value for one in found if one is not None]
    return observed if len(observed) == len(found) else []


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
