"""In which form units save and load: one setting each, checked, and restored."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import fsdp as options
from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy, StateDictType
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.state_dict import cells

NO_SHARD = ShardingStrategy.NO_SHARD
CONFIGS = {
    cells.FULL: (options.FullStateDictConfig, options.FullOptimStateDictConfig),
    cells.LOCAL: (options.LocalStateDictConfig, options.LocalOptimStateDictConfig),
    cells.SHARDED: (options.ShardedStateDictConfig, options.ShardedOptimStateDictConfig),
}
KIND = pytest.mark.parametrize("kind", cells.KINDS.values(), ids=cells.KINDS)


def _switches(context: RankContext) -> None:
    model = nn.Sequential(cells.wrap(cells.plain()))
    default = FSDP.get_state_dict_type(model)
    assert default == options.StateDictSettings()
    assert default is not None
    assert default.state_dict_type is cells.FULL
    for kind, (model_kind, optim_kind) in CONFIGS.items():
        config = model_kind(offload_to_cpu=True)
        before = FSDP.get_state_dict_type(model)
        assert FSDP.set_state_dict_type(model, kind, config) == before
        found = FSDP.get_state_dict_type(model)
        assert found is not None
        assert (found.state_dict_type, found.state_dict_config) == (kind, config)
        assert found.optim_state_dict_config == optim_kind()
    FSDP.set_state_dict_type(model, cells.FULL)
    with FSDP.state_dict_type(model, cells.SHARDED):
        sharded = FSDP.get_state_dict_type(model)
        with pytest.raises(ZeroDivisionError), FSDP.state_dict_type(model, cells.LOCAL):
            _ = 1 / 0
        assert FSDP.get_state_dict_type(model) == sharded
    assert FSDP.get_state_dict_type(model) == default
    assert FSDP.get_state_dict_type(nn.Linear(2, 2)) is None


def test_the_form_is_switched_and_comes_back() -> None:
    on_ranks(_switches, 2)


def _mesh_settings(context: RankContext) -> None:
    model = cells.wrap(cells.plain(), device_mesh=cells.mesh_of(2))
    given = options.ShardedStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, cells.SHARDED, given):
        found = FSDP.get_state_dict_type(model)
    assert found is not None
    assert found.state_dict_config == dataclasses.replace(given, _use_dtensor=True)
    assert found.optim_state_dict_config == options.ShardedOptimStateDictConfig(_use_dtensor=True)
    assert not given._use_dtensor  # the user's own
    assert {unit._device_mesh for unit in FSDP.fsdp_modules(model)} == {cells.mesh_of(2)}
    other = cells.wrap(cells.plain())
    assert {unit._device_mesh for unit in FSDP.fsdp_modules(other)} == {None}
    for name, value in cells.saved(model, cells.FULL).items():
        assert torch.equal(value, cells.saved(other, cells.FULL)[name])


def test_the_presence_of_a_mesh_chooses_dtensors() -> None:
    on_ranks(_mesh_settings, 2)


def _mixed(context: RankContext) -> None:
    """Each unit has its own form; a unit with its own mesh, its own kind of sharded value."""
    model = cells.plain()
    model.blocks[0] = cells.wrap(model.blocks[0], nested=False, device_mesh=cells.mesh_of(2))
    model.blocks[1] = cells.wrap(model.blocks[1], nested=False)
    model = cells.wrap(model, nested=False)
    FSDP.set_state_dict_type(model.blocks, cells.SHARDED)
    state = model.state_dict()
    wanted = {"blocks.0": DTensor, "blocks.1": ShardedTensor}
    for name, value in state.items():
        assert type(value) is wanted.get(name[:8], torch.Tensor), name
    cells.same(cells.put_together(state), cells.plain().state_dict())
    cells.spoil(model)
    model.load_state_dict(state)
    cells.same(cells.whole(model), dict(cells.plain().named_parameters()))
    with pytest.raises(AssertionError, match="must have the same settings"):
        FSDP.get_state_dict_type(model)


def test_every_unit_uses_its_own_form() -> None:
    on_ranks(_mixed, 2)


def _full_instead(context: RankContext, kind: StateDictType) -> list[str]:
    model = cells.wrap(cells.plain(), sharding_strategy=NO_SHARD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = cells.saved(model, kind)
        cells.spoil(model)
        cells.load(model, kind, state)
    cells.same(state, cells.plain().state_dict())
    cells.same(cells.whole(model), dict(cells.plain().named_parameters()))
    return [str(each.message) for each in caught if "NO_SHARD" in str(each.message)]


@KIND
@pytest.mark.parametrize("world", [1, 2])
def test_without_shards_the_state_is_full(kind: StateDictType, world: int) -> None:
    text = "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned."
    wanted = [] if kind is cells.FULL else [text, text]  # one for each call
    assert on_ranks(_full_instead, world, kind=kind) == (wanted,) * world


def _one_replica(context: RankContext) -> None:
    """A unit without shards inside a sharded tree is whole, the others are not."""
    model = cells.plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.blocks[0] = FSDP(model.blocks[0], sharding_strategy=NO_SHARD)
    model = cells.wrap(model, nested=False)
    with pytest.warns(UserWarning, match="NO_SHARD"):
        state = cells.saved(model, cells.SHARDED)
    whole = {name for name, value in state.items() if type(value) is torch.Tensor}
    assert whole == {name for name in state if name.startswith("blocks.0")}
    cells.same(cells.put_together(state), cells.plain().state_dict())
    cells.spoil(model)
    with pytest.warns(UserWarning, match="NO_SHARD"):
        cells.load(model, cells.SHARDED, state)
    cells.same(cells.whole(model), dict(cells.plain().named_parameters()))


def test_a_unit_without_shards_is_whole_among_others() -> None:
    on_ranks(_one_replica, 2)


def _local_on_a_mesh(context: RankContext, *, loads: bool) -> list[str]:
    model = cells.wrap(cells.plain(), device_mesh=cells.mesh_of(2))
    before = cells.whole(model)
    with FSDP.state_dict_type(model, cells.LOCAL):
        call = (lambda: model.load_state_dict({})) if loads else model.state_dict
        found = error_of(call)
    cells.same(cells.whole(model), before)  # and is usable
    return found


@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_the_local_form_is_refused_on_a_mesh(*, loads: bool) -> None:
    found = on_ranks(_local_on_a_mesh, 2, loads=loads)
    named_on_every_rank(found, RuntimeError, "DeviceMesh is not compatible with LOCAL_STATE_DICT.")


def _wrong_config(context: RankContext, kind: StateDictType, number: int) -> list[Any]:
    model = cells.wrap(cells.plain())
    wrong = [configs[number]() for other, configs in CONFIGS.items() if other is not kind]
    base = (options.StateDictConfig(), options.OptimStateDictConfig())[number]
    name = ("state_dict_config", "optim_state_dict_config")[number]
    found = [
        error_of(lambda c=config: FSDP.set_state_dict_type(model, kind, **{name: c}))
        for config in (*wrong, base, 3)
    ]
    assert FSDP.get_state_dict_type(model) == options.StateDictSettings()
    wanted = f"Expected {name} of type {CONFIGS[kind][number].__name__}"
    assert [error for error, text in found if wanted in text] == ["RuntimeError"] * 4
    return found


@KIND
@pytest.mark.parametrize("number", [0, 1], ids=["model", "optimizer"])
def test_a_config_of_another_form_is_refused(kind: StateDictType, number: int) -> None:
    on_ranks(_wrong_config, 1, kind=kind, number=number)


def test_something_that_is_no_form_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict_type got 'full', wanted a StateDictType"):
        FSDP.set_state_dict_type(nn.Linear(2, 2), "full")  # type: ignore[arg-type]


def _open(context: RankContext, kind: StateDictType) -> list[str]:
    model = cells.wrap(cells.plain())
    with FSDP.summon_full_params(model), FSDP.state_dict_type(model, kind):
        return error_of(model.state_dict)


def test_inside_a_summon_the_full_form_alone_is_there() -> None:
    text = "Cannot manually unshard parameters when already unsharding"
    named_on_every_rank(on_ranks(_open, 2, kind=cells.SHARDED), AssertionError, text)
    named_on_every_rank(on_ranks(_open, 2, kind=cells.LOCAL), AssertionError, text)
    assert on_ranks(_open, 2, kind=cells.FULL) == (["", ""],) * 2


class Saves(nn.Module):
    """Saves the model around it from inside of its forward, or loads it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10)
        self.error: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top, loads = self.around
        self.error = error_of((lambda: top.load_state_dict({})) if loads else top.state_dict)
        return self.lin(x)


def _in_forward(context: RankContext, kind: StateDictType, *, loads: bool) -> list[str]:
    model = FSDP(Saves())
    model.module.__dict__["around"] = (model, loads)
    with FSDP.state_dict_type(model, kind):
        model(torch.ones(2, 10)).sum().backward()
    return model.module.error


@KIND
@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_in_forward_nothing_is_saved_or_loaded(kind: StateDictType, *, loads: bool) -> None:
    text = "Cannot manually unshard parameters during forward/backward"
    named_on_every_rank(on_ranks(_in_forward, 2, kind=kind, loads=loads), AssertionError, text)
