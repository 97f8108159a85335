"""The sharded form: who holds which rows, as what, and at which price."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from conformance.ranks import RankContext
from fsdp import CPUOffload, FullStateDictConfig, ShardedStateDictConfig, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.ranks import count, on_ranks
from tests.state_dict import cells
from tests.state_dict.peaks import ROOT, SMALL, Inner, Wide, above

OPS = ("all_gather", "all_to_all")
HYBRID = ShardingStrategy.HYBRID_SHARD


def _rows(shape: tuple[int, ...], world: int) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of the chunks that ``torch.chunk`` makes."""
    start, found = 0, []
    for chunk in torch.empty(shape).chunk(world):
        found.append(([start, *[0] * (len(shape) - 1)], list(chunk.shape)))
        start += chunk.shape[0]
    return found


def _places(context: RankContext, *, offload: bool) -> None:
    world = context.world_size
    model = cells.wrap(cells.plain())
    state = cells.saved(model, cells.SHARDED, ShardedStateDictConfig(offload_to_cpu=offload))
    for name, param in cells.plain().named_parameters():
        value = state[name]
        assert isinstance(value, ShardedTensor)
        metadata = value.metadata()
        chunks = _rows(tuple(param.shape), world)
        found = [
            (list(each.shard_offsets), list(each.shard_sizes)) for each in metadata.shards_metadata
        ]
        assert found == chunks, name
        places = [str(each.placement) for each in metadata.shards_metadata]
        assert places == [f"rank:{rank}/cpu" for rank in range(len(chunks))]
        assert metadata.size == param.shape
        assert metadata.tensor_properties.dtype == param.dtype
        held = value.local_shards()
        assert len(held) == (context.rank < len(chunks))
        for shard in held:
            assert torch.equal(shard.tensor, param.chunk(world)[context.rank])
            assert shard.metadata == metadata.shards_metadata[context.rank]


@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offload"])
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_holds_its_chunk_of_rows_of_every_parameter(world: int, *, offload: bool) -> None:
    on_ranks(_places, world, offload=offload)


def _two_forms(context: RankContext, *, original: bool, offload: bool) -> None:
    mesh = cells.mesh_of(context.world_size)
    config = ShardedStateDictConfig(offload_to_cpu=offload)
    options = {"use_orig_params": original}
    tensors = cells.saved(cells.wrap(cells.plain(), **options), cells.SHARDED, config)
    meshed = cells.wrap(cells.plain(), device_mesh=mesh, **options)
    dtensors = cells.saved(meshed, cells.SHARDED, config)
    cells.same(cells.locals_of(dtensors), cells.locals_of(tensors))
    for name, param in cells.plain().named_parameters():
        value = dtensors[name]
        assert isinstance(value, DTensor)
        assert (value.device_mesh, value.placements) == (mesh, (Shard(0),))
        assert (value.shape, value.stride(), value.dtype) == (
            param.shape,
            param.stride(),
            param.dtype,
        )
        assert not value.requires_grad
        assert value.to_local().shape[1:] == param.shape[1:]


@cells.grid(world={"2": 2, "4": 4}, original=cells.ORIGINAL, offload=cells.switch("offload"))
def test_both_forms_hold_the_same_local_data(world: int, *, original: bool, offload: bool) -> None:
    on_ranks(_two_forms, world, original=original, offload=offload)


def _hybrid(context: RankContext, *, pair: bool, original: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    given: dict[str, Any] = {"process_group": groups} if pair else {"device_mesh": mesh}
    model = cells.wrap(cells.plain(), sharding_strategy=HYBRID, use_orig_params=original, **given)
    state = cells.saved(model, cells.SHARDED)
    wanted = dict(cells.plain().named_parameters())
    cells.same(cells.put_together(state), wanted)
    rank = context.rank % 2
    for name, value in cells.locals_of(state).items():
        chunks = wanted[name].chunk(2)
        assert torch.equal(value, chunks[rank].flatten() if rank < len(chunks) else value[:0])
    for value in state.values():
        if pair:
            assert isinstance(value, ShardedTensor)
            ranks = {each.placement.rank() for each in value.metadata().shards_metadata}  # type: ignore[union-attr]
            assert ranks == {context.rank - rank, context.rank - rank + 1}
        else:
            assert isinstance(value, DTensor)
            assert (value.device_mesh, value.placements) == (mesh, (Replicate(), Shard(0)))
    cells.spoil(model)
    cells.load(model, cells.SHARDED, state)
    cells.same(cells.whole(model), wanted)
    cells.step(model, context.rank)
    cells.load(model, cells.FULL, cells.plain().state_dict())
    cells.same(cells.whole(model), wanted)


@pytest.mark.parametrize(
    ("pair", "original"),
    [
        pytest.param(False, False, id="mesh-flat"),
        pytest.param(True, True, id="groups-original"),
        pytest.param(False, True, id="mesh-original", marks=pytest.mark.long),
        pytest.param(True, False, id="groups-flat", marks=pytest.mark.long),
    ],
)
def test_replicas_are_saved_as_one_rank_of_them_holds_it(*, pair: bool, original: bool) -> None:
    on_ranks(_hybrid, 4, pair=pair, original=original)


def _for_rank0(context: RankContext) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = cells.wrap(cells.plain(buffers=True), sharding_strategy=HYBRID, device_mesh=mesh)
    return list(cells.saved(model, cells.FULL, FullStateDictConfig(rank0_only=True)))


def test_a_state_for_rank0_is_on_the_first_rank_of_each_replica() -> None:
    names = list(cells.plain(buffers=True).state_dict())
    assert on_ranks(_for_rank0, 4) == (names, [], names, [])


def _outside(context: RankContext) -> None:
    model = nn.Sequential(
        nn.Linear(10, 10), cells.wrap(cells.plain(), device_mesh=cells.mesh_of(2))
    )
    kinds = {name: type(value) for name, value in cells.saved(model, cells.SHARDED).items()}
    assert {n for n, kind in kinds.items() if kind is torch.Tensor} == {"0.weight", "0.bias"}
    assert {kind for n, kind in kinds.items() if n[0] == "1"} == {DTensor}


def test_only_what_units_manage_is_sharded() -> None:
    on_ranks(_outside, 2)


def _offloaded(context: RankContext, *, mesh: bool) -> None:
    given = {"device_mesh": cells.mesh_of(2)} if mesh else {}
    model = cells.wrap(cells.plain(), cpu_offload=CPUOffload(offload_params=True), **given)
    state = cells.saved(model, cells.SHARDED)
    cells.spoil(model)
    cells.load(model, cells.SHARDED, state)
    cells.same(cells.whole(model), dict(cells.plain().named_parameters()))


@pytest.mark.parametrize("mesh", [False, True], ids=["group", "mesh"])
def test_shards_in_host_memory_are_saved_and_loaded(*, mesh: bool) -> None:
    on_ranks(_offloaded, 2, mesh=mesh)


def _on_disk(context: RankContext, path: str, *, mesh: bool, local: bool) -> None:
    given = {"device_mesh": cells.mesh_of(2)} if mesh else {}
    kind = cells.LOCAL if local else cells.SHARDED
    model = cells.wrap(cells.plain(), **given)
    dcp.save(cells.saved(model, kind), checkpoint_id=path)
    other = cells.wrap(cells.plain(seed=8), **given)
    state = cells.saved(other, kind)
    dcp.load(state, checkpoint_id=path)
    cells.load(other, kind, state)
    cells.same(cells.whole(other), dict(cells.plain().named_parameters()))


@pytest.mark.parametrize("form", ["group", "mesh", "local"])
def test_distributed_checkpoints_keep_a_state(form: str, tmp_path: Path) -> None:
    on_ranks(_on_disk, 2, path=str(tmp_path), mesh=form == "mesh", local=form == "local")


# The price


def _wide(**options: Any) -> FSDP:
    policy = ModuleWrapPolicy({Inner})
    return cells.wrap(Wide(), nested=False, auto_wrap_policy=policy, **options)


def _cost(context: RankContext, *, loads: bool, mesh: bool, original: bool, allowed: int) -> int:
    """Bytes above shards and state at the most."""
    given = {"device_mesh": cells.mesh_of(context.world_size)} if mesh else {}
    model = _wide(use_orig_params=original, **given)
    if not loads:
        return above(lambda: _shards(model), lambda: cells.saved(model, cells.SHARDED), allowed)
    state = cells.saved(model, cells.SHARDED)
    return above(
        lambda: [*_shards(model), state], lambda: cells.load(model, cells.SHARDED, state), allowed
    )


def _shards(model: FSDP) -> list[torch.Tensor]:
    return [group.shard.data for unit in FSDP.fsdp_modules(model) for group in unit._state.groups]


@cells.grid(
    world={"2": 2, "4": 4},
    loads={"save": False, "load": True},
    mesh=cells.MESH,
    original=cells.ORIGINAL,
)
def test_no_more_than_one_group_is_in_memory_beside_shards_and_state(
    world: int, *, loads: bool, mesh: bool, original: bool
) -> None:
    # The chunks of the largest group travel twice: what is sent, and what arrives.
    least, most = ROOT // world, 2 * ROOT // world + 256
    options = {"loads": loads, "mesh": mesh, "original": original}
    found = on_ranks(_cost, world, allowed=most, **options)
    assert all(least < cost <= most for cost in found), found


def _calls(context: RankContext, *, full: bool, loads: bool = False) -> list[int]:
    model = _wide()
    kind = cells.FULL if full else cells.SHARDED
    state = cells.saved(model, kind)
    before = [count(context, op) for op in OPS]
    if loads:
        cells.load(model, kind, state)
    else:
        cells.saved(model, kind)
    return [count(context, op) - was for op, was in zip(OPS, before, strict=True)]


@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_each_unit_is_exchanged_once(*, loads: bool) -> None:
    # The ranks agree once on what they save or load.
    assert on_ranks(_calls, 2, full=False, loads=loads) == ([1, 3],) * 2


def test_each_unit_is_gathered_once() -> None:
    assert on_ranks(_calls, 2, full=True) == ([1 + 3, 0],) * 2


def _whole_cost(context: RankContext) -> int:
    model = _wide()
    model.module.layers.register_state_dict_post_hook(lambda *_: None)
    return above(lambda: _shards(model), lambda: cells.saved(model, cells.SHARDED), sys.maxsize)


def test_the_meter_sees_a_unit_that_is_gathered() -> None:
    assert min(on_ranks(_whole_cost, 4)) >= ROOT


def _full_cost(context: RankContext, allowed: int) -> int:
    model = _wide()
    return above(lambda: _shards(model), lambda: cells.saved(model, cells.FULL), allowed)


def test_a_full_save_gathers_each_unit_while_the_recursion_is_inside_it() -> None:
    # All copies are there when the root is given up, and nothing of the units below is.
    found = on_ranks(_full_cost, 2, allowed=ROOT + SMALL)
    assert all(ROOT <= cost <= ROOT + SMALL for cost in found), found
