"""Losses, gradients, parameters: the course of a training, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from conformance.causes import MEANING, Cause
from conformance.checks.evidence import (
    Evidence,
    Ledger,
    Mismatch,
    Suspects,
    change,
    compare_trees,
    observed,
    place,
)
from conformance.checks.gradients import (
    ANY_TRAINING,
    GRADIENTS,
    common_factor,
    gradient_suspects,
    one_micro_batch,
)
from conformance.checks.registry import RECIPES, check
from conformance.checks.updates import stepped
from conformance.explain import Suspect
from conformance.history import Observation, as_tensor
from conformance.optimizers import optimizer_named
from conformance.scenarios.checkpoint import AFTER_LOAD, BEFORE_LOAD
from conformance.tolerance import distance


@check("losses.value", profile="core", scenarios=ANY_TRAINING | {"two_forwards"} | RECIPES)
def losses_value(evidence: Evidence, ledger: Ledger) -> None:
    """Every rank's loss of every micro-batch, and of evaluation, is the oracle's."""
    # whether evaluation takes over rank 0's buffers is not part of that convention, and which
    # rank's come back from a load is free
    free = evidence.conventions.buffers == "rank0" or evidence.case.scenario == "checkpoint"
    unsure = free and "buffers" in evidence.model.traits
    for what in ("loss",) if unsure else ("loss", "eval_loss"):
        for rank, seen, got in observed(evidence, what):
            ledger.number(
                got,
                seen.value,
                evidence.oracle.bound(rank, what, dict(seen.where)),
                name=f"{what.replace('_', ' ')} at {place(seen.where, rank)}",
                moment=seen.moment,
                suspects=partial(_loss_suspects, evidence, rank, seen),
                rank=rank,
                **seen.where,
            )
    _blame_evaluation(evidence, ledger)


def _blame_evaluation(evidence: Evidence, ledger: Ledger) -> None:
    """An inexplicable first wrong loss is an evaluation's doing if only that lies before it.

    Parameters and buffers that it left must be right.
    """
    first = ledger.first()
    if first is None or first.cause is not Cause.UNEXPLAINED or "step" not in first.where:
        return
    rank = int(first.where["rank"])
    before = [
        seen
        for what in ("loss", "eval_loss")
        for seen in evidence.expected(what, rank)
        if seen.moment < first.moment
    ]
    last = max(before, key=lambda seen: seen.moment, default=None)
    if last is None or last.what != "eval_loss":
        return
    if not _right(evidence, rank, ("parameters_after_eval", "buffers_after_eval"), last.where):
        return
    why = "; all before it is right, its own loss and what it left"
    _name(ledger, first, Cause.CHANGED_BY_EVAL, why)


def _name(ledger: Ledger, first: Mismatch, cause: Cause, why: str) -> None:
    """State the cause of an inexplicable mismatch."""
    sentence = first.sentence.replace(MEANING[first.cause], f"{MEANING[cause]}{why}")
    index = ledger.mismatches.index(first)
    ledger.mismatches[index] = replace(first, cause=cause, sentence=sentence)


def _right(
    evidence: Evidence, rank: int, observations: Iterable[str], where: Mapping[str, Any]
) -> bool:
    """Whether trees that were due were observed and are right."""
    for what in observations:
        due = evidence.oracle.reference.find(rank, what, where)
        got = evidence.history.find(rank, what, where)
        if due is None or got is None or due.value.keys() - got.value.keys():
            return False
        for key, value in due.value.items():
            bound = evidence.oracle.bound(rank, what, dict(where), key)
            if distance(as_tensor(got.value[key]), as_tensor(value)) > bound:
                return False
    return True


def _loss_suspects(evidence: Evidence, rank: int, seen: Observation) -> list[Suspect]:
    """The loss that older weights give, the other ranks' losses, and sums and parts of them.

    Older weights are all of them, or one unit's; of an evaluation after a load those before it.
    """
    reference, micro_batches = evidence.oracle.reference, evidence.case.accumulation
    expected, world = as_tensor(seen.value), evidence.world_at(seen.moment)
    stale = reference.find(rank, f"stale_{seen.what}", seen.where)
    found: list[Suspect] = [] if stale is None else [(Cause.STALE, as_tensor(stale.value))]
    found += [
        (Cause.STALE, as_tensor(one.value))
        for one in reference.every("stale_loss_of_unit", rank)
        if seen.where.items() <= one.where.items() and seen.what == "loss"
    ]
    if seen.what == "eval_loss" and seen.where == {"index": AFTER_LOAD}:
        before = evidence.history.find(rank, seen.what, {"index": BEFORE_LOAD})
        found += [] if before is None else [(Cause.NOT_LOADED, as_tensor(before.value))]
    found += [
        (Cause.OTHER_RANK, as_tensor(reference.get(other, seen.what, **seen.where)))
        for other in range(world)
        if other != rank
    ]
    full = reference.find(rank, "loss_in_full", seen.where) if seen.what == "loss" else None
    found += [] if full is None else [(Cause.WRONG_DTYPE, as_tensor(full.value))]
    found.append((Cause.SUMMED_NOT_AVERAGED, expected * world))
    found.append((Cause.DIVIDED_TWICE, expected / micro_batches))
    found.append((Cause.DIVIDED_TWICE, expected / world))
    return found


@check("gradients.scale", profile="core", needs=GRADIENTS, applies=one_micro_batch)
def gradients_scale(evidence: Evidence, ledger: Ledger) -> None:
    """Gradients of one backward have the declared scale: no factor separates them from truth."""
    for rank in range(evidence.world):
        for seen in evidence.expected("gradients", rank):
            got = evidence.history.get(rank, "gradients", **seen.where)
            factor, error, bound = common_factor(evidence, rank, seen, got)
            if factor is None:
                continue
            cause = scale_cause(factor, evidence)
            ledger.hold(
                abs(factor - 1.0) <= bound or error > bound,
                moment=seen.moment,
                cause=cause,
                sentence=f"gradients at {place(seen.where, rank)} are {factor:.6g} times the"
                f" oracle's: {MEANING[cause]}",
                rank=rank,
                factor=factor,
                **seen.where,
            )


def scale_cause(factor: float, evidence: Evidence) -> Cause:
    """What a common factor points to."""
    known = {
        float(evidence.world): Cause.SUMMED_NOT_AVERAGED,
        1.0 / evidence.world: Cause.DIVIDED_TWICE,
        1.0 / evidence.case.accumulation: Cause.DIVIDED_TWICE,
        0.0: Cause.ZERO,
        -1.0: Cause.SIGN,
    }
    for value, cause in known.items():
        if abs(factor - value) < 1e-3:
            return cause
    return Cause.SCALED


@check("gradients.value", profile="core", needs=GRADIENTS, scenarios=ANY_TRAINING)
def gradients_value(evidence: Evidence, ledger: Ledger) -> None:
    """Every parameter's gradient, before clipping and before the optimizer, is the oracle's."""
    compare_trees(
        evidence, ledger, "gradients", noun="gradient of", suspects=gradient_suspects(evidence)
    )


@check("parameters.first_step", profile="core")
def parameters_first_step(evidence: Evidence, ledger: Ledger) -> None:
    """The first optimizer step changes every parameter by what it changes it in the oracle."""
    reference = evidence.oracle.reference
    for rank in range(evidence.world):
        before = evidence.history.get(rank, "parameters", step=-1)
        after = evidence.history.get(rank, "parameters", step=0)
        seen = reference.find(rank, "parameters", {"step": 0})
        start = reference.get(rank, "parameters", step=-1)
        assert seen is not None
        for key, expected_after in seen.value.items():
            if key not in before or key not in after:
                continue  # a missing parameter is reported at the end
            expected = expected_after - start[key]
            ledger.number(
                change(before[key], after[key]),
                expected,
                evidence.oracle.bound(rank, "parameters", {"step": 0}, key),
                name=f"change of {key} in step 0, rank {rank},",
                moment=seen.moment,
                suspects=partial(first_step_suspects, evidence, rank, key),
                note=partial(_right_elsewhere, evidence, key),
                rank=rank,
                step=0,
                fqn=key,
            )


def _right_elsewhere(evidence: Evidence, key: str) -> str:
    """The ranks on which the first change of a parameter is right, in words; empty if none."""
    ranks = ranks_in_step(evidence, key)
    return f"; right on rank {', '.join(map(str, ranks))}" if ranks else ""


def ranks_in_step(evidence: Evidence, key: str) -> list[int]:
    """The ranks on which the first step changes a parameter as it should."""
    reference, found = evidence.oracle.reference, []
    for rank in range(evidence.world):
        moved, due = (
            [history.get(rank, "parameters", step=step).get(key) for step in (-1, 0)]
            for history in (evidence.history, reference)
        )
        if any(one is None or one.shape != due[0].shape for one in moved):
            continue  # reported at the end
        bound = evidence.oracle.bound(rank, "parameters", {"step": 0}, key)
        if distance(moved[1] - moved[0], due[1] - due[0]) <= bound:
            found.append(rank)
    return found


def first_step_suspects(evidence: Evidence, rank: int, key: str) -> list[Suspect]:
    """The first change of one parameter from a wrong gradient, or from a wrong optimizer.

    The optimizer may be a used one, or see a part of the parameter alone. No change at all is an
    old value where another rank has the new one.
    """
    reference = evidence.oracle.reference
    start = reference.get(rank, "parameters", step=-1)[key]
    found: list[Suspect] = []
    if ranks_in_step(evidence, key):
        found.append((Cause.STALE, torch.zeros_like(start)))
    gradient = reference.get(rank, "gradients", step=0)[key]
    if gradient is None:
        return found
    optimizer, world = optimizer_named(evidence.case.optimizer), evidence.world
    own = reference.get(rank, "gradients_of_rank", step=0).get(key)
    last = reference.get(rank, "gradients_last_micro", step=0).get(key)
    wrong = (
        (Cause.SUMMED_NOT_AVERAGED, gradient * world),
        (Cause.DIVIDED_TWICE, gradient / world),
        (Cause.LAST_MICRO_BATCH_ONLY, last),
        (Cause.NOT_REDUCED, own),
    )
    found += [
        (cause, stepped(optimizer, start, [value]) - start)
        for cause, value in wrong
        if value is not None
    ]
    parts = zip(start.chunk(world), gradient.chunk(world), strict=True) if start.dim() else ()
    by_part = [stepped(optimizer, part, [value]) for part, value in parts]
    found += [(Cause.LOCAL_NORM, torch.cat(by_part) - start)] if by_part else []
    advanced = stepped(optimizer, start, [gradient], warm_up=True) - start
    end = reference.get(rank, "parameters", step=0)[key]
    rounded = [
        (Cause.DTYPE_ROUND_TRIP, end.to(short).to(end.dtype) - start)
        for short in (torch.bfloat16, torch.float16)
    ]
    return [*found, (Cause.WRONG_STEP_COUNT, advanced), *rounded]


@check("parameters.end", profile="core", scenarios=ANY_TRAINING | {"two_forwards"} | RECIPES)
def parameters_end(evidence: Evidence, ledger: Ledger) -> None:
    """At the end every rank holds the oracle's parameters."""
    last = max(seen.where["step"] for seen in evidence.expected("parameters"))
    compare_trees(
        evidence,
        ledger,
        "parameters",
        noun="parameter",
        only=lambda where: where["step"] == last,
        suspects=parameter_suspects(evidence),
    )


def parameter_suspects(evidence: Evidence) -> Suspects:
    """Candidates for a wrong parameter: its value one step before."""

    def suspects(rank: int, seen: Observation, key: str) -> list[Suspect]:
        before = {**seen.where, "step": int(seen.where["step"]) - 1}
        earlier = evidence.oracle.reference.find(rank, seen.what, before)
        stale = None if earlier is None else earlier.value.get(key)
        return [] if stale is None else [(Cause.STALE, stale)]

    return suspects
