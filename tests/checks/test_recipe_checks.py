"""What shows inside the model and around its steps, told by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.case import Case
from conformance.causes import Cause
from tests.checks.literal import Story, cause, first_mismatch

SHAPES = {"body": [[4, 3], [1, 4]], "row": [[1, 3], [3, 1]]}
CALLS = {"first/forward": 1.0, "first/recompute": 1.0}


def watched() -> Story:
    story = Story(case=Case.of("literal", "witness"))
    story.phase("build")
    story.phase("step 0")
    story.see("parameters_seen", SHAPES, step=0)
    story.see("hooks_calls", CALLS, step=0)
    story.see("hooks_backward", {"first": 1.0}, step=0)
    story.see("hooks_gradients", {"body": 1.0}, step=0)
    return story


def scaled() -> Story:
    story = Story(case=Case.of("literal", "scaled"))
    for step, value in enumerate((0.5, 0.5, 0.25)):
        story.phase(f"step {step}")
        story.see("scale", 64.0 if step == 0 else 32.0, step=step)
        story.see("parameters", {"body": torch.full((2,), value)}, step=step)
    return story


def averaged() -> Story:
    story = Story(case=Case.of("literal", "averaged"))
    story.phase("step 0")
    story.see("parameters", {"body": torch.tensor([1.0, 2.0])}, step=0)
    story.phase("average")
    story.see("averaged_parameters", {"body": torch.tensor([3.0, 5.0])}, index=0)
    return story


def materialised() -> Story:
    story = Story(case=Case.of("literal", "materialised"))
    story.phase("load")
    story.see("materialised_parameters", {"body": torch.tensor([1.0, 2.0])}, step=0)
    return story


@pytest.mark.parametrize(
    ("check", "story"),
    [
        ("forward.strides", watched),
        ("hooks.modules", watched),
        ("hooks.parameters", watched),
        ("scaler.together", scaled),
        ("average.values", averaged),
        ("materialised.values", materialised),
    ],
)
def test_a_right_run_holds(check: str, story: Any) -> None:
    assert cause(check, story()) is None


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([[4, 3], [3, 1]], Cause.WRONG_STRIDES),
        ([[3, 4], [1, 4]], Cause.WRONG_SHAPE),
        ([[4], [1]], Cause.WRONG_SHAPE),
    ],
)
def test_what_forward_sees_of_a_parameter_is_named(seen: Any, expected: Cause) -> None:
    story = watched()
    story.instead("parameters_seen", {"body": seen}, rank=1, step=0)
    first = first_mismatch("forward.strides", story)
    assert first is not None
    assert (first.cause, first.where["fqn"], first.where["rank"]) == (expected, "body", 1)


def test_the_stride_of_a_single_row_says_nothing() -> None:
    story = watched()
    story.instead("parameters_seen", {"row": [[1, 3], [12, 1]]}, step=0)
    assert cause("forward.strides", story) is None


@pytest.mark.parametrize(
    ("check", "what", "counts"),
    [
        ("hooks.modules", "hooks_calls", {"first/forward": 2.0}),
        ("hooks.modules", "hooks_calls", {"second/forward": 1.0}),
        ("hooks.modules", "hooks_backward", {"first": 0.0}),
        ("hooks.parameters", "hooks_gradients", {"body": 0.0}),
    ],
)
def test_hooks_that_run_too_often_or_too_seldom_are_named(
    check: str, what: str, counts: dict[str, float]
) -> None:
    story = watched()
    story.instead(what, counts, step=0)
    assert cause(check, story) is Cause.WRONG_COUNT


def test_a_hook_that_never_ran_is_missed() -> None:
    story = watched()
    story.wrong[0, "hooks_gradients", str({"step": 0})] = {}
    assert cause("hooks.parameters", story) is Cause.WRONG_COUNT


@pytest.mark.parametrize(
    ("what", "value", "expected"),
    [
        ("scale", 64.0, Cause.RANKS_DIFFER),
        ("parameters", {"body": torch.full((2,), 0.4)}, Cause.RANKS_DIFFER),
        ("parameters", {"body": torch.tensor([0.5, torch.nan])}, Cause.NON_FINITE),
    ],
)
def test_a_step_that_only_some_ranks_skip_is_named(what: str, value: Any, expected: Cause) -> None:
    story = scaled()
    story.instead(what, value, rank=0, step=1)
    assert cause("scaler.together", story) is expected


def test_other_steps_may_move_parameters_as_they_like() -> None:
    story = scaled()
    story.instead("parameters", {"body": torch.full((2,), 9.0)}, step=2)
    assert cause("scaler.together", story) is None


def test_an_average_that_was_not_written_back_is_named() -> None:
    story = averaged()
    story.instead("averaged_parameters", {"body": torch.tensor([1.0, 2.0])}, rank=1, index=0)
    first = first_mismatch("average.values", story)
    assert first is not None
    assert (first.cause, first.where["rank"]) == (Cause.NOT_LOADED, 1)


def test_memory_that_no_load_reached_is_named() -> None:
    story = materialised()
    story.instead("materialised_parameters", {"body": torch.tensor([1.0, torch.nan])}, step=0)
    assert cause("materialised.values", story) is Cause.NON_FINITE
