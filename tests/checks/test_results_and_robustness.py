"""Dtypes of results, evaluation, two forwards."""

from __future__ import annotations

import pytest
import torch

from conformance.adapter import Conventions
from conformance.causes import Cause
from tests.checks.literal import Story, cause, first_mismatch, training


@pytest.mark.parametrize("what", ["gradients", "parameters"])
def test_a_shorter_dtype_is_named_whatever_the_values(what: str) -> None:
    story = training()
    value = story.value(what, 1, step=0)["bias"].to(torch.float64)
    story.instead(what, {"bias": value}, rank=1, step=0)
    first = first_mismatch("dtypes.results", story)
    assert first is not None
    assert (first.cause, first.where["rank"]) == (Cause.WRONG_DTYPE, 1)


def test_the_dtype_of_a_loss_and_of_a_norm_counts() -> None:
    story = training()
    story.instead("loss", story.value("loss", step=0, micro=0).bfloat16(), step=0, micro=0)
    assert cause("dtypes.results", story) is Cause.WRONG_DTYPE
    story = training()
    at = {"step": 1, "p": "2", "max_norm": 0.1}
    story.instead("grad_norm", story.value("grad_norm", **at).bfloat16(), **at)
    assert cause("dtypes.results", story) is Cause.WRONG_DTYPE


def test_a_plain_number_has_no_dtype() -> None:
    story = training()
    story.instead("optimizer_state", {"body/step": 1.0}, step=0)
    story.instead("loss", 5.0, step=0, micro=0)
    assert cause("dtypes.results", story) is None


@pytest.mark.parametrize("what", ["parameters", "buffers"])
def test_evaluation_may_not_change_a_bit(what: str) -> None:
    story = training()
    key = "bias" if what == "parameters" else "mean"
    value = story.value(f"{what}_after_eval", 1, index=0)[key]
    story.instead(f"{what}_after_eval", {key: torch.nextafter(value, value + 1)}, rank=1, index=0)
    first = first_mismatch("eval.unchanged", story)
    assert first is not None
    assert (first.cause, first.where["fqn"]) == (Cause.CHANGED_BY_EVAL, key)


def test_evaluation_is_compared_with_the_wrapper_itself() -> None:
    story = training()
    other = {"bias": torch.full((3,), 9.0)}
    story.instead("parameters", other, step=1)
    story.instead("parameters_after_eval", other, index=0)
    assert cause("eval.unchanged", story) is None


def test_buffers_that_were_seen_just_before_an_evaluation_are_those_that_it_must_leave() -> None:
    story = training()
    moved = [{"mean": story.value("buffers", rank, step=1)["mean"] + 1.0} for rank in (0, 1)]
    for rank in (0, 1):
        story.instead("buffers_after_eval", moved[rank], rank=rank, index=0)
    assert cause("eval.unchanged", story) is Cause.CHANGED_BY_EVAL
    story.see("buffers_before_eval", *moved, index=0)
    assert cause("eval.unchanged", story) is None


def _taken_over(buffers: str) -> Story:
    story = training()
    story.conventions = Conventions(buffers=buffers)  # type: ignore[arg-type]
    story.instead("buffers_after_eval", story.value("buffers", 0, step=1), rank=1, index=0)
    return story


def test_evaluation_may_take_over_rank_zeros_buffers_where_that_is_declared() -> None:
    assert cause("eval.unchanged", _taken_over("rank0")) is None
    assert cause("eval.unchanged", _taken_over("local")) is Cause.CHANGED_BY_EVAL


def test_the_second_of_two_forwards_may_not_replace_the_first() -> None:
    story = training(scenario="two_forwards", accumulation=3)
    assert cause("two_forwards.gradients", story) is None
    story.instead("gradients", story.value("gradients_last_micro", step=0), step=0)
    assert cause("two_forwards.gradients", story) is Cause.LAST_MICRO_BATCH_ONLY
