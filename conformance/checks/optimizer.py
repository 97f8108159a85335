"""The optimizer's state, step counts and hyper-parameters, through training and after a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger, compare_trees, place
from conformance.checks.registry import TRAINING, check
from conformance.explain import Suspect
from conformance.history import Observation, as_tensor

STEP = "/step"
CHOICES_OF_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyper-parameters that say how to compute, not what; a wrapper may set them as it likes."""


def is_value(key: str) -> bool:
    """Whether an entry of a flattened optimizer state is a value and not a step count."""
    return not key.endswith(STEP)


@check("optimizer.state", profile="core", scenarios=TRAINING | {"eval_first"})
def optimizer_state(evidence: Evidence, ledger: Ledger) -> None:
    """After every step the optimizer's state of every parameter is the oracle's."""
    compare_trees(
        evidence,
        ledger,
        "optimizer_state",
        noun="optimizer state",
        keys=is_value,
        suspects=state_suspects(evidence),
    )


def state_suspects(evidence: Evidence) -> Any:
    """Candidates for a wrong state: that of the step before, and those of other parameters."""

    def suspects(rank: int, seen: Observation, key: str) -> list[Suspect]:
        expected = as_tensor(seen.value[key])
        before = {**seen.where, "step": int(seen.where["step"]) - 1}
        earlier = evidence.oracle.reference.find(rank, "optimizer_state", before)
        found: list[Suspect] = []
        if earlier is not None and key in earlier.value:
            found.append((Cause.STALE, as_tensor(earlier.value[key])))
        return found + [
            (Cause.PERMUTED, as_tensor(value))
            for other, value in seen.value.items()
            if other != key and is_value(other) and as_tensor(value).shape == expected.shape
        ]

    return suspects


@check("optimizer.steps", profile="core", scenarios=TRAINING | {"eval_first", "checkpoint"})
def optimizer_steps(evidence: Evidence, ledger: Ledger) -> None:
    """Step counts and hyper-parameters are the oracle's after every step and after a load."""
    for rank in range(evidence.world):
        for prefix in ("", "loaded_"):
            for seen in evidence.expected(f"{prefix}optimizer_state", rank):
                got = evidence.history.get(rank, seen.what, **seen.where)
                _compare_counts(ledger, seen, got, rank)
            for seen in evidence.expected(f"{prefix}hyperparameters", rank):
                got = evidence.history.get(rank, seen.what, **seen.where)
                _compare_hyperparameters(ledger, seen, got, rank)


def _when(seen: Observation, rank: int) -> str:
    after = "after the load, " if seen.what.startswith("loaded_") else ""
    return f"{after}{place(seen.where, rank)}"


def _compare_counts(ledger: Ledger, seen: Observation, got: Mapping[str, Any], rank: int) -> None:
    stateful = {key.rpartition("/")[0] for key in got}
    for key in seen.value:
        # a parameter without any state has lost more than its count: other checks say so
        if is_value(key) or key.removesuffix(STEP) not in stateful:
            continue
        expected = float(as_tensor(seen.value[key]))
        value = None if got.get(key) is None else as_tensor(got[key]).flatten()
        counted = value is not None and value.numel() > 0 and bool((value == expected).all())
        shown = "missing" if value is None else value.tolist()
        ledger.hold(
            counted,
            moment=seen.moment,
            cause=Cause.MISSING_KEY if value is None else Cause.WRONG_STEP_COUNT,
            sentence=f"step count {key} at {_when(seen, rank)} is {shown}, expected {expected:g}",
            rank=rank,
            fqn=key,
            got=shown,
            expected=expected,
            **seen.where,
        )


def _compare_hyperparameters(
    ledger: Ledger, seen: Observation, got: Sequence[Mapping[str, Any]], rank: int
) -> None:
    """Every group has the values that the oracle's groups agree on; how many groups is free."""
    expected = [_what_to_compute(group) for group in seen.value]
    ledger.hold(
        bool(got),
        moment=seen.moment,
        cause=Cause.MISSING_KEY,
        sentence=f"the optimizer has no parameter group at {_when(seen, rank)}",
        rank=rank,
        **seen.where,
    )
    for index, group in enumerate(got):
        wanted = expected[min(index, len(expected) - 1)]
        for key, value in wanted.items():
            ledger.hold(
                key in group and group[key] == value,
                moment=seen.moment,
                cause=Cause.WRONG_HYPERPARAMETER,
                sentence=f"{key} of parameter group {index} at {_when(seen, rank)} is"
                f" {group.get(key, 'missing')}, expected {value}:"
                f" {MEANING[Cause.WRONG_HYPERPARAMETER]}",
                rank=rank,
                key=key,
                got=group.get(key),
                expected=value,
                **seen.where,
            )


def _what_to_compute(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in CHOICES_OF_IMPLEMENTATION}
