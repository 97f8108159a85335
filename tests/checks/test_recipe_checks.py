"""What shows inside the model and around its steps, told by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import CHECKS, Ledger
from conformance.checks.updates import stepped
from conformance.optimizers import optimizer_named
from tests.checks.literal import Story, cause, first_mismatch

SHAPES = {"body": [[4, 3], [1, 4]], "row": [[1, 3], [3, 1]]}
START, GRADIENT = torch.tensor([1.0, -2.0]), torch.tensor([0.3, 0.7])
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
    story = Story(case=Case.of("literal", "scaled", optimizer="sgd"))
    story.phase("build")
    story.see("parameters", {"body": START}, step=-1)
    for step, scale in enumerate((64.0, 32.0, 16.0, 16.0)):
        story.phase(f"step {step}")
        if not step:
            story.see("gradients_scaled", {"body": 64.0 * GRADIENT}, step=step)
        story.see("scale", scale, step=step)
        after = moved(GRADIENT) if step < 3 else START / 2
        story.see("parameters", {"body": after}, step=step)
    return story


def moved(gradient: Tensor) -> Tensor:
    """The parameter after a first step with `gradient`."""
    return stepped(optimizer_named("sgd"), START, [gradient])


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
    story.see("materialised_buffers", {"mean": torch.tensor([5.0])}, step=0)
    story.phase("step 1")
    tied = torch.tensor([1.5, 2.5])
    story.see("parameters", {"body": tied, "head": tied}, step=1)
    return story


def unfrozen() -> Story:
    story = Story(case=Case.of("literal", "unfrozen"))
    for step, gradient in enumerate((None, torch.tensor([0.3, 0.7]))):
        story.phase(f"step {step}")
        story.see("gradients", {"body": gradient}, step=step)
        story.see("parameters", {"body": torch.tensor([1.0, 2.0 + step])}, step=step)
    return story


def repeated() -> Story:
    story = Story(case=Case.of("literal", "repeated"))
    for life in (0, 1):
        story.phase(f"life {life}")
        story.see("repeated_loss", torch.tensor(0.5), life=life, step=0, micro=0)
        parameters = {"body": torch.tensor([1.0, 2.0])}
        story.see("repeated_parameters", parameters, life=life, step=0)
    return story


@pytest.mark.parametrize(
    ("check", "story"),
    [
        ("forward.strides", watched),
        ("hooks.modules", watched),
        ("hooks.parameters", watched),
        ("scaler.together", scaled),
        ("scaler.shards", scaled),
        ("scaler.step", scaled),
        ("average.values", averaged),
        ("materialised.values", materialised),
        ("unfrozen.training", unfrozen),
        ("repeated.bits", repeated),
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
@pytest.mark.parametrize(("check", "step"), [("scaler.together", 1), ("scaler.shards", 2)])
def test_a_step_that_only_some_ranks_skip_is_named(
    what: str, value: Any, expected: Cause, check: str, step: int
) -> None:
    story = scaled()
    story.instead(what, value, rank=0, step=step)
    assert cause(check, story) is expected


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(64.0, Cause.NOT_UNSCALED), (63.0, Cause.UNEXPLAINED), (0.0, Cause.UNEXPLAINED)],
)
def test_a_step_by_gradients_of_the_scaled_loss_is_named(factor: float, expected: Cause) -> None:
    story = scaled()
    rounded = moved(factor * GRADIENT) + 5e-6  # as a change of 64 times the size may be
    story.instead("parameters", {"body": rounded}, rank=1, step=0)
    first = first_mismatch("scaler.step", story)
    assert first is not None
    assert (first.cause, first.where["rank"]) == (expected, 1)


@pytest.mark.parametrize(
    ("value", "expected"), [(START[:1], Cause.WRONG_SHAPE), (None, Cause.MISSING_KEY)]
)
def test_a_parameter_that_a_scaled_step_makes_another_is_named(value: Any, expected: Cause) -> None:
    story = scaled()
    story.instead("parameters", {"body": value}, rank=1, step=0)
    if value is None:
        del story.value("parameters", 1, step=0)["body"]
    assert cause("scaler.step", story) is expected


def test_a_step_without_a_gradient_of_the_oracle_has_no_such_name() -> None:
    story = scaled()
    story.instead("parameters", {"body": moved(64.0 * GRADIENT)}, rank=1, step=0)
    story.seen = [seen for seen in story.seen if seen[0] != "gradients_scaled"]
    assert cause("scaler.step", story) is Cause.UNEXPLAINED


def test_other_steps_may_move_parameters_as_they_like() -> None:
    story = scaled()
    story.instead("parameters", {"body": torch.full((2,), 9.0)}, step=3)
    assert cause("scaler.together", story) is None
    assert cause("scaler.shards", story) is None


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


def test_a_buffer_that_no_load_brings_back_is_named() -> None:
    story = materialised()
    story.instead("materialised_buffers", {"mean": torch.tensor([torch.nan])}, rank=1, step=0)
    first = first_mismatch("materialised.values", story)
    assert first is not None
    assert (first.cause, first.where["fqn"]) == (Cause.NON_FINITE, "mean")


def test_a_tie_that_storage_has_cut_is_named() -> None:
    story = materialised()
    story.instead("parameters", {"head": torch.tensor([1.5, 2.5 + 2**-22])}, rank=1, step=1)
    first = first_mismatch("materialised.values", story)
    assert first is not None
    assert (first.cause, first.where["fqn"], first.where["rank"]) == (Cause.UNTIED, "head", 1)


@pytest.mark.parametrize(
    ("step", "what", "value", "expected"),
    [
        (0, "gradients", torch.tensor([0.1, 0.1]), Cause.UNEXPECTED_GRADIENT),
        (1, "gradients", None, Cause.MISSING_GRADIENT),
        (1, "gradients", torch.tensor([0.3, 0.7]).bfloat16().float(), Cause.DTYPE_ROUND_TRIP),
        (0, "parameters", torch.tensor([0.9, 2.0]), Cause.UNEXPLAINED),
    ],
)
def test_what_a_frozen_parameter_does_is_named(
    step: int, what: str, value: Any, expected: Cause
) -> None:
    story = unfrozen()
    story.instead(what, {"body": value}, rank=0, step=step)
    assert cause("unfrozen.training", story) is expected


@pytest.mark.parametrize("rank", [0, 1])
def test_one_bit_more_the_second_time_is_named(rank: int) -> None:
    story = repeated()
    body = torch.tensor([1.0, 2.0 + 2**-22])
    story.instead("repeated_parameters", {"body": body}, rank=rank, life=1, step=0)
    first = first_mismatch("repeated.bits", story)
    assert first is not None
    assert (first.cause, first.where["rank"]) == (Cause.NOT_REPEATED, rank)
    loss = repeated()
    loss.instead("repeated_loss", torch.tensor(0.5 + 2**-24), rank=rank, life=1, step=0, micro=0)
    assert cause("repeated.bits", loss) is Cause.NOT_REPEATED


def test_both_lives_may_be_off_by_the_same_bits() -> None:
    story = repeated()
    for life in (0, 1):
        body = torch.tensor([1.0, 2.0 + 2**-22])
        story.instead("repeated_parameters", {"body": body}, life=life, step=0)
    assert cause("repeated.bits", story) is None


def test_the_first_of_two_lives_is_not_compared_with_itself() -> None:
    story = Story(case=Case.of("literal", "repeated"))
    story.phase("life 0")
    story.see("repeated_loss", torch.tensor(0.5), life=0, step=0, micro=0)
    story.see("repeated_parameters", {"body": torch.tensor([1.0, 2.0])}, life=0, step=0)
    ledger = Ledger()
    judge = CHECKS["repeated.bits"].judge
    assert judge is not None
    judge(story.evidence(), ledger)
    assert ledger.comparisons == 0
