"""What a load returns is the optimizer's own: plain tensors with room for nothing else."""

from __future__ import annotations

import copy
from typing import Any

import torch

from conformance.ranks import RankContext
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.optim_state.running import FULL, assert_equal, form, optimizer_for, step, wrapped


class _Marked(torch.Tensor):
    """A tensor of a user's own type."""


def _loaded(
    context: RankContext, *, original: bool, marked: bool = False
) -> tuple[dict[str, Any], dict[str, Any], torch.optim.Optimizer]:
    """Return what was given, what came of it, and the optimizer that had it."""
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    with form(model, FULL, offload_to_cpu=False):
        given = FSDP.optim_state_dict(model, optimizer)
        for entry in given["state"].values() if marked else ():
            entry["exp_avg"] = entry["exp_avg"].as_subclass(_Marked)
        found = FSDP.optim_state_dict_to_load(model, optimizer, given)
    return given, found, optimizer


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    entries = state["state"].values()
    return [value for entry in entries for value in entry.values() if torch.is_tensor(value)]


def _shares_nothing(context: RankContext, *, original: bool) -> None:
    given, found, _ = _loaded(context, original=original)
    theirs = {value.untyped_storage().data_ptr() for value in _tensors(given)}
    mine = [value.untyped_storage() for value in _tensors(found) if value.numel()]
    assert mine
    assert len({each.data_ptr() for each in mine}) == len(mine), "each has its own"
    assert not theirs & {each.data_ptr() for each in mine}, "a step would change what was given"
    before = copy.deepcopy(given)
    for value in _tensors(found):
        value.add_(1)
    assert_equal(given["state"], before["state"])


@ORIGINAL
def test_what_is_loaded_shares_no_memory_with_what_was_given(*, original: bool) -> None:
    on_ranks(_shares_nothing, 2, original=original)


def _has_its_size(context: RankContext, *, original: bool) -> None:
    _, found, optimizer = _loaded(context, original=original)
    assert_equal(found["state"], optimizer.state_dict()["state"])
    for value in _tensors(found):
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


@ORIGINAL
def test_what_is_loaded_takes_the_memory_of_its_run_alone(*, original: bool) -> None:
    on_ranks(_has_its_size, 2, original=original)


def _is_plain(context: RankContext, *, original: bool) -> None:
    _, found, optimizer = _loaded(context, original=original, marked=True)
    assert {type(value) for value in _tensors(found)} == {torch.Tensor}
    assert_equal(found["state"], optimizer.state_dict()["state"])


@ORIGINAL
def test_tensors_of_other_types_are_loaded_as_plain_ones(*, original: bool) -> None:
    on_ranks(_is_plain, 2, original=original)
