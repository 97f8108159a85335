"""Optimizer states of this wrapper and of torch's are exchangeable, in every form.

On the CPU torch's states are not offloaded with original parameters: its result is then a view of
one buffer for all states of a unit, so that each shows the values of the last.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _NamedOptimizer

import fsdp as our_fsdp
from conformance.ranks import RankContext
from fsdp import wrap as our_wrap
from fsdp.wrapper import FullyShardedDataParallel
from tests.fsdp.plain import Residual, build
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.optim_state.running import (
    OPTIMIZERS,
    assert_equal,
    by_name,
    load_by_name,
    optimizer_for,
    plain_step,
    step,
    two_groups,
)


def _make(package: Any, *, original: bool, mesh: Any = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return package.FullyShardedDataParallel(
            build(),
            auto_wrap_policy=our_wrap.ModuleWrapPolicy({Residual})
            if package is our_fsdp
            else torch_fsdp.wrap.ModuleWrapPolicy({Residual}),
            use_orig_params=original,
            device_id=torch.device("cpu"),
            **({} if mesh is None else {"device_mesh": mesh}),
        )


def _set(package: Any, model: Any, *, sharded: bool, offload: bool = True) -> None:
    of_model, of_optim = (
        (package.ShardedStateDictConfig(), package.ShardedOptimStateDictConfig(offload))
        if sharded
        else (package.FullStateDictConfig(), package.FullOptimStateDictConfig(offload))
    )
    kinds = package.StateDictType
    kind = kinds.SHARDED_STATE_DICT if sharded else kinds.FULL_STATE_DICT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        package.FullyShardedDataParallel.set_state_dict_type(model, kind, of_model, of_optim)


def _full(value: Any) -> Any:
    """Both packages' chunks, told by what they show of themselves."""
    if hasattr(value, "local_shards"):
        return [
            str(value.metadata().shards_metadata),
            [shard.tensor.tolist() for shard in value.local_shards()],
        ]
    if hasattr(value, "to_local"):
        return [str(value.placements), str(value.device_mesh), value.to_local().tolist()]
    return value


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert sorted(ours["state"]) == sorted(theirs["state"])
    for name, entry in theirs["state"].items():
        assert sorted(ours["state"][name]) == sorted(entry)
        for state, value in entry.items():
            mine = ours["state"][name][state]
            assert type(mine) is type(value)
            assert mine.dtype == value.dtype
            assert mine.shape == value.shape
            want, got = _full(value), _full(mine)
            same = torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
            assert same, f"{state} of {name}: {got} {want}"


def _exchange(
    context: RankContext, name: str, *, original: bool, sharded: bool, mesh: bool
) -> None:
    """Same bits, names, dtypes and groups; each loads the other's, and steps to the same bits."""
    given = init_device_mesh("cpu", (context.world_size,)) if mesh else None
    sides = []
    for package in (our_fsdp, torch_fsdp):
        model = _make(package, original=original, mesh=given)
        optimizer = optimizer_for(model, name, two_groups)
        for number in range(2):
            step(model, optimizer, number, context.rank)
        _set(package, model, sharded=sharded, offload=not original)
        found = package.FullyShardedDataParallel.optim_state_dict(model, optimizer)
        sides.append((package, model, optimizer, found))
    (_, mine, first, ours), (_, theirs, second, others) = sides
    _same(ours, others)
    for package, model, optimizer, found in (
        (our_fsdp, mine, first, others),
        (*sides[1][:3], ours),
    ):
        loaded = package.FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, copy.copy(found)
        )
        optimizer.load_state_dict(loaded)
        again = package.FullyShardedDataParallel.optim_state_dict(model, optimizer)
        _same(again, found)
        step(model, optimizer, 3, context.rank)
    _same(
        our_fsdp.FullyShardedDataParallel.optim_state_dict(mine, first),
        torch_fsdp.FullyShardedDataParallel.optim_state_dict(theirs, second),
    )


CELLS = [
    *[
        pytest.param(
            name,
            False,
            False,
            id=f"{name}-full",
            marks=() if name in ("sgd", "adam", "nadam") else pytest.mark.long,
        )
        for name in OPTIMIZERS
    ],
    pytest.param("adam", True, False, id="adam-groups"),
    pytest.param("adam", True, True, id="adam-mesh"),
]


@ORIGINAL
@pytest.mark.parametrize(("name", "sharded", "mesh"), CELLS)
def test_a_state_of_either_is_that_of_the_other_and_loads(
    name: str, *, original: bool, sharded: bool, mesh: bool
) -> None:
    on_ranks(_exchange, 2, name=name, original=original, sharded=sharded, mesh=mesh)


def _to_plain(context: RankContext, *, original: bool) -> None:
    """What torch's wrapper saves goes through ours into a plain model, and back."""
    theirs = _make(torch_fsdp, original=original)
    optimizer = optimizer_for(theirs, "adamw")
    step(theirs, optimizer, 0, context.rank)
    _set(torch_fsdp, theirs, sharded=False, offload=not original)
    found = torch_fsdp.FullyShardedDataParallel.optim_state_dict(theirs, optimizer)
    ours = _make(our_fsdp, original=not original)
    mine = optimizer_for(ours, "adamw")
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(ours, mine, found)
    mine.load_state_dict(loaded)
    saved = FullyShardedDataParallel.optim_state_dict(ours, mine)
    plain = build()
    last = optimizer_for(plain, "adamw")
    load_by_name(plain, last, saved)
    assert_equal(by_name(plain, last)["state"], found["state"])
    plain_step(plain, last, 1, context.world_size)
    again = torch_fsdp.FullyShardedDataParallel.optim_state_dict_to_load(
        theirs, optimizer, by_name(plain, last)
    )
    optimizer.load_state_dict(again)
    kept = torch_fsdp.FullyShardedDataParallel.optim_state_dict(theirs, optimizer)
    assert_equal(kept["state"], by_name(plain, last)["state"])


@ORIGINAL
def test_a_state_goes_from_torch_to_plain_and_back(*, original: bool) -> None:
    on_ranks(_to_plain, 2, original=original)


def _older(context: RankContext, *, original: bool) -> None:
    sides = []
    for package in (our_fsdp, torch_fsdp):
        model = _make(package, original=original)
        # One state: torch's gives all the values of the last one, with original parameters here.
        optimizer = optimizer_for(model, "sgd" if original else "adam")
        step(model, optimizer, 0, context.rank)
        wrapper = package.FullyShardedDataParallel
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            full = wrapper.full_optim_state_dict(model, optimizer)
            everywhere = wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)
            sharded = wrapper.sharded_optim_state_dict(model, optimizer)
            scattered = wrapper.scatter_full_optim_state_dict(full or None, model, optim=optimizer)
            cut = wrapper.shard_full_optim_state_dict(everywhere, model, optim=optimizer)
            flat = wrapper.flatten_sharded_optim_state_dict(sharded, model, optimizer)
            plain = build()
            numbers = wrapper.rekey_optim_state_dict(
                everywhere, package.OptimStateKeyType.PARAM_ID, plain
            )
        sides.append((full, everywhere, sharded, scattered, cut, flat, numbers))
    for ours, theirs in zip(*sides, strict=True):
        if theirs:
            _same(ours, theirs)
        else:
            assert ours == theirs


@ORIGINAL
def test_the_older_verbs_give_the_same(*, original: bool) -> None:
    on_ranks(_older, 2, original=original)


def _named(context: RankContext, *, original: bool) -> None:
    """Torch's optimizer with names for keys."""
    model = _make(our_fsdp, original=original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = (
            _NamedOptimizer(model.named_parameters(), torch.optim.Adam, None, model, lr=0.02)
            for _ in range(2)
        )
    first.init_state()
    second.init_state()
    found = FullyShardedDataParallel.optim_state_dict(model, first, first.state_dict())
    assert sorted(found["state"]) == sorted(name for name, _ in build().named_parameters())
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(
        model, second, found, is_named_optimizer=True
    )
    second.load_state_dict(loaded)
    again = FullyShardedDataParallel.optim_state_dict(model, second, second.state_dict())
    assert_equal(again["state"], found["state"])
    dist.barrier()


@ORIGINAL
def test_torchs_named_optimizer_saves_and_loads(*, original: bool) -> None:
    on_ranks(_named, 2, original=original)
