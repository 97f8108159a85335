"""The checks of the optimizer's state, counts and hyper-parameters, on runs told by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.case import Case
from conformance.causes import Cause
from tests.checks.literal import Story, cause, first_mismatch

GROUP: dict[str, Any] = {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.01, "foreach": None}


def state(step: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(step)
    return {
        "body/exp_avg": torch.randn(4, 3, generator=draw),
        "body/exp_avg_sq": torch.rand(4, 3, generator=draw),
        "body/step": torch.tensor(step + 1.0),
        "bias/exp_avg": torch.randn(3, generator=draw),
        "bias/step": torch.tensor(step + 1.0),
    }


def story() -> Story:
    told = Story(case=Case.of("literal", "train"))
    for step in range(2):
        told.phase(f"step {step}")
        told.see("optimizer_state", state(step), step=step)
        told.see("hyperparameters", [GROUP], step=step)
    return told


def test_the_oracles_own_state_passes() -> None:
    assert cause("optimizer.state", story()) is None
    assert cause("optimizer.steps", story()) is None


@pytest.mark.parametrize(
    ("defect", "expected"),
    [
        (lambda t: t.bfloat16().float(), Cause.DTYPE_ROUND_TRIP),
        (lambda t: t.roll(1, 0), Cause.OFF_BY_ONE_SHARD),
        (lambda t: t.flip(0), Cause.PERMUTED),
        (torch.zeros_like, Cause.ZERO),
        (lambda t: state(1)["body/exp_avg_sq"], Cause.PERMUTED),
        (lambda t: state(0)["body/exp_avg"], Cause.STALE),
        (lambda t: t[:2], Cause.WRONG_SHAPE),
    ],
)
def test_a_wrong_state_is_named(defect: Callable[[Tensor], Tensor], expected: Cause) -> None:
    told = story()
    told.instead("optimizer_state", {"body/exp_avg": defect(state(1)["body/exp_avg"])}, step=1)
    found = first_mismatch("optimizer.state", told)
    assert found is not None
    assert found.cause is expected
    assert (found.where["step"], found.where["rank"]) == (1, 0)
    assert found.where["fqn"] == "body/exp_avg"
    assert cause("optimizer.steps", told) is None


def test_a_wrong_count_is_the_business_of_the_counts_alone() -> None:
    told = story()
    told.instead("optimizer_state", {"bias/step": torch.tensor(2.0)}, rank=1, step=0)
    found = first_mismatch("optimizer.steps", told)
    assert found is not None
    assert found.cause is Cause.WRONG_STEP_COUNT
    assert (found.where["rank"], found.where["fqn"]) == (1, "bias/step")
    assert cause("optimizer.state", told) is None


def test_a_count_may_be_a_number_or_one_per_shard() -> None:
    told = story()
    told.instead("optimizer_state", {"bias/step": 1, "body/step": torch.ones(2)}, step=0)
    assert cause("optimizer.steps", told) is None


def test_a_count_that_is_lost_is_a_missing_key() -> None:
    told = story()
    told.instead("optimizer_state", {"bias/step": None}, step=0)
    assert cause("optimizer.steps", told) is Cause.MISSING_KEY


@pytest.mark.parametrize(
    ("check", "prefix"), [("optimizer.steps", ""), ("resume.options", "loaded_")]
)
@pytest.mark.parametrize(
    "groups", [[{**GROUP, "lr": 0.2}], [GROUP, {**GROUP, "betas": [0.9, 0.9]}], [{"lr": 0.1}]]
)
def test_a_wrong_hyperparameter_is_found_in_any_group(
    groups: list[dict[str, Any]], check: str, prefix: str
) -> None:
    told = loaded()
    told.instead(f"{prefix}hyperparameters", groups, step=1)
    assert cause(check, told) is Cause.WRONG_HYPERPARAMETER
    other = {"optimizer.steps": "resume.options", "resume.options": "optimizer.steps"}[check]
    assert cause(other, told) is None


def loaded() -> Story:
    told = story()
    told.phase("load")
    told.see("loaded_optimizer_state", state(1), step=1)
    told.see("loaded_hyperparameters", [GROUP], step=1)
    return told


def test_a_count_that_a_load_reset_is_the_business_of_the_load() -> None:
    told = loaded()
    told.instead("loaded_optimizer_state", {"body/step": torch.tensor(0.0)}, rank=1, step=1)
    found = first_mismatch("resume.options", told)
    assert found is not None
    assert found.cause is Cause.WRONG_STEP_COUNT
    assert found.sentence.startswith("step count body/step after the load at step 1, rank 1")
    assert cause("optimizer.steps", told) is None


def test_an_optimizer_without_groups_does_not_pass() -> None:
    told = story()
    told.instead("hyperparameters", [], step=1)
    assert cause("optimizer.steps", told) is Cause.MISSING_KEY


def test_how_it_computes_and_into_how_many_groups_it_divides_is_free() -> None:
    told = story()
    told.instead("hyperparameters", [{**GROUP, "foreach": True, "own": 3}, GROUP], step=1)
    assert cause("optimizer.steps", told) is None
