"""Shards without rows, modules that save for themselves, and whose memory a value is."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from conformance.ranks import RankContext
from fsdp import FullStateDictConfig
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.state_dict.form import gathered
from fsdp.state_dict.members import part_of
from fsdp.state_dict.tensors import copied, own_keys
from tests.fsdp.ranks import agreed, on_ranks
from tests.state_dict import cells


def test_a_copy_in_host_memory_of_what_is_there_is_one() -> None:
    value = torch.ones(3)
    for to_cpu in (False, True):
        copy = copied(value, to_cpu=to_cpu)
        assert torch.equal(copy, value)
        assert copy.data_ptr() != value.data_ptr()


class Empty(nn.Module):
    """One row, rows without elements, and no rows."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a_row": (1, 3), "no_columns": (2, 0), "no_rows": (0, 3)}.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))


def _shards(context: RankContext) -> list[list[int]]:
    model = cells.wrap(Empty(), nested=False)
    state = cells.saved(model, cells.SHARDED)
    cells.load(model, cells.SHARDED, state)
    return [[len(each.tensor) for each in state[name].local_shards()] for name in sorted(state)]


def test_a_rank_holds_a_shard_of_what_has_rows_for_it_and_the_first_one_in_any_case() -> None:
    assert on_ranks(_shards, 2) == ([[1], [1], [0]], [[], [1], []])


class Doubled(nn.Linear):
    """Saves twice its weight, and has a buffer."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("seen", torch.ones(2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 - torch's
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = 2 * destination[f"{prefix}weight"]


def _saves_for_itself(context: RankContext) -> None:
    torch.manual_seed(0)
    plain = Doubled()
    expected = 2 * plain.weight.detach().clone()
    state = cells.saved(cells.wrap(plain, nested=False), cells.SHARDED)
    weight = state["weight"]
    assert isinstance(weight, ShardedTensor)
    (held,) = weight.local_shards()
    assert torch.equal(held.tensor, expected.chunk(2)[context.rank])
    assert type(state["seen"]) is torch.Tensor


def test_a_module_that_saves_for_itself_is_cut_as_it_says_and_buffers_are_not() -> None:
    on_ranks(_saves_for_itself, 2)


class Twice(nn.Module):
    """A module with a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(3)


def _left_elsewhere(context: RankContext) -> list[str]:
    model = cells.wrap(Twice(), nested=False)
    return sorted(cells.saved(model, cells.FULL, FullStateDictConfig(rank0_only=True)))


def test_buffers_under_every_name_are_on_the_first_rank_alone() -> None:
    kept = ("bias", "num_batches_tracked", "running_mean", "running_var", "weight")
    names = [f"{module}.{name}" for module in ("first", "second") for name in kept]
    assert on_ranks(_left_elsewhere, 2) == (names, [])


class Columns(nn.Module):
    """A weight of which tensor parallelism has given each rank some columns."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        whole = torch.arange(8.0).view(2, 4)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))


def _columns(context: RankContext) -> list[Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching")
        model = FSDP(Columns(mesh["model"]), device_mesh=mesh["data"], use_orig_params=True)
    found = cells.saved(model, cells.FULL)["weight"]
    with FSDP.summon_full_params(model):
        inside = cells.saved(model, cells.FULL)["weight"]
    assert isinstance(inside, DTensor)
    assert torch.equal(inside.to_local(), torch.arange(8.0).view(2, 4).chunk(2, 1)[context.rank])
    return [type(found).__name__, found.tolist()]


def test_what_was_cut_before_is_saved_whole_but_as_it_is_inside_a_summon() -> None:
    assert agreed(_columns, 2) == ["Tensor", [[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_what_is_no_tensor_is_loaded_as_it_is() -> None:
    param: Any = SimpleNamespace(outer=None, inside=lambda value: value)
    info: Any = SimpleNamespace(mesh=SimpleNamespace(device_type="cpu"), shard_group=None)
    assert part_of(param, "nothing to load", info) == "nothing to load"


def _alone(context: RankContext) -> list[Any]:
    inner = FSDP(nn.Linear(2, 2))
    outer = FSDP(nn.Sequential(inner, nn.Linear(2, 2)))
    keys = dict.fromkeys(["at.0.bias", "at.1.bias", "elsewhere"])
    mesh = init_device_mesh("cpu", (1,))
    value = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    return [
        own_keys(outer, keys, "at."),
        own_keys(inner, keys, "at.0."),
        gathered(value, torch.device("cpu")).device.type,
        gathered(value, torch.device("meta")).device.type,
    ]


def test_a_unit_has_keys_of_its_own_and_a_value_is_gathered_where_it_should_be() -> None:
    assert agreed(_alone, 1) == [["at.1.bias"], ["at.0.bias"], "cpu", "meta"]
