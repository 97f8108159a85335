"""The sharded form: who holds which rows, as what, and at which price."""

from __future__ import annotations

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
from conformance.scenarios.live_bytes import CpuMeter, metering
from fsdp import CPUOffload, FullStateDictConfig, ShardedStateDictConfig, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.ranks import count, on_ranks
from tests.state_dict import cells

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
    on_ranks(_hybrid, 4, pair=pair, original=original, fresh=True)


def _for_rank0(context: RankContext) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = cells.wrap(cells.plain(buffers=True), sharding_strategy=HYBRID, device_mesh=mesh)
    return list(cells.saved(model, cells.FULL, FullStateDictConfig(rank0_only=True)))


def test_a_state_for_rank0_is_on_the_first_rank_of_each_replica() -> None:
    names = list(cells.plain(buffers=True).state_dict())
    assert on_ranks(_for_rank0, 4, fresh=True) == (names, [], names, [])


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


class Wide(nn.Module):
    """Four layers around two units of one: the root finishes last, and has the largest group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.inner, self.other = Inner(), Inner()


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64, bias=False)


LAYER = 64 * 64 * 4  # bytes


class Peak(CpuMeter):
    """Live bytes after each operation, and the most that there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.uncollected())
        return result


def _wide(**options: Any) -> FSDP:
    policy = ModuleWrapPolicy({Inner})
    return cells.wrap(Wide(), nested=False, auto_wrap_policy=policy, **options)


def _bytes(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _costs(context: RankContext, *, loads: bool, mesh: bool, original: bool) -> list[int]:
    """[bytes above shards and state at the most, gathers, exchanges]."""
    given = {"device_mesh": cells.mesh_of(context.world_size)} if mesh else {}
    model = _wide(use_orig_params=original, **given)
    state = cells.saved(model, cells.SHARDED)  # also: what is done once
    before = [count(context, op) for op in OPS]
    shards = [group.shard.data for unit in FSDP.fsdp_modules(model) for group in unit._state.groups]
    with metering(cells.CPU), Peak() as meter:
        _ = [shard.sum() for shard in shards]
        if loads:
            _ = [value.sum() for value in cells.locals_of(state).values()]
            meter.peak = 0
            cells.load(model, cells.SHARDED, state)
        else:
            del state
            meter.peak = 0
            state = cells.saved(model, cells.SHARDED)
    held = [shard for each in state.values() for shard in cells.held(each)]
    above = meter.peak - _bytes(shards) - _bytes(held)
    return [above, *(count(context, op) - was for op, was in zip(OPS, before, strict=True))]


@cells.grid(
    world={"2": 2, "4": 4},
    loads={"save": False, "load": True},
    mesh=cells.MESH,
    original=cells.ORIGINAL,
)
def test_no_more_than_one_group_is_in_memory_beside_shards_and_state(
    world: int, *, loads: bool, mesh: bool, original: bool
) -> None:
    for peak, gathers, exchanges in on_ranks(
        _costs, world, loads=loads, mesh=mesh, original=original
    ):
        # Twice the chunks of the largest group travel: what is sent, and what arrives.
        chunks = 4 * LAYER // world
        # A thread of gloo may still hold what two smaller units have exchanged before.
        late = 2 * 2 * LAYER // world
        assert chunks < peak <= 2 * chunks + late + 256
        # The ranks agree once on what they save or load.
        assert (gathers, exchanges) == (1, 3)


def _whole_costs(context: RankContext) -> int:
    model = _wide()
    model.module.layers.register_state_dict_post_hook(lambda *_: None)
    cells.saved(model, cells.SHARDED)
    with metering(cells.CPU), Peak() as meter:
        state = cells.saved(model, cells.SHARDED)
    return meter.peak - _bytes(shard for each in state.values() for shard in cells.held(each))


def test_the_meter_sees_a_unit_that_is_gathered() -> None:
    assert min(on_ranks(_whole_costs, 4)) >= 4 * LAYER


SAVES = 4


def _full_costs(context: RankContext) -> list[list[int]]:
    model = _wide()
    cells.saved(model, cells.FULL)
    shards = [group.shard.data for unit in FSDP.fsdp_modules(model) for group in unit._state.groups]
    return [_full_cost(context, model, shards) for _ in range(SAVES)]


def _full_cost(context: RankContext, model: FSDP, shards: list[torch.Tensor]) -> list[int]:
    before = count(context, "all_gather")
    with metering(cells.CPU), Peak() as meter:
        _ = [shard.sum() for shard in shards]
        meter.peak = 0
        state = cells.saved(model, cells.FULL)
    gathers = count(context, "all_gather") - before
    return [meter.peak - _bytes(shards) - _bytes(state.values()), gathers]


def test_a_full_save_gathers_each_unit_while_the_recursion_is_inside_it() -> None:
    for costs in on_ranks(_full_costs, 2):
        # A thread of gloo now and then still holds what a unit below has gathered; it only adds.
        above = min(above for above, _ in costs)
        # All copies are there when the root is given up, and nothing of the units below is.
        assert 4 * LAYER <= above < 5 * LAYER
        # The ranks agree once on what they save.
        assert {gathers for _, gathers in costs} == {1 + 3}
