"""A value cut over ranks has the right rows, place and type, and is put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor import init_from_local_shards as from_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.ranks import RankContext
from fsdp.engine.mesh import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from fsdp.state_dict.form import chunked, gathered, own_chunk, rows_of
from tests.fsdp.ranks import on_ranks
from tests.state_dict import cells

CPU = torch.device("cpu")
SHAPES = ((6,), (5, 3), (3, 2, 2), (1, 4), (0, 3), (4, 0))
FORMS = pytest.mark.parametrize("dtensor", [False, True], ids=["sharded_tensor", "dtensor"])


def _whole(shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return torch.arange(numel, dtype=torch.float64).view(shape)


def _rows(shape: tuple[int, ...], world: int, rank: int) -> torch.Tensor:
    """What ``torch.chunk`` gives this rank; nothing if it gives fewer chunks."""
    chunks = _whole(shape).chunk(world) if shape[0] else ()
    return chunks[rank] if rank < len(chunks) else torch.empty(0, *shape[1:], dtype=torch.float64)


def _cuts(context: RankContext, shape: tuple[int, ...], *, dtensor: bool) -> list[Any]:
    mesh = init_device_mesh("cpu", (context.world_size,))
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    whole, want = _whole(shape), _rows(shape, context.world_size, context.rank)
    value = chunked(whole, info, use_dtensor=dtensor)
    assert value.size() == whole.size()
    assert torch.equal(own_chunk(value, info), want)
    found = gathered(value, CPU)
    assert torch.equal(found, whole)
    assert found.dtype == torch.float64
    whole.fill_(-1)
    assert torch.equal(own_chunk(value, info), want)  # a copy
    if dtensor:
        assert isinstance(value, DTensor)
        assert (value.device_mesh, value.placements) == (mesh, (Shard(0),))
        return []
    assert isinstance(value, ShardedTensor)
    (held,) = value.local_shards() or [None]
    assert (held is None) == (not want.shape[0] and context.rank > 0)
    return [
        [list(each.shard_offsets), list(each.shard_sizes), str(each.placement)]
        for each in value.metadata().shards_metadata
    ]


@cells.grid(
    shape={str(shape): shape for shape in SHAPES},
    world={"1": 1, "2": 2, "3": 3},
    dtensor={"sharded_tensor": False, "dtensor": True},
)
def test_a_value_is_cut_as_torch_chunks_and_gathered_again(
    shape: tuple[int, ...], world: int, *, dtensor: bool
) -> None:
    on_ranks(_cuts, world, shape=shape, dtensor=dtensor)


def test_every_rank_knows_the_places_of_all_chunks() -> None:
    wanted = [[[0, 0], [2, 3], "rank:0/cpu"], [[2, 0], [2, 3], "rank:1/cpu"]]
    wanted += [[[4, 0], [1, 3], "rank:2/cpu"]]
    assert on_ranks(_cuts, 3, shape=(5, 3), dtensor=False) == (wanted,) * 3


def _replicas(context: RankContext, *, dtensor: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    whole = _whole((5, 3))
    value = chunked(whole, info, use_dtensor=dtensor, offload_to_cpu=True)
    assert torch.equal(own_chunk(value, info), _rows((5, 3), 2, context.rank % 2))
    assert torch.equal(gathered(value, CPU), whole)
    if dtensor:
        assert isinstance(value, DTensor)
        assert value.placements == (Replicate(), Shard(0))
        return
    assert isinstance(value, ShardedTensor)
    ranks = [each.placement.rank() for each in value.metadata().shards_metadata]  # type: ignore[union-attr]
    assert ranks == [context.rank // 2 * 2, context.rank // 2 * 2 + 1]


@FORMS
def test_a_replica_holds_a_whole_value_among_its_own_ranks(*, dtensor: bool) -> None:
    on_ranks(_replicas, 4, dtensor=dtensor)


def _other_cuts(context: RankContext) -> None:
    """Values that others have cut in another way are taken too."""
    mesh = init_device_mesh("cpu", (2,))
    info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    whole, want = _whole((5, 4)), _rows((5, 4), 2, context.rank)
    columns = distribute_tensor(whole, mesh, [Shard(1)])
    replicated = distribute_tensor(whole, mesh, [Replicate()])
    split = (0, 1, 5)
    start, stop = split[context.rank : context.rank + 2]
    shard = LocalShard.from_tensor_and_offsets(whole[start:stop].clone(), [start, 0], context.rank)
    for value in (columns, replicated, from_shards([shard], [5, 4]), whole):
        assert torch.equal(gathered(value, CPU), whole)
        assert torch.equal(own_chunk(value, info), want)


def test_a_value_that_was_cut_otherwise_is_put_together_first() -> None:
    on_ranks(_other_cuts, 2)


def _refusals(context: RankContext) -> None:
    info = FSDPMeshInfo(init_device_mesh("cpu", (2,)), shard_mesh_dim=0)
    with pytest.raises(ValueError, match="without dims"):
        chunked(torch.tensor(1.0), info, use_dtensor=True)
    replicas = DDPMeshInfo(init_device_mesh("cpu", (2,)), replicate_mesh_dim=0)
    with pytest.raises(RuntimeError, match="can only be used when parameters are flatten and"):
        chunked(torch.ones(2), replicas, use_dtensor=False)
    alone = [dist.new_group([rank]) for rank in range(2)][context.rank]
    value = chunked(torch.ones(2), info, use_dtensor=False)
    with pytest.raises(ValueError, match="has a part on rank"):
        gathered(value, CPU, group=alone)


def test_what_cannot_be_cut_or_put_together_is_refused() -> None:
    on_ranks(_refusals, 2)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", range(12))
def test_the_rows_of_all_ranks_are_the_chunks_of_torch(rows: int, world: int) -> None:
    found = [rows_of(rows, world, rank) for rank in range(world)]
    sizes = [stop - start for start, stop in found]
    wanted = [len(chunk) for chunk in torch.zeros(rows).chunk(world)]
    assert sizes == wanted + [0] * (world - len(wanted))
    assert [start for start, _ in found] == [sum(sizes[:rank]) for rank in range(world)]
