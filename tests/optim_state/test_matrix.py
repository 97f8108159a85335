"""Every setting of an optimizer state: it is whole, loads elsewhere, and training goes on from it.

The state of each cell is loaded into a model of the other face, wrapped otherwise, on all ranks or
on some; a step of that model is compared with one of the plain model from the same state.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.ranks import RankContext
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import ShardingStrategy
from tests.fsdp.plain import batch, build, loss_of
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.optim_state.running import (
    FULL,
    OPTIMIZERS,
    SHARDED,
    assert_equal,
    by_name,
    form,
    in_pairs,
    load_by_name,
    one_group,
    optimizer_for,
    params_of,
    plain_step,
    step,
    two_groups,
    wrapped,
)

GROUPS = {"one": one_group, "two": two_groups}
AXES: dict[str, tuple[Any, ...]] = {
    "name": tuple(OPTIMIZERS),
    "kind": ("full", "rank0", "sharded", "full_part", "rank0_part"),
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"),
    "groups": tuple(GROUPS),
    "original": (False, True),
    "unmanaged": (False, True),
}
IN_PAIRS = ("sgd", "adam", "adamw_fused")


def _cells() -> list[Any]:
    """All of them; quick are as many as have all pairs of values, with some optimizers."""
    quick, found = in_pairs({**AXES, "name": IN_PAIRS}), []
    for values in itertools.product(*AXES.values()):
        cell = dict(zip(AXES, values, strict=True))
        words = [k if v is True else str(v) for k, v in cell.items() if v is not False]
        marks = () if cell in quick else (pytest.mark.long,)
        found.append(pytest.param(cell, id="-".join(words).lower(), marks=marks))
    return found


def _made(cell: dict[str, Any], *, flip: bool, group: Any = None) -> tuple[FSDP, list[Any]]:
    """The model of a cell, or one as different as its groups allow; and what is ignored in it."""
    plain = build()
    outside = list(plain.out.parameters()) if cell["unmanaged"] else []
    model = wrapped(
        module=plain,
        use_orig_params=cell["original"] != flip,
        wrap=not flip or cell["groups"] == "two",
        process_group=group,
        sharding_strategy=ShardingStrategy[cell["strategy"]],
        ignored_states=outside or None,
    )
    return model, outside


def _step(
    model: FSDP, optimizer: torch.optim.Optimizer, number: int, rank: int, outside: Any, group: Any
) -> None:
    loss_of(model, batch(number, rank)).backward()
    for param in outside:  # nobody else reduces them
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)
    optimizer.step()
    optimizer.zero_grad()


def _goes_on(context: RankContext, cell: dict[str, Any]) -> None:
    model, outside = _made(cell, flip=False)
    first = optimizer_for(model, cell["name"], GROUPS[cell["groups"]])
    for number in range(2):
        _step(model, first, number, context.rank, outside, None)
    full = FSDP.optim_state_dict(model, first)
    kind = SHARDED if cell["kind"] == "sharded" else FULL
    options = {"rank0_only": True} if cell["kind"].startswith("rank0") else {}
    with form(model, kind, **options):
        saved = FSDP.optim_state_dict(model, first)
    weights = copy.deepcopy(model.state_dict())
    group, ranks = None, context.world_size
    if cell["kind"].endswith("part"):
        group, ranks = dist.new_group([0, 1]), 2
        if context.rank >= ranks:
            return
    other, others = _made(cell, flip=True, group=group)
    other.load_state_dict(weights)
    second = optimizer_for(other, cell["name"], GROUPS[cell["groups"]])
    with form(other, kind, **options):
        FSDP.optim_state_dict_to_load(other, second, saved, load_directly=True, group=group)
    assert_equal(FSDP.optim_state_dict(other, second)["state"], full["state"])
    _step(other, second, 5, context.rank, others, group)
    plain = build()
    plain.load_state_dict(weights)
    third = optimizer_for(plain, cell["name"], GROUPS[cell["groups"]])
    load_by_name(plain, third, full)
    plain_step(plain, third, 5, ranks)
    assert_equal(
        FSDP.optim_state_dict(other, second)["state"],
        by_name(plain, third)["state"],
        tolerance=2e-5,
    )
    for key, value in params_of(other).items():
        want = plain.get_parameter(key)
        torch.testing.assert_close(value, want.detach(), rtol=2e-5, atol=2e-5, msg=key)


@pytest.mark.parametrize("cell", _cells())
def test_training_goes_on_from_a_loaded_state(cell: dict[str, Any]) -> None:
    on_ranks(_goes_on, 3, cell=cell)


def _options(group: dict[str, Any]) -> list[str]:
    return sorted(f"{key}={value}" for key, value in group.items() if key != "params")


def _uninterrupted(context: RankContext, name: str, *, original: bool) -> None:
    model, other, plain = *(wrapped(use_orig_params=original) for _ in range(2)), build()
    first, second, third = (optimizer_for(m, name, two_groups) for m in (model, other, plain))
    for number in range(2):
        step(model, first, number, context.rank)
        plain_step(plain, third, number, context.world_size)
    found, want = FSDP.optim_state_dict(model, first), by_name(plain, third)
    # Steps that divide by a gradient's size magnify its last bits.
    assert_equal(found["state"], want["state"], tolerance=2e-5)
    for ours, theirs in zip(found["param_groups"], want["param_groups"], strict=True):
        assert sorted(ours["params"]) == sorted(theirs["params"])
        assert _options(ours) == _options(theirs)
    other.load_state_dict(model.state_dict())
    FSDP.optim_state_dict_to_load(other, second, found, load_directly=True)
    again = FSDP.optim_state_dict(other, second)
    assert_equal(again["state"], found["state"])
    assert str(again["param_groups"]) == str(found["param_groups"])
    for number in range(2, 4):
        step(model, first, number, context.rank)
        step(other, second, number, context.rank)
    mine, theirs = params_of(model), params_of(other)
    assert all(torch.equal(theirs[key], value) for key, value in mine.items())
    assert_equal(
        FSDP.optim_state_dict(other, second)["state"], FSDP.optim_state_dict(model, first)["state"]
    )


@ORIGINAL
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_is_the_plain_optimizers_and_goes_on_bit_for_bit(
    name: str, *, original: bool
) -> None:
    on_ranks(_uninterrupted, 2, name=name, original=original)


def _order(context: RankContext, *, original: bool) -> list[str]:
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    found = FSDP.optim_state_dict(model, optimizer)
    assert list(found["state"]["inp.weight"]) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]
    assert sorted(found["param_groups"][0]["params"]) == sorted(found["state"])
    return list(found["state"])


def test_flat_parameters_give_names_in_flattening_order_and_original_ones_sorted() -> None:
    own = ["inp.weight", "inp.bias", "out.weight", "out.bias"]
    parts = ("up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight")
    blocks = [f"blocks.{i}.{part}" for i in (0, 1) for part in parts]
    for names in on_ranks(_order, 2, original=False):
        assert names == [*own, *blocks]
    for names in on_ranks(_order, 2, original=True):
        assert names == sorted(names)
