"""The two forms of a value that is cut over ranks, ``ShardedTensor`` and ``DTensor``, and back.

A value is cut on dim 0 into chunks of ceil(rows / ranks) rows; the last ranks may have fewer, or
none. Knows tensors, groups and meshes; knows no units, no parameters and no names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp.engine.mesh import DataParallelMeshInfo, device_of
from fsdp.engine.torch_private import (
    ShardedTensor,
    ShardMetadata,
    dtensor_of,
    gather_now,
    group_of,
    local_tensor,
    make_spec,
    sharded_tensor_of,
    spec_of,
)
from fsdp.engine.tree import map_tensors


def rows_of(rows: int, world: int, rank: int) -> tuple[int, int]:
    """Return which of ``rows`` rows ``rank`` of ``world`` holds, as (start, stop)."""
    step = -(-rows // world)
    start = min(rank * step, rows)
    return start, min(start + step, rows)


def chunked(
    whole: torch.Tensor,
    info: DataParallelMeshInfo,
    *,
    use_dtensor: bool,
    offload_to_cpu: bool = False,
) -> torch.Tensor:
    """Return a ``whole`` tensor, which all ranks have, cut over the shard group; it is copied.

    Raises:
        RuntimeError: nothing is sharded in ``info``.
        ValueError: no dim that could be cut.
    """
    own = own_rows(whole, info)
    return from_chunk(
        own, whole.shape, info, use_dtensor=use_dtensor, offload_to_cpu=offload_to_cpu
    )


def own_rows(whole: torch.Tensor, info: DataParallelMeshInfo) -> torch.Tensor:
    """Return this rank's chunk (rows, ...) of a ``whole`` tensor; a copy.

    Raises:
        ValueError: no dim that could be cut.
    """
    if whole.dim() == 0:
        raise ValueError("a tensor without dims cannot be cut into chunks; keep it whole")
    start, stop = rows_of(whole.shape[0], info.shard_size, info.shard_rank)
    return whole.detach()[start:stop].clone(memory_format=torch.contiguous_format)


def from_chunk(
    own: torch.Tensor,
    shape: Sequence[int],
    info: DataParallelMeshInfo,
    *,
    use_dtensor: bool,
    offload_to_cpu: bool = False,
) -> torch.Tensor:
    """Return the value of shape ``shape`` of which ``own`` is this rank's chunk; not copied.

    Args:
        own: (rows, ...), contiguous; no rows on the ranks beyond the last chunk.
        shape: of the whole value.
        info: the ranks.
        use_dtensor: a DTensor over the mesh of ``info``, else a ShardedTensor over its shard
            group, with placements "rank:<global rank>/<device>".
        offload_to_cpu: move the chunk to host memory. The mesh of a DTensor stays what it is.

    Raises:
        RuntimeError: nothing is sharded in ``info``.
    """
    group, dim = info.shard_group, info.shard_mesh_dim
    if group is None or dim is None:
        raise RuntimeError(
            "``sharded_state_dict`` can only be used when parameters are flatten and sharded."
        )
    if offload_to_cpu:
        own = own.cpu()
    shape = torch.Size(shape)
    if not use_dtensor:
        shards = _places(shape, group, own.device)
        held = own if own.shape[0] or group.rank() == 0 else None
        return sharded_tensor_of(held, shards, size=shape, dtype=own.dtype, group=group)
    placements = [Shard(0) if each == dim else Replicate() for each in range(info.mesh.ndim)]
    strides = torch.empty(shape, device="meta").stride()
    spec = make_spec(info.mesh, placements, shape=shape, stride=strides, dtype=own.dtype)
    return dtensor_of(own, spec, requires_grad=False)


def is_sharded(value: object) -> bool:
    """Whether ``value`` has one of the two forms."""
    return isinstance(value, (ShardedTensor, DTensor))


def form_told(value: torch.Tensor) -> str:
    """Return what all ranks that hold a value must have in common, or gathering it would hang."""
    if isinstance(value, DTensor):
        return f"DTensor {list(value.placements)} on a mesh of {tuple(value.device_mesh.shape)}"
    if isinstance(value, ShardedTensor):
        return f"ShardedTensor of {len(value.metadata().shards_metadata)} shards"
    return "meta tensor" if value.is_meta else "whole tensor"


def is_chunk(value: torch.Tensor, info: DataParallelMeshInfo) -> bool:
    """Whether ``value`` is cut as ``chunked`` does, so that nobody has to gather it."""
    if isinstance(value, ShardedTensor):
        return _is_chunked(value, info)
    return isinstance(value, DTensor) and _is_chunked_dtensor(value, info)


def own_chunk(value: torch.Tensor, info: DataParallelMeshInfo) -> torch.Tensor:
    """Return this rank's chunk (rows, ...) of a value in any form; not copied if it has that form.

    *Collective* over the ranks of a value that is sharded in another way than ``chunked`` does.
    *Memory*: then, the whole value.
    """
    if isinstance(value, ShardedTensor) and is_chunk(value, info):
        held = value.local_shards()
        shape = value.size()
        return held[0].tensor if held else torch.empty(0, *shape[1:], dtype=value.dtype)
    if isinstance(value, DTensor) and is_chunk(value, info):
        return local_tensor(value).detach()
    whole = gathered(value, device_of(info.mesh), group=info.shard_group)
    start, stop = rows_of(whole.shape[0], info.shard_size, info.shard_rank)
    own = whole.detach()[start:stop]
    return own if whole is value else own.clone()  # or the whole would live as long


def gathered(
    value: torch.Tensor, device: torch.device, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the whole of a value in either form, on ``device``; any other tensor as it is.

    Args:
        value: cut in any way, on any device.
        device: of the ranks' backend.
        group: the ranks that hold a ShardedTensor; default, the group that it belongs to.

    *Collective* over the group or the mesh of the value. *Memory*: the whole value, twice while
    it is put together. *Blocks* the current stream (the host, without streams).

    Raises:
        ValueError: parts of the value are held by ranks outside of the group.
    """
    if isinstance(value, ShardedTensor):
        return _gathered_shards(value, device, group_of(value) if group is None else group)
    if not isinstance(value, DTensor):
        return value
    local = local_tensor(value).detach()
    if local.device != device:
        value = dtensor_of(local.to(device), spec_of(value), requires_grad=False)
    whole: torch.Tensor = value.full_tensor()
    return whole.detach()


def gathered_state(state: Any, device: torch.device) -> Any:
    """Return ``state`` with every value in either form whole, in containers of the same types.

    *Collective*: see ``gathered``; values are gathered in the order of ``state``.
    """
    return map_tensors(lambda value: gathered(value, device), state)


def _gathered_shards(
    value: ShardedTensor, device: torch.device, group: dist.ProcessGroup
) -> torch.Tensor:
    ranks = dist.get_process_group_ranks(group)
    shards = value.metadata().shards_metadata
    by_rank: dict[int, list[ShardMetadata]] = {rank: [] for rank in ranks}
    for shard in shards:
        rank = rank_of(shard)
        if rank not in by_rank:
            raise ValueError(
                f"a ShardedTensor of shape {tuple(value.size())} has a part on rank {rank}, which "
                f"is not among the ranks {ranks} that gather it; load it with "
                "torch.distributed.checkpoint, which reads what each rank needs"
            )
        by_rank[rank].append(shard)
    held = sorted(value.local_shards(), key=lambda shard: shard.metadata.shard_offsets)
    longest = max(sum(map(_numel, each)) for each in by_rank.values())
    own = torch.zeros(longest, dtype=value.dtype, device=device)
    end = 0
    for part in (shard.tensor.detach().reshape(-1) for shard in held):
        own.narrow(0, end, part.numel()).copy_(part)
        end += part.numel()
    everyone = gather_now(own, group).view(len(ranks), longest)
    whole = torch.empty(value.size(), dtype=value.dtype, device=device)
    for found, placed in zip(everyone, by_rank.values(), strict=True):
        start = 0
        for shard in sorted(placed, key=lambda each: each.shard_offsets):
            target = whole
            for dim, (offset, size) in enumerate(
                zip(shard.shard_offsets, shard.shard_sizes, strict=True)
            ):
                target = target.narrow(dim, offset, size)
            target.copy_(found.narrow(0, start, _numel(shard)).view(target.shape))
            start += _numel(shard)
    return whole


def rank_of(shard: ShardMetadata) -> int:
    """Return the global rank that holds ``shard``."""
    assert shard.placement is not None, "every shard of a ShardedTensor has a place"
    rank = shard.placement.rank()
    assert rank is not None, "every place of a ShardedTensor has a rank"
    return rank


def _numel(shard: ShardMetadata) -> int:
    return math.prod(shard.shard_sizes)


def _places(
    shape: torch.Size, group: dist.ProcessGroup, device: torch.device
) -> list[ShardMetadata]:
    """Return the chunks of all ranks that have any, in order."""
    found = []
    for rank, global_rank in enumerate(dist.get_process_group_ranks(group)):
        start, stop = rows_of(shape[0], group.size(), rank)
        # Without a row there is still one chunk, or the value would have no part at all.
        if start < stop or rank == 0:
            offsets, sizes = [start, *(0 for _ in shape[1:])], [stop - start, *shape[1:]]
            where = place_of(global_rank, device, own=rank == group.rank())
            found.append(ShardMetadata(offsets, sizes, where))
    return found


def place_of(global_rank: int, device: torch.device, *, own: bool) -> str:
    """Return the placement of a shard; of other ranks the number of the device is a guess."""
    if device.type == "cpu" or own:
        return f"rank:{global_rank}/{device}"
    return f"rank:{global_rank}/{device.type}:{global_rank % torch.accelerator.device_count()}"


def _is_chunked(value: ShardedTensor, info: DataParallelMeshInfo) -> bool:
    group = info.shard_group
    if group is None:
        return False
    found = [
        (rank_of(shard), list(shard.shard_offsets), list(shard.shard_sizes))
        for shard in value.metadata().shards_metadata
    ]
    wanted = [
        (rank_of(shard), list(shard.shard_offsets), list(shard.shard_sizes))
        for shard in _places(value.size(), group, torch.device("cpu"))
    ]
    return found == wanted


def _is_chunked_dtensor(value: DTensor, info: DataParallelMeshInfo) -> bool:
    dims = [dim for dim, each in enumerate(value.placements) if each != Replicate()]
    if dims == []:
        return False
    (dim, *others) = dims
    ranks = dist.get_process_group_ranks(value.device_mesh.get_group(dim))
    group = info.shard_group
    same = group is not None and ranks == dist.get_process_group_ranks(group)
    return not others and value.placements[dim] == Shard(0) and same
