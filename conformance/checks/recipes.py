"""What a wrapper shows to the model inside and to the recipes around it."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.causes import MEANING, Cause
from conformance.checks.evidence import (
    Evidence,
    Ledger,
    Suspects,
    change,
    compare_trees,
    observed,
    place,
)
from conformance.checks.registry import check
from conformance.checks.structure import hold_ties
from conformance.checks.updates import stepped
from conformance.explain import Suspect
from conformance.history import Observation
from conformance.optimizers import optimizer_named
from conformance.report.words import number
from conformance.scenarios.recipes import OVERFLOW, ROW_OVERFLOW, SCALED_STEPS
from conformance.tolerance import distance

WITNESS = frozenset({"witness"})


@check("forward.strides", profile="robustness", scenarios=WITNESS)
def forward_strides(evidence: Evidence, ledger: Ledger) -> None:
    """Forward sees parameters of the model's own shapes and memory formats."""
    for rank, seen, got in observed(evidence, "parameters_seen"):
        for name, (shape, strides) in seen.value.items():
            found = got.get(name)
            # the stride of a dimension of one element says nothing
            held = (
                found is not None
                and found[0] == shape
                and all(
                    one == other or size == 1
                    for size, one, other in zip(shape, found[1], strides, strict=True)
                )
            )
            shown = "not there" if found is None else f"{found[0]} with strides {found[1]}"
            same = found is not None and found[0] == shape
            cause = Cause.WRONG_STRIDES if same else Cause.WRONG_SHAPE
            ledger.hold(
                held,
                moment=seen.moment,
                cause=cause,
                sentence=f"{name} in forward at {place(seen.where, rank)} is {shown},"
                f" expected {shape} with strides {strides}: {MEANING[cause]}",
                rank=rank,
                fqn=name,
                **seen.where,
            )


@check("hooks.modules", profile="robustness", scenarios=WITNESS)
def hooks_modules(evidence: Evidence, ledger: Ledger) -> None:
    """Forward and backward hooks of modules run as often as without the wrapper."""
    _compare_counts(evidence, ledger, "hooks_calls", "forward hook")
    _compare_counts(evidence, ledger, "hooks_backward", "backward hook")


@check(
    "hooks.parameters",
    profile="robustness",
    scenarios=WITNESS,
    needs=frozenset({"hooks.parameters"}),
)
def hooks_parameters(evidence: Evidence, ledger: Ledger) -> None:
    """Hooks of parameters run once for every backward that gives them a gradient."""
    _compare_counts(evidence, ledger, "hooks_gradients", "hook")


def _compare_counts(evidence: Evidence, ledger: Ledger, what: str, noun: str) -> None:
    for rank, seen, got in observed(evidence, what):
        for name in sorted({*seen.value, *got}):
            due, found = seen.value.get(name, 0), got.get(name, 0)
            ledger.hold(
                found == due,
                moment=seen.moment,
                cause=Cause.WRONG_COUNT,
                sentence=f"{noun} of {name} ran {number(int(found), 'time')} until"
                f" {place(seen.where, rank)}, expected {due:g}: {MEANING[Cause.WRONG_COUNT]}",
                rank=rank,
                fqn=name,
                got=found,
                expected=due,
                **seen.where,
            )


@check(
    "scaler.together",
    profile="robustness",
    scenarios=frozenset({"scaled"}),
    needs=frozenset({"scaler"}),
)
def scaler_together(evidence: Evidence, ledger: Ledger) -> None:
    """An infinite loss on one rank keeps all ranks from stepping, and all lower the scale."""
    _hold_together(evidence, ledger, OVERFLOW, range(ROW_OVERFLOW))


@check(
    "scaler.shards",
    profile="robustness",
    scenarios=frozenset({"scaled"}),
    needs=frozenset({"scaler"}),
)
def scaler_shards(evidence: Evidence, ledger: Ledger) -> None:
    """Infinities in one rank's shards alone keep all from stepping, and all lower the scale."""
    _hold_together(evidence, ledger, ROW_OVERFLOW, range(ROW_OVERFLOW, SCALED_STEPS))


def _hold_together(evidence: Evidence, ledger: Ledger, overflow: int, steps: range) -> None:
    """The scale is right after `steps`, and the step `overflow` is none."""
    for rank, seen, got in observed(evidence, "scale"):
        if seen.where["step"] not in steps:
            continue
        ledger.hold(
            got == seen.value,
            moment=seen.moment,
            cause=Cause.RANKS_DIFFER,
            sentence=f"the loss scale at {place(seen.where, rank)} is {got:g},"
            f" expected {seen.value:g}: {MEANING[Cause.RANKS_DIFFER]}",
            rank=rank,
            got=got,
            expected=seen.value,
            **seen.where,
        )
    for rank, seen, got in observed(evidence, "parameters"):
        if seen.where["step"] != overflow:
            continue
        before = evidence.history.get(rank, "parameters", step=overflow - 1)
        for name, value in got.items():
            cause = Cause.RANKS_DIFFER if bool(value.isfinite().all()) else Cause.NON_FINITE
            ledger.hold(
                name in before and torch.equal(value, before[name]),
                moment=seen.moment,
                cause=cause,
                sentence=f"{name} at {place(seen.where, rank)} was changed by a step that"
                f" infinities on a rank forbid: {MEANING[cause]}",
                rank=rank,
                fqn=name,
                **seen.where,
            )


@check(
    "scaler.step",
    profile="robustness",
    scenarios=frozenset({"scaled"}),
    needs=frozenset({"scaler"}),
)
def scaler_step(evidence: Evidence, ledger: Ledger) -> None:
    """The first step through a scaler changes every parameter as one without a scaler does."""
    step = {"step": 0}
    for rank, seen, after in observed(evidence, "parameters"):
        if seen.where != step:
            continue
        before = evidence.history.get(rank, "parameters", step=-1)
        start = evidence.oracle.reference.get(rank, "parameters", step=-1)
        for key in sorted(seen.value):
            name = f"change of {key} in step 0, rank {rank},"
            where = {"rank": rank, "fqn": key, **seen.where}
            if key not in before or key not in after:
                cause, sentence = Cause.MISSING_KEY, f"{key} of step 0, rank {rank}, is missing"
                ledger.hold(False, moment=seen.moment, cause=cause, sentence=sentence, **where)
                continue
            got = change(before[key], after[key])
            expected = seen.value[key] - start[key]
            bound = evidence.oracle.bound(rank, "parameters", step, key)
            if _not_unscaled(evidence, rank, key, got, expected, bound):
                cause = Cause.NOT_UNSCALED
                ledger.hold(
                    False,
                    moment=seen.moment,
                    cause=cause,
                    sentence=f"{name} is {MEANING[cause]}",
                    **where,
                )
            else:
                ledger.number(got, expected, bound, name=name, moment=seen.moment, **where)


def _not_unscaled(
    evidence: Evidence, rank: int, key: str, got: Tensor, expected: Tensor, bound: float
) -> bool:
    """Whether a wrong first change is that by the scaled gradient, as close as one so large is."""
    reference, step = evidence.oracle.reference, {"step": 0}
    scale, gradients = (reference.find(rank, w, step) for w in ("scale", "gradients_scaled"))
    gradient = None if gradients is None else gradients.value.get(key)
    if scale is None or not isinstance(gradient, Tensor) or got.shape != expected.shape:
        return False
    start = reference.get(rank, "parameters", step=-1)[key]
    wrong = stepped(optimizer_named(evidence.case.optimizer), start, [gradient]) - start
    near = distance(got, wrong) <= bound * max(1.0, float(scale.value))
    return near and distance(got, expected) > bound


@check("average.values", profile="robustness", scenarios=frozenset({"averaged"}))
def average_values(evidence: Evidence, ledger: Ledger) -> None:
    """An average of the weights over steps, written back to them, is what the model then has."""
    compare_trees(
        evidence,
        ledger,
        "averaged_parameters",
        noun="averaged parameter",
        suspects=_not_written(evidence),
    )


def _not_written(evidence: Evidence) -> Suspects:
    """The parameters of the last step, before the average took their place."""
    last = evidence.expected("parameters")[-1]

    def suspects(rank: int, seen: Observation, key: str) -> list[Suspect]:
        value = evidence.oracle.reference.get(rank, "parameters", **last.where).get(key)
        return [] if value is None else [(Cause.NOT_LOADED, value)]

    return suspects


@check(
    "materialised.values",
    profile="robustness",
    scenarios=frozenset({"materialised"}),
    needs=frozenset({"meta"}),
)
def materialised_values(evidence: Evidence, ledger: Ledger) -> None:
    """A model that is wrapped without storage holds, after a load, what was loaded and no more."""
    compare_trees(evidence, ledger, "materialised_parameters", noun="parameter")
    compare_trees(evidence, ledger, "materialised_buffers", noun="buffer")
    hold_ties(evidence, ledger, "parameters")
