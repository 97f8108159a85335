"""The optimizer's state, step counts and hyper-parameters through training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from conformance.causes import MEANING, Cause
from conformance.checks.evidence import Evidence, Ledger, Moment, compare_trees, place
from conformance.checks.registry import OBSERVED, check
from conformance.checks.updates import state_after
from conformance.explain import Suspect
from conformance.history import Observation, as_tensor
from conformance.optimizers import optimizer_named

STEP = "/step"
CHOICES_OF_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyper-parameters that say how to compute, not what; a wrapper may set them as it likes."""


def is_value(key: str) -> bool:
    """Whether an entry of a flattened optimizer state is a value and not a step count."""
    return not key.endswith(STEP)


@check("optimizer.state", profile="core", scenarios=OBSERVED)
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
            found += _of_older_gradient(evidence, rank, earlier, key)
        return found + [
            (Cause.PERMUTED, as_tensor(value))
            for other, value in seen.value.items()
            if other != key and is_value(other) and as_tensor(value).shape == expected.shape
        ]

    return suspects


def _of_older_gradient(
    evidence: Evidence, rank: int, earlier: Observation, key: str
) -> list[Suspect]:
    """The state if the optimizer had stepped with the gradient of the step before once more."""
    reference, (name, _, entry) = evidence.oracle.reference, key.rpartition("/")
    start = reference.find(rank, "parameters", earlier.where)
    state = {
        one.rpartition("/")[2]: value
        for one, value in earlier.value.items()
        if one.rpartition("/")[0] == name
    }
    trees = [reference.find(rank, what, earlier.where) for what in ("gradients", "clipped")]
    gradients = [None if tree is None else tree.value.get(name) for tree in trees]
    return [
        (Cause.STALE, after[entry])
        for gradient in gradients
        if start is not None and isinstance(gradient, Tensor)
        for after in [
            state_after(
                optimizer_named(evidence.case.optimizer), start.value[name], state, gradient
            )
        ]
    ]


@check("optimizer.steps", profile="core", scenarios=OBSERVED | {"checkpoint", "resume"})
def optimizer_steps(evidence: Evidence, ledger: Ledger) -> None:
    """Step counts and hyper-parameters are the oracle's after every step."""
    compare_steps(evidence, ledger, prefix="")


def compare_steps(evidence: Evidence, ledger: Ledger, *, prefix: str) -> None:
    """Step counts and hyper-parameters are the oracle's, as they were observed under `prefix`."""
    for rank in range(evidence.world):
        for seen in evidence.expected(f"{prefix}optimizer_state", rank):
            got = evidence.history.get(rank, seen.what, **seen.where)
            _compare_counts(ledger, seen, got, rank)
        for seen in evidence.expected(f"{prefix}hyperparameters", rank):
            got = evidence.history.get(rank, seen.what, **seen.where)
            where = {"rank": rank, **seen.where}
            owner = _when(seen, rank)
            compare_options(ledger, seen.moment, got, seen.value, owner, **where)


def _when(seen: Observation, rank: int) -> str:
    after = "after the load at" if seen.what.startswith("loaded_") else "at"
    return f"{after} {place(seen.where, rank)}"


def _compare_counts(ledger: Ledger, seen: Observation, got: Mapping[str, Any], rank: int) -> None:
    stateful = {key.rpartition("/")[0] for key in got}
    when = _when(seen, rank)
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
            sentence=f"step count {key} {when} is {shown}, expected {expected:g}",
            rank=rank,
            fqn=key,
            got=shown,
            expected=expected,
            **seen.where,
        )


def what_to_compute(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group without those that say how to compute."""
    return {k: v for k, v in group.items() if k not in CHOICES_OF_IMPLEMENTATION}


def compare_count(
    ledger: Ledger,
    seen: Observation,
    name: str,
    got: Tensor,
    expected: Tensor,
    where: Mapping[str, Any],
) -> None:
    """A step count that was saved or kept is the one that was there."""
    cause = Cause.WRONG_STEP_COUNT
    ledger.hold(
        bool((got == expected).all()),
        moment=seen.moment,
        cause=cause,
        sentence=f"{name} is {got.tolist()}, expected {expected.tolist()}: {MEANING[cause]}",
        got=got.tolist(),
        expected=expected.tolist(),
        **where,
    )


def compare_options(
    ledger: Ledger,
    moment: Moment,
    got: Sequence[Mapping[str, Any]],
    due: Sequence[Mapping[str, Any]],
    owner: str,
    **where: Any,
) -> None:
    """Every group of `got` has the values that those of `due` agree on; how many groups is free."""
    cause = Cause.WRONG_HYPERPARAMETER
    ledger.hold(
        bool(got),
        moment=moment,
        cause=Cause.MISSING_KEY,
        sentence=f'there is no parameter group {owner}: "param_groups" is missing or empty',
        **where,
    )
    for index, group in enumerate(got):
        for key, value in what_to_compute(due[min(index, len(due) - 1)]).items():
            ledger.hold(
                key in group and group[key] == value,
                moment=moment,
                cause=cause,
                sentence=f"{key} of parameter group {index} {owner} is"
                f" {group.get(key, 'missing')}, expected {value}: {MEANING[cause]}",
                key=key,
                got=group.get(key),
                expected=value,
                **where,
            )
