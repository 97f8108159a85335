"""Gradient clipping: the norm that is returned, and the gradients that are left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.causes import Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.evidence import Evidence, Ledger, Suspects, compare_trees, observed, place
from conformance.checks.gradients import GRADIENTS, total
from conformance.checks.registry import TRAINING, check
from conformance.checks.rows import by_parts
from conformance.explain import Suspect
from conformance.history import Observation, as_tensor

CLIPS = frozenset({"clip.p1", "clip.p2", "clip.pinf"})
PS = (1.0, 2.0, math.inf)
"""Every p of which a norm can be claimed."""


def norms_due(evidence: Evidence) -> list[Observation]:
    """The oracle's norms; none where no threshold is below them: then clipping proves nothing."""
    seen = evidence.expected("grad_norm")
    return seen if any(float(one.value) > float(one.where["max_norm"]) for one in seen) else []


@check("clip.norm", profile="core", scenarios=TRAINING | {"sequence"}, any_of=CLIPS)
def clip_norm(evidence: Evidence, ledger: Ledger) -> None:
    """The norm that clipping returns is that of the whole gradient, every element counted once."""
    ledger.notes += [f"not claimed: {clip}" for clip in sorted(CLIPS - evidence.capabilities)]
    for rank, seen, got in observed(evidence, "grad_norm") if norms_due(evidence) else ():
        name = f"{seen.where['p']}-norm at {place(seen.where, rank)}"
        if got is None:
            ledger.hold(
                False,
                moment=seen.moment,
                cause=Cause.MISSING_KEY,
                sentence=f"{name}: clipping returned no norm",
                rank=rank,
                **seen.where,
            )
            continue
        ledger.number(
            got,
            seen.value,
            evidence.oracle.bound(rank, "grad_norm", dict(seen.where)),
            name=name,
            moment=seen.moment,
            suspects=partial(_norm_suspects, evidence, rank, seen),
            rank=rank,
            **seen.where,
        )


def _norm_suspects(evidence: Evidence, rank: int, seen: Observation) -> list[Suspect]:
    scalar = as_tensor(seen.value)
    wrong = wrong_norms(evidence, rank, seen)
    own = evidence.history.find(rank, "grad_norm", seen.where)
    if own is not None and own.value is not None:
        bound = evidence.oracle.bound(rank, "grad_norm", dict(seen.where))
        reduced = evidence.oracle.reference.get(rank, "gradients", step=seen.where["step"])
        sums = added_in_short(_of_distinct(evidence, reduced), float(seen.where["p"]))
        if rounded_in_short(float(own.value), float(scalar), bound, sums):
            wrong.append((Cause.DTYPE_ROUND_TRIP, float(own.value)))
    return [(cause, scalar.new_tensor(value)) for cause, value in wrong]


SHORT = (torch.bfloat16, torch.float16)


def rounded_in_short(got: float, expected: float, bound: float, sums: Sequence[Tensor]) -> bool:
    """Whether a norm is the right one rounded to a short dtype, or a sum that was made in one.

    Args:
        got: the norm.
        expected: the right one.
        bound: by how much it may be off before it is rounded.
        sums: what `added_in_short` gives. With another order of the parameters a sum may be the
            number next to it.
    """
    if not math.isfinite(got):
        return False
    number = torch.tensor(got, dtype=torch.float64)
    for short in SHORT:
        near = [torch.tensor(expected + off).to(short) for off in (-bound, 0.0, bound)]
        spacing = torch.finfo(short).eps * 2.0 ** math.floor(math.log2(abs(got) or 1.0))
        added = [value.double() for value in sums if value.dtype is short]
        if bool(number.to(short).double() == number) and (
            got in [float(value) for value in near]
            or any(bool((number - value).abs() <= spacing) for value in added)
        ):
            return True
    return False


def added_in_short(gradients: Mapping[str, Any], p: float) -> list[Tensor]:
    """p-norms whose powers are added up in short dtypes: of elements, of parameters, one by one."""
    found: list[Tensor] = []
    parts = [g for g in gradients.values() if isinstance(g, Tensor) and g.numel()]
    for short in SHORT if parts and not math.isinf(p) else ():
        low = [part.to(short) for part in parts]
        norms = [part.norm(p).to(short) for part in parts]
        found += [torch.stack([part.norm(p) for part in low]).norm(p), torch.stack(norms).norm(p)]
        for powers in ([n**p for n in norms], [(part.abs() ** p).sum() for part in low]):
            found.append(total(powers) ** (1 / p))
    return found


def wrong_norms(evidence: Evidence, rank: int, seen: Observation) -> list[tuple[Cause, float]]:
    """The norms that known defects give, most particular first."""
    p, expected = float(seen.where["p"]), float(seen.value)
    step, world = int(seen.where["step"]), evidence.world
    returned = [evidence.history.find(r, "grad_norm", seen.where) for r in range(world)]
    parts = [float(each.value) for each in returned if each is not None and each.value is not None]
    padded = norm_with_padding(evidence, rank, seen)
    found = [] if padded is None else [(Cause.PADDING_COUNTED, padded)]
    if len(parts) == world and max(parts) > min(parts):
        whole = combined(parts, p)
        bound = world * evidence.oracle.bound(rank, "grad_norm", dict(seen.where))
        if abs(whole - expected) <= bound:  # the ranks' norms make up the whole one
            found.append((Cause.LOCAL_NORM, parts[rank]))
    reference = evidence.oracle.reference
    reduced = reference.get(rank, "gradients", step=step)
    found += [(Cause.LOCAL_NORM, norm) for norm in local_norms(reduced, p, world)]
    found += [
        (Cause.NOT_REDUCED, norm_of(reference.get(r, "gradients_of_rank", step=step), p))
        for r in range(world)
    ]
    every_name = norm_of(reduced, p)
    if every_name > expected * (1 + 1e-6):
        found.append((Cause.COUNTED_TWICE, every_name))
    if not math.isinf(p):
        for times in sorted({world, evidence.replicas} - {1}):
            found.append((Cause.COUNTED_TWICE, expected * times ** (1 / p)))
    found.append((Cause.SUMMED_NOT_AVERAGED, expected * world))
    found.append((Cause.DIVIDED_TWICE, expected / world))
    found.append((Cause.DIVIDED_TWICE, expected / evidence.case.accumulation))
    distinct = _of_distinct(evidence, reduced)
    found += [(Cause.OTHER_NORM, norm_of(distinct, other)) for other in PS if other != p]
    return found


def norm_with_padding(evidence: Evidence, rank: int, seen: Observation) -> float | None:
    """The norm, and in it what all norms of its p have too much of, if that is the same in each.

    Gradients differ from step to step. What is added to all of them alike, to the power of p, are
    elements of no gradient; ``None`` where nothing is padded, or gradients were not seen.
    """
    p, steps = float(seen.where["p"]), {}
    if math.isinf(p) or not _pads(evidence):
        return None
    for other in evidence.expected("grad_norm", rank):
        got = evidence.history.find(rank, "grad_norm", other.where)
        own = evidence.history.find(rank, "gradients", {"step": other.where["step"]})
        if other.where["p"] != seen.where["p"] or own is None or got is None:
            continue
        if got.value is not None:
            bound = evidence.oracle.bound(rank, "grad_norm", dict(other.where))
            right = norm_of(_of_distinct(evidence, own.value), p)
            steps[other.where["step"]] = (right, float(got.value), bound)
    if len(steps) < 2 or seen.where["step"] not in steps:
        return None
    if any(got - right <= bound for right, got, bound in steps.values()):
        return None  # the norm of its own gradients, whatever these are
    extra = sum(got**p - right**p for right, got, _ in steps.values()) / len(steps)
    padded = {step: (right**p + extra) ** (1 / p) for step, (right, _, _) in steps.items()}
    alike = all(abs(padded[step] - got) <= bound for step, (_, got, bound) in steps.items())
    return padded[seen.where["step"]] if alike else None


def _of_distinct(evidence: Evidence, gradients: Mapping[str, Any]) -> dict[str, Any]:
    """`gradients` with a tied parameter under one name."""
    return {name: gradients.get(name) for name in anatomy(evidence.model).distinct}


def _pads(evidence: Evidence) -> bool:
    """Whether equal parts, of each parameter or of all in one, have more elements than these."""
    parts, shards = anatomy(evidence.model), evidence.shards
    names = parts.distinct
    return any(parts.padded(name, shards) > parts.numel(name) for name in names) or bool(
        sum(map(parts.numel, names)) % shards
    )


def local_norms(gradients: Mapping[str, Tensor | None], p: float, world: int) -> list[float]:
    """Norms of one rank's part when every gradient is cut on dim 0."""
    cut = [
        (g.reshape(1) if g.dim() == 0 else g).chunk(world)
        for g in gradients.values()
        if isinstance(g, Tensor)
    ]
    return [
        norm_of({str(i): c[rank] for i, c in enumerate(cut) if rank < len(c)}, p)
        for rank in range(world)
    ]


def norm_of(gradients: Mapping[str, Tensor | None], p: float) -> float:
    """p-norm over all entries, a tied parameter once per name."""
    parts = [
        float(g.double().norm(p)) for g in gradients.values() if isinstance(g, Tensor) and g.numel()
    ]
    return combined(parts, p)


def combined(parts: list[float], p: float) -> float:
    """The p-norm of the whole from the p-norms of its parts."""
    if not parts:
        return 0.0
    if math.isinf(p):
        return max(parts)
    return float(sum(part**p for part in parts) ** (1 / p))


@check("clip.gradients", profile="core", needs=GRADIENTS | {"clip.gradients"}, any_of=CLIPS)
def clip_gradients(evidence: Evidence, ledger: Ledger) -> None:
    """After clipping every gradient is the oracle's clipped gradient."""
    norms = {seen.where["step"]: seen for seen in norms_due(evidence)}
    compare_trees(
        evidence,
        ledger,
        "clipped",
        noun="clipped gradient of",
        only=lambda where: where["step"] in norms,
        suspects=clipped_suspects(evidence, norms),
    )


def clipped_suspects(evidence: Evidence, norms: Mapping[Any, Observation]) -> Suspects:
    """The gradient as it was before, scaled up to the threshold, and clipped by a wrong norm."""

    def suspects(rank: int, seen: Observation, key: str) -> list[Suspect]:
        norm = norms[seen.where["step"]]
        before = evidence.oracle.reference.get(rank, "gradients", step=seen.where["step"])
        limit = float(norm.where["max_norm"])
        found: list[Suspect] = [(Cause.NOT_CLIPPED, before[key])]
        if float(norm.value) > 0:
            found.append((Cause.SCALED, before[key] * (limit / float(norm.value))))
        for cause, wrong in wrong_norms(evidence, rank, norm):
            if wrong > 0:
                found.append((cause, before[key] * min(1.0, limit / wrong)))
        parts = local_norms(before, float(norm.where["p"]), evidence.shards)
        if before[key].dim() and len(parts) > 1:
            factors = [min(1.0, limit / part) if part > 0 else 1.0 for part in parts]
            found.append((Cause.LOCAL_NORM, by_parts(before[key], factors)))
        return found

    return suspects
