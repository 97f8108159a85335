"""Tied, frozen and unused parameters, and buffers."""

from __future__ import annotations

import pytest
import torch

from conformance.adapter import Conventions
from conformance.causes import Cause
from conformance.checks.anatomy import anatomy
from conformance.checks.updates import stepped
from conformance.models import case, cases
from conformance.optimizers import OPTIMIZERS
from conformance.scenarios.states import first_names
from tests.checks.literal import MODEL, Story, cause, first_mismatch, training


def test_anatomy_reads_the_bare_model() -> None:
    parts = anatomy(MODEL)
    assert parts.tied == (("body", "head"),)
    assert parts.frozen == {"kept"}
    assert parts.distinct == ["body", "bias", "kept", "spare"]
    assert (parts.numel("body"), parts.padded("body", 3), parts.padded("bias", 4)) == (12, 18, 4)


@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_names_that_differ_are_untied(what: str) -> None:
    story = training()
    value = story.value(what, 1, step=0)["head"]
    story.instead(what, {"head": torch.nextafter(value, value + 1)}, rank=1, step=0)
    first = first_mismatch("tied.one", story)
    assert first is not None
    assert first.cause is Cause.UNTIED
    assert (first.where["rank"], first.where["fqn"]) == (1, "head")


def test_both_names_may_be_wrong_together() -> None:
    story = training()
    value = story.value("parameters", step=0)["body"] + 1
    story.instead("parameters", {"body": value, "head": value}, step=0)
    assert cause("tied.one", story) is None


def test_frozen_parameters_may_not_move_at_all() -> None:
    story = training()
    story.instead("parameters", {"kept": torch.tensor([1.5, 2.5000002])}, rank=1, step=1)
    first = first_mismatch("frozen.kept", story)
    assert first is not None
    assert (first.cause, first.where["step"]) == (Cause.FROZEN_CHANGED, 1)


def test_frozen_parameters_hold_no_gradient() -> None:
    story = training()
    story.instead("gradients", {"kept": torch.zeros(2)}, step=0)
    assert cause("frozen.kept", story) is Cause.UNEXPECTED_GRADIENT


def test_gradients_are_not_asked_of_who_cannot_show_them() -> None:
    story = training()
    story.instead("gradients", {"kept": torch.zeros(2)}, step=0)
    story.capabilities -= {"gradients"}
    assert cause("frozen.kept", story) is None


def unused(optimizer: str = "sgd") -> Story:
    return training(scenario="unused", optimizer=optimizer)


def test_no_gradient_is_kept_as_declared() -> None:
    assert cause("unused.convention", unused()) is None


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (torch.zeros(2), Cause.CONVENTION_BROKEN),
        (torch.tensor([0.0, 0.1]), Cause.UNEXPECTED_GRADIENT),
    ],
)
def test_a_gradient_where_none_is_declared(gradient: torch.Tensor, expected: Cause) -> None:
    story = unused()
    story.instead("gradients", {"spare": gradient}, step=0)
    assert cause("unused.convention", story) is expected


def zero_declared() -> Story:
    story = training(scenario="unused", spare=torch.zeros(2))
    story.conventions = Conventions(unused_grad="zero")
    return story


def test_a_zero_gradient_is_kept_as_declared() -> None:
    assert cause("unused.convention", zero_declared()) is None


def test_no_gradient_where_zero_is_declared() -> None:
    story = zero_declared()
    story.instead("gradients", {"spare": None}, step=0)
    assert cause("unused.convention", story) is Cause.CONVENTION_BROKEN


def test_a_gradient_where_zero_is_declared() -> None:
    story = zero_declared()
    story.instead("gradients", {"spare": torch.tensor([0.0, 0.1])}, step=0)
    assert cause("unused.convention", story) is Cause.UNEXPECTED_GRADIENT


def test_an_unused_parameter_that_does_not_decay_breaks_the_convention() -> None:
    story = zero_declared()
    story.instead("parameters", {"spare": story.value("parameters", step=-1)["spare"]}, step=1)
    assert cause("unused.convention", story) is Cause.CONVENTION_BROKEN


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_unused_parameter_that_decays_breaks_the_convention(optimizer: str) -> None:
    story = unused(optimizer)
    for step in range(2):
        start = story.value("parameters", step=-1)["spare"]
        moved = stepped(OPTIMIZERS[optimizer], start, [torch.zeros(2)] * (step + 1))
        story.instead("parameters", {"spare": moved}, step=step)
    first = first_mismatch("unused.convention", story)
    assert first is not None
    assert (first.cause, first.where["step"]) == (Cause.CONVENTION_BROKEN, 0)


def test_averaged_buffers_break_the_convention() -> None:
    story = training()
    both = [story.value("buffers", rank, step=0)["mean"] for rank in range(2)]
    story.instead("buffers", {"mean": (both[0] + both[1]) / 2}, step=0)
    assert cause("buffers.convention", story) is Cause.CONVENTION_BROKEN


def test_the_buffers_of_another_rank_are_named() -> None:
    story = training()
    story.instead("buffers", story.value("buffers", 0, step=0), rank=1, step=0)
    assert cause("buffers.convention", story) is Cause.OTHER_RANK


def test_a_step_that_starts_from_rank_zero_breaks_the_local_convention() -> None:
    story = training()
    start = story.value("buffers", 0, step=0)["mean"]
    story.instead("buffers", {"mean": 0.9 * start + 0.1 * 3}, rank=1, step=1)
    assert cause("buffers.convention", story) is Cause.CONVENTION_BROKEN


def test_a_step_that_starts_from_its_own_breaks_the_rank_zero_convention() -> None:
    story, start = training(), torch.full((3,), 0.1)
    story.conventions = Conventions(buffers="rank0")
    story.seen = [  # in the oracle rank 1 starts step 1 from rank 0's buffers
        (what, where, [values[0], {"mean": 0.9 * start + 0.3}], moment)
        if (what, dict(where)) == ("buffers", {"step": 1})
        else (what, where, values, moment)
        for what, where, values, moment in story.seen
    ]
    assert cause("buffers.convention", story) is None
    story.instead("buffers", {"mean": 0.9 * (start + 0.1) + 0.3}, rank=1, step=1)
    assert cause("buffers.convention", story) is Cause.CONVENTION_BROKEN


def test_other_wrong_buffers_are_not_called_a_convention() -> None:
    story = training()
    story.instead("buffers", {"mean": torch.tensor([0.1, -0.5, 0.9])}, rank=1, step=1)
    assert cause("buffers.convention", story) is Cause.UNEXPLAINED


def test_a_broken_convention_says_whether_anything_was_declared() -> None:
    story = training()
    story.instead("buffers", {"mean": torch.tensor([0.1, -0.5, 0.9])}, rank=1, step=1)
    by_default = first_mismatch("buffers.convention", story)
    story.conventions = Conventions(buffers="rank0")
    declared = first_mismatch("buffers.convention", story)
    assert by_default is not None
    assert by_default.sentence.endswith(
        "; judged by the default, buffers='local', as the adapter's conventions declare nothing"
        " else"
    )
    assert declared is not None
    assert declared.sentence.endswith("; declared is buffers='rank0'")


def test_a_missing_buffer_is_not_told_as_a_convention() -> None:
    story = training()
    story.wrong[0, "buffers", str({"step": 0})] = {"module.mean": torch.zeros(3)}
    first = first_mismatch("buffers.convention", story)
    assert first is not None
    assert first.sentence == (
        "buffer mean at step 0, rank 0: a key is missing; module.mean is there: let the adapter's"
        " bare() return a module whose names are without 'module.'"
    )


def test_an_unused_gradient_says_by_which_convention() -> None:
    story = unused()
    story.instead("gradients", {"spare": torch.zeros(2)}, step=0)
    first = first_mismatch("unused.convention", story)
    assert first is not None
    assert first.sentence == (
        "gradient of unused spare at step 0, rank 0 is zero: the convention is not kept; judged by"
        " the default, unused_grad='none', as the adapter's conventions declare nothing else"
    )


def test_a_frozen_parameter_under_another_name_is_missing_and_told() -> None:
    story = training()
    other = {
        "wrapped.kept" if k == "kept" else k: v
        for k, v in story.value("parameters", step=0).items()
    }
    story.wrong[1, "parameters", str({"step": 0})] = other
    first = first_mismatch("frozen.kept", story)
    assert first is not None
    assert first.cause is Cause.MISSING_KEY
    assert "a key is missing; wrapped.kept is there: let the adapter's bare()" in first.sentence


@pytest.mark.parametrize("name", sorted(cases()))
def test_an_anatomy_is_that_of_the_model(name: str) -> None:
    model = case(name)
    built, parts = model.build(), anatomy(model)
    firsts = first_names(built)
    assert {each: parts.firsts.get(each, each) for each in firsts} == firsts
    assert sorted(set(firsts.values())) == sorted(parts.distinct)
    assert parts.saved == set(built.state_dict())
    assert sum(map(parts.numel, parts.distinct)) == sum(p.numel() for p in built.parameters())
