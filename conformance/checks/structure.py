"""What a model is besides numbers: tied, frozen and unused parameters, and buffers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from conformance.adapter import Conventions
from conformance.case import Case
from conformance.causes import MEANING, Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.evidence import Evidence, Ledger, Suspects, compare_trees, observed, place
from conformance.checks.gradients import ANY_TRAINING
from conformance.checks.names import key_text
from conformance.checks.registry import OBSERVED, Applies, check
from conformance.checks.updates import stepped
from conformance.explain import Suspect, is_scaled, ratio
from conformance.history import Observation, as_tensor
from conformance.models import ModelCase
from conformance.optimizers import optimizer_named
from conformance.tolerance import distance

EVERYWHERE = ANY_TRAINING | {"two_forwards"}
VALUES = ("parameters", "parameters_after_eval", "loaded_parameters")


def having(trait: str) -> Applies:
    """Applies to models with `trait`."""

    def applies(case: Case, model: ModelCase) -> bool:
        return trait in model.traits

    return applies


@check("tied.one", profile="core", scenarios=EVERYWHERE, applies=having("tied"))
def tied_one(evidence: Evidence, ledger: Ledger) -> None:
    """Tied names have one value and one gradient, bit for bit, whenever they are seen."""
    for what in (*VALUES, "gradients", "clipped"):
        hold_ties(evidence, ledger, what)


def hold_ties(evidence: Evidence, ledger: Ledger, what: str) -> None:
    """Tied names have one entry, bit for bit, in every observation `what`."""
    noun = "gradients" if what in ("gradients", "clipped") else "values"
    for rank, seen, got in observed(evidence, what):
        for first, *others in anatomy(evidence.model).tied:
            for other in others:
                if first in got and other in got:
                    ledger.hold(
                        _same(got[first], got[other]),
                        moment=seen.moment,
                        cause=Cause.UNTIED,
                        sentence=f"{first} and {other} have different {noun} at"
                        f" {place(seen.where, rank)}: {MEANING[Cause.UNTIED]}",
                        rank=rank,
                        fqn=other,
                        **seen.where,
                    )


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)


@check("frozen.kept", profile="core", scenarios=EVERYWHERE, applies=having("frozen"))
def frozen_kept(evidence: Evidence, ledger: Ledger) -> None:
    """Frozen parameters keep their first value, bit for bit, and never hold a gradient."""
    frozen = sorted(anatomy(evidence.model).frozen)
    for what in (*VALUES, "gradients"):
        for rank, seen, got in observed(evidence, what):
            start = evidence.oracle.reference.get(rank, "parameters", step=-1)
            for name in frozen:
                value = got.get(name)
                if what == "gradients":
                    held, cause = value is None, Cause.UNEXPECTED_GRADIENT
                elif value is None:
                    held, cause = False, Cause.MISSING_KEY
                else:
                    held, cause = distance(value, start[name]) == 0.0, Cause.FROZEN_CHANGED
                missing = cause is Cause.MISSING_KEY
                text = key_text(cause, name, got) if missing else MEANING[cause]
                ledger.hold(
                    held,
                    moment=seen.moment,
                    cause=cause,
                    sentence=f"frozen {name} at {place(seen.where, rank)}: {text}",
                    rank=rank,
                    fqn=name,
                    **seen.where,
                )


@check(
    "unused.convention",
    profile="core",
    scenarios=frozenset({"unused"}),
    needs=frozenset({"unused_parameters"}),
    applies=having("unused"),
)
def unused_convention(evidence: Evidence, ledger: Ledger) -> None:
    """A parameter that no rank uses has the declared gradient, and moves as that one tells."""
    in_force = convention_in_force(evidence, "unused_grad")
    unused = sorted(_unused(evidence))
    for rank, seen, got in observed(evidence, "gradients"):
        for name in unused:
            value = got.get(name)
            empty = value is None or not bool(as_tensor(value).any())
            # the oracle keeps the declared convention
            held = empty and (value is None) == (seen.value.get(name) is None)
            cause = Cause.CONVENTION_BROKEN if empty else Cause.UNEXPECTED_GRADIENT
            found = "none" if value is None else "zero" if empty else "not zero"
            ledger.hold(
                held,
                moment=seen.moment,
                cause=cause,
                sentence=f"gradient of unused {name} at {place(seen.where, rank)} is {found}:"
                f" {MEANING[cause]}; {in_force}",
                rank=rank,
                fqn=name,
                **seen.where,
            )
    compare_trees(
        evidence,
        ledger,
        "parameters",
        noun="unused parameter",
        keys=lambda key: key in unused,
        suspects=lambda rank, seen, key: _other_course(evidence, rank, seen, key),
    )


def _unused(evidence: Evidence) -> set[str]:
    """Trainable parameters without a gradient on any rank."""
    parts, reference = anatomy(evidence.model), evidence.oracle.reference
    used = {
        name
        for rank in range(evidence.world)
        for name in reference.get(rank, "gradients_of_rank", step=0)
    }
    return set(parts.shapes) - parts.frozen - used


def _other_course(evidence: Evidence, rank: int, seen: Observation, key: str) -> list[Suspect]:
    """The parameter as the other choice between no gradient and a zero one would have moved it."""
    reference, step = evidence.oracle.reference, int(seen.where["step"])
    start = reference.get(rank, "parameters", step=-1)[key]
    if reference.get(rank, "gradients", step=0).get(key) is not None:
        return [(Cause.CONVENTION_BROKEN, start)]
    zeros = [torch.zeros_like(start)] * (step + 1)
    decayed = stepped(optimizer_named(evidence.case.optimizer), start, zeros)
    return [(Cause.CONVENTION_BROKEN, decayed)]


@check(
    "buffers.convention",
    profile="core",
    scenarios=OBSERVED,  # what a load brings back is judged as a load
    applies=having("buffers"),
)
def buffers_convention(evidence: Evidence, ledger: Ledger) -> None:
    """After every step each rank's buffers are what the declared convention makes of them."""
    compare_trees(evidence, ledger, "buffers", noun="buffer", suspects=_buffer_suspects(evidence))
    in_force = convention_in_force(evidence, "buffers")
    for index, found in enumerate(ledger.mismatches):
        if found.error is not None:  # not where a name or a shape is wrong
            ledger.mismatches[index] = replace(found, sentence=f"{found.sentence}; {in_force}")


def convention_in_force(evidence: Evidence, name: str) -> str:
    """The value of one of the `Conventions` that was judged by, and whether it is the default."""
    value = getattr(evidence.conventions, name)
    if value != getattr(Conventions(), name):
        return f"declared is {name}={value!r}"
    return (
        f"judged by the default, {name}={value!r}, as the adapter's conventions declare nothing"
        " else"
    )


def _buffer_suspects(evidence: Evidence) -> Suspects:
    """The mean over ranks, another rank's buffer, and the course of the other convention."""
    reference = evidence.oracle.reference

    def suspects(rank: int, seen: Observation, key: str) -> list[Suspect]:
        step, expected = int(seen.where["step"]), seen.value[key]
        of_ranks = [reference.get(r, "buffers", step=step)[key] for r in range(evidence.world)]
        mean = torch.stack([b.double() for b in of_ranks]).mean(0).to(expected.dtype)
        found: list[Suspect] = [(Cause.CONVENTION_BROKEN, mean)]
        other = _from_other_rank(evidence, rank, step, key, expected)
        found += [] if other is None else [(Cause.CONVENTION_BROKEN, other)]
        found += [(Cause.OTHER_RANK, b) for r, b in enumerate(of_ranks) if r != rank]
        return found

    return suspects


def _from_other_rank(
    evidence: Evidence, rank: int, step: int, key: str, expected: Tensor
) -> Tensor | None:
    """The buffer, had the step begun with the other convention's source.

    Running statistics forget their start by one factor, which is taken from the data: the gap to
    the oracle must be a part of the gap between the two possible starts.
    """
    own, source = (0, rank) if evidence.conventions.buffers == "rank0" else (rank, 0)
    got = evidence.history.find(rank, "buffers", {"step": step})
    before = evidence.history.find(source, "buffers", {"step": step - 1})
    declared = evidence.oracle.reference.find(own, "buffers", {"step": step - 1})
    values = [None if seen is None else seen.value.get(key) for seen in (got, before, declared)]
    if any(not isinstance(v, Tensor) or not v.is_floating_point() for v in values):
        return None
    now, start, base = (as_tensor(v).double() for v in values)
    gap, kept = now - expected.double(), start - base
    factor = ratio(gap, kept)
    bound = evidence.oracle.bound(rank, "buffers", {"step": step}, key)
    if factor is None or not 0.0 < factor <= 1.0 or not is_scaled(gap, kept, bound):
        return None
    return (expected.double() + factor * kept).to(expected.dtype)
