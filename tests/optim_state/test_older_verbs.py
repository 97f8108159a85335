"""The older verbs: full, sharded, scattered and rekeyed states, and what they were made with."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.ranks import RankContext
from fsdp import OptimStateKeyType
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import build
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.optim_state.running import (
    assert_equal,
    by_name,
    in_pairs,
    optimizer_for,
    params_of,
    plain_step,
    quiet,
    step,
    two_groups,
    wrapped,
)


def _reversed(model: nn.Module) -> Any:
    return list(model.parameters())[::-1]


def _generator(model: nn.Module) -> Any:
    return (param for param in model.parameters())


def _groups_of_a_generator(model: nn.Module) -> Any:
    return (group for group in two_groups(model))


INPUTS: dict[str, Callable[[nn.Module], Any]] = {
    "reversed": _reversed,
    "groups": two_groups,
    "generator": _generator,
    "groups_of_a_generator": _groups_of_a_generator,
}


def _older(context: RankContext, verb: str, given: str, *, original: bool, half: bool) -> None:
    """A state saved by the whole world is loaded by it, or by half of it."""
    model = wrapped(use_orig_params=original)
    first = optimizer_for(model, "adam")
    step(model, first, 0, context.rank)
    with pytest.warns(FutureWarning, match="full_optim_state_dict`` is being deprecated"):
        full = FSDP.full_optim_state_dict(model, first, rank0_only=False)
    weights = model.state_dict()
    group = dist.new_group([0]) if half else None
    if half and context.rank:
        return
    other = wrapped(use_orig_params=original, process_group=group)
    other.load_state_dict(weights)
    made_with = INPUTS[given](other)
    made_with = list(made_with)
    second = torch.optim.Adam(copy.copy(made_with), lr=0.3, amsgrad=True)
    kept = copy.deepcopy(full)
    before = {"state": full["state"]}  # its groups are those of another order
    if verb == "shard":
        with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
            loaded = FSDP.shard_full_optim_state_dict(before, other, optim_input=made_with)
    else:
        mine = before if context.rank == 0 else None
        with pytest.warns(FutureWarning, match="scatter_full_optim_state_dict`` is being"):
            loaded = FSDP.scatter_full_optim_state_dict(mine, other, optim=second, group=group)
    assert_equal(full["state"], kept["state"])
    assert "param_groups" not in loaded
    second.load_state_dict({**loaded, "param_groups": second.state_dict()["param_groups"]})
    with quiet():
        again = FSDP.full_optim_state_dict(other, second, rank0_only=False, group=group)
    assert_equal(again["state"], kept["state"])


AXES: dict[str, tuple[Any, ...]] = {
    "given": tuple(INPUTS),
    "verb": ("shard", "scatter"),
    "original": (False, True),
    "half": (False, True),
}


def _cells() -> list[Any]:
    """All of them; quick are as many as have all pairs of values."""
    quick, found = in_pairs(AXES), []
    for values in itertools.product(*AXES.values()):
        cell = dict(zip(AXES, values, strict=True))
        words = [k if v is True else str(v) for k, v in cell.items() if v is not False]
        marks = () if cell in quick else (pytest.mark.long,)
        found.append(pytest.param(cell, id="-".join(words), marks=marks))
    return found


@pytest.mark.parametrize("cell", _cells())
def test_a_full_state_is_cut_for_any_optimizer(cell: dict[str, Any]) -> None:
    on_ranks(_older, 2, **cell)


def _first_only(context: RankContext, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    with quiet():
        everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        found = FSDP.full_optim_state_dict(model, optimizer)
    if context.rank:
        assert found == {}
        return
    assert_equal(found["state"], everywhere["state"])
    assert found["param_groups"] == everywhere["param_groups"]


@ORIGINAL
def test_by_default_the_first_rank_alone_gets_a_full_state(*, original: bool) -> None:
    on_ranks(_first_only, 3, original=original)


def _sharded(context: RankContext, name: str, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    first = optimizer_for(model, name, two_groups)
    for number in range(2):
        step(model, first, number, context.rank)
    with pytest.warns(FutureWarning, match="sharded_optim_state_dict`` is being deprecated"):
        found = FSDP.sharded_optim_state_dict(model, first)
    with quiet():
        full = FSDP.full_optim_state_dict(model, first, rank0_only=False)
    assert list(found["state"]) == list(full["state"])
    for key, entry in found["state"].items():
        for state, value in entry.items():
            whole = full["state"][key][state]
            if not isinstance(value, torch.Tensor) or not value.dim():
                assert torch.equal(value, whole)
                continue
            assert value.size() == whole.size()
            (shard,) = value.local_shards()
            start, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            assert torch.equal(shard.tensor, whole[start : start + rows])
    other = wrapped(use_orig_params=original)
    other.load_state_dict(model.state_dict())
    second = optimizer_for(other, name, two_groups)
    with pytest.warns(FutureWarning, match="flatten_sharded_optim_state_dict`` is being"):
        loaded = FSDP.flatten_sharded_optim_state_dict(found, other, second)
    second.load_state_dict(loaded)
    assert_equal(FSDP.optim_state_dict(other, second)["state"], full["state"])
    for each, optimizer in ((model, first), (other, second)):
        step(each, optimizer, 5, context.rank)
    mine, theirs = params_of(model), params_of(other)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@ORIGINAL
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_sharded_state_has_the_rows_of_the_full_one_and_loads(
    name: str, *, original: bool
) -> None:
    on_ranks(_sharded, 2, name=name, original=original)


def _plain_numbers(context: RankContext, *, original: bool) -> None:
    """Wrapped to plain by numbers, plain to wrapped by names; a step of each is the same."""
    model, plain = wrapped(use_orig_params=original), build()
    mine = optimizer_for(model, "adam")
    theirs = optimizer_for(plain, "adam", _reversed)
    step(model, mine, 0, context.rank)
    full = FSDP.optim_state_dict(model, mine)
    numbered = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=theirs)
    assert numbered["param_groups"][0]["params"] == list(range(len(list(plain.parameters()))))
    assert set(numbered["state"]) == set(numbered["param_groups"][0]["params"])
    theirs.load_state_dict(numbered)
    assert_equal(by_name(plain, theirs)["state"], full["state"])
    plain.load_state_dict(model.state_dict())
    step(model, mine, 1, context.rank)
    plain_step(plain, theirs, 1, context.world_size)
    for key, value in params_of(model).items():
        torch.testing.assert_close(plain.get_parameter(key), value, rtol=1e-6, atol=1e-6)
    names = FSDP.rekey_optim_state_dict(
        theirs.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=theirs
    )
    assert names["param_groups"][0]["params"] == sorted(names["state"])
    with quiet():
        loaded = FSDP.shard_full_optim_state_dict(names, model, optim=mine)
    mine.load_state_dict(loaded)
    assert_equal(FSDP.optim_state_dict(model, mine)["state"], by_name(plain, theirs)["state"])


@ORIGINAL
def test_states_go_to_plain_models_and_back(*, original: bool) -> None:
    on_ranks(_plain_numbers, 2, original=original)
