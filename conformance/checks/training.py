"""Losses, gradients, parameters: the course of a training, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from conformance.case import Case
from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger, compare_trees, place
from conformance.checks.registry import TRAINING, check
from conformance.explain import Suspect
from conformance.history import Observation
from conformance.models import ModelCase

ANY_TRAINING = TRAINING | {"eval_first", "checkpoint"}
GRADIENTS = frozenset({"gradients"})


def one_micro_batch(case: Case, model: ModelCase) -> bool:
    """A step is a single backward."""
    return case.accumulation == 1


@check("losses.value", profile="core", scenarios=ANY_TRAINING | {"two_forwards"})
def losses_value(evidence: Evidence, ledger: Ledger) -> None:
    """Every rank's loss of every micro-batch is the oracle's."""
    for rank in range(evidence.world):
        for seen in evidence.expected("loss", rank):
            got = evidence.history.get(rank, "loss", **seen.where)
            ledger.number(
                got,
                seen.value,
                evidence.oracle.bound(rank, "loss", dict(seen.where)),
                name=f"loss at {place(seen.where, rank)}",
                moment=seen.moment,
                suspects=lambda rank=rank, seen=seen: _loss_suspects(evidence, rank, seen),
                rank=rank,
                **seen.where,
            )


def _loss_suspects(evidence: Evidence, rank: int, seen: Observation) -> list[Suspect]:
    """The loss that the weights of the step before would give, and the other ranks' losses."""
    reference = evidence.oracle.reference
    stale = reference.find(rank, "stale_loss", seen.where)
    found: list[Suspect] = [] if stale is None else [(Cause.STALE, stale.value)]
    for other in range(evidence.world):
        if other != rank:
            found.append((Cause.OTHER_RANK, reference.get(other, "loss", **seen.where)))
    return found


@check("gradients.scale", profile="core", needs=GRADIENTS, applies=one_micro_batch)
def gradients_scale(evidence: Evidence, ledger: Ledger) -> None:
    """Gradients of one backward have the declared scale: no factor separates them from the oracle."""
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
    if square == 0:
        return None, 0.0, 0.0
    factor = sum(float(g @ e) for g, e, _ in pairs) / square
    scale = max(float(e.abs().max()) for _, e, _ in pairs)
    error = max(float((g - factor * e).abs().max()) for g, e, _ in pairs) / scale
    bounds = (evidence.oracle.bound(rank, "gradients", dict(seen.where), k) for _, _, k in pairs)
    return factor, error, max(bounds) / scale * max(1.0, abs(factor)) + 1e-6


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
    """The gradient of every parameter, before clipping and before the optimizer, is the oracle's."""
    compare_trees(
        evidence, ledger, "gradients", noun="gradient of", suspects=gradient_suspects(evidence)
    )


def gradient_suspects(evidence: Evidence) -> Any:
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
        found += _found(reference, rank, "gradients_of_rank", seen, key, Cause.NOT_REDUCED)
        for other in range(evidence.world):
            if other != rank:
                found += _found(reference, other, "gradients_of_rank", seen, key, Cause.OTHER_RANK)
        before = {**seen.where, "step": int(seen.where["step"]) - 1}
        earlier = reference.find(rank, "gradients", before)
        if earlier is not None and earlier.value.get(key) is not None:
            found.append((Cause.STALE, earlier.value[key]))
        return found

    return suspects


def _found(
    history: Any, rank: int, what: str, seen: Observation, key: str, cause: Cause
) -> list[Suspect]:
    other = history.find(rank, what, seen.where)
    value = None if other is None else other.value.get(key)
    return [] if value is None else [(cause, value)]


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
            expected = expected_after - start[key]
            got = after[key] - before[key]
            ledger.number(
                got,
                expected,
                evidence.oracle.bound(rank, "parameters", {"step": 0}, key),
                name=f"change of {key} in step 0, rank {rank},",
                moment=seen.moment,
                suspects=lambda expected=expected: [
                    (Cause.SUMMED_NOT_AVERAGED, expected * evidence.world),
                    (Cause.DIVIDED_TWICE, expected / evidence.world),
                ],
                rank=rank,
                step=0,
                fqn=key,
            )


@check("parameters.end", profile="core", scenarios=ANY_TRAINING | {"two_forwards"})
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


def parameter_suspects(evidence: Evidence) -> Any:
    """Candidates for a wrong parameter: its value one step before."""

    def suspects(rank: int, seen: Observation, key: str) -> list[Suspect]:
        before = {**seen.where, "step": int(seen.where["step"]) - 1}
        earlier = evidence.oracle.reference.find(rank, seen.what, before)
        return [] if earlier is None else [(Cause.STALE, earlier.value[key])]

    return suspects
