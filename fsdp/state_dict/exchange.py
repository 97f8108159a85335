"""From the shards of a flat parameter to chunks of its original parameters, and back.

Every rank sends exactly the elements that others need, in one exchange per group: no rank ever has
a whole parameter. Knows one group and its layout; knows no names and no state dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from fsdp.engine.layout import Extent, Layout, moves, side_by_side
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.flat_parameter import FlatParam, flat_params


@torch.no_grad()
def chunks_of(group: FSDPParamGroup) -> list[torch.Tensor]:
    """Return this rank's chunk (rows, ...) of every parameter of ``group``, on its device.

    *Collective* over the shard group: one all-to-all. *Memory*: the result, and as much again
    twice until it returns. *Blocks* the current stream (the host, without streams).
    """
    params = flat_params(group.shard.plain)
    shard, info = group.shard, group.mesh_info
    chunks = _chunk_layout(params, info.shard_size)
    sources = _pieces(shard.layout, shard.data, info.shard_rank)
    held = [chunks.piece(index, info.shard_rank) for index in range(len(params))]
    targets = [
        torch.empty(piece.numel, dtype=param.dtype, device=group.options.device)
        for param, piece in zip(params, held, strict=True)
    ]
    _deal(sources, shard.layout, targets, chunks, info, group.options.device)
    return [
        _logical(param, run, piece.stop - piece.start).contiguous()
        for param, run, piece in zip(params, targets, held, strict=True)
    ]


@torch.no_grad()
def fill_from_chunks(group: FSDPParamGroup, chunks: Mapping[int, torch.Tensor]) -> None:
    """Write whole parameters, of which ``chunks`` are this rank's, into the shards of all ranks.

    Args:
        group: whose shards.
        chunks: index of a parameter -> this rank's rows of it. The same indices on all ranks.

    *Collective* over the shard group: one all-to-all. *Memory*: twice the chunks.
    """
    if not chunks:
        return
    shard, info = group.shard, group.mesh_info
    params = flat_params(group.shard.plain)
    indices = sorted(chunks)
    target = replace(shard.layout, cuts=tuple(shard.layout.cuts[index] for index in indices))
    source = _chunk_layout([params[index] for index in indices], info.shard_size)
    own = [_in_memory_order(params[index], chunks[index]).reshape(-1) for index in indices]
    own = [run.to(params[i].dtype) for i, run in zip(indices, own, strict=True)]
    pieces = _pieces(target, shard.data, info.shard_rank)
    _deal(own, source, pieces, target, info, group.options.device)


def _pieces(layout: Layout, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
    pieces = [layout.piece(index, rank) for index in range(len(layout.cuts))]
    return [shard.narrow(0, piece.offset, piece.numel) for piece in pieces]


def _chunk_layout(params: Sequence[FlatParam], world: int) -> Layout:
    """Return who holds which chunk; its units are enumerated as the flat parameter does."""
    extents = []
    for param in params:
        order = param.order or tuple(range(len(param.shape)))
        in_memory = [param.shape[dim] for dim in order]
        extents.append(Extent.of(in_memory, order.index(0)))
    return side_by_side(extents, world)


def _logical(param: FlatParam, run: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the elements ``run`` of ``rows`` rows of ``param`` in its shape, as a view."""
    order = param.order or tuple(range(len(param.shape)))
    in_memory = [rows if dim == 0 else param.shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(len(order))]
    return run.view(in_memory).permute(back)


def _in_memory_order(param: FlatParam, chunk: torch.Tensor) -> torch.Tensor:
    return chunk if param.order is None else chunk.permute(param.order)


def _deal(
    sources: Sequence[torch.Tensor],
    source: Layout,
    targets: Sequence[torch.Tensor],
    target: Layout,
    info: DataParallelMeshInfo,
    device: torch.device,
) -> None:
    """Copy every unit from where ``source`` has it to where ``target`` wants it.

    ``sources`` and ``targets`` are what this rank holds of each parameter, (n,).
    """
    rank = info.shard_rank
    sent: list[list[torch.Tensor]] = [[] for _ in range(info.shard_size)]
    received: list[list[torch.Tensor]] = [[] for _ in range(info.shard_size)]
    for move in moves(source, target):
        # Both sides see the moves between two ranks in the same order.
        if move.source_rank == rank:
            start = move.source_offset - source.piece(move.param, rank).offset
            run = sources[move.param].narrow(0, start, move.numel)
            sent[move.target_rank].append(run)
        if move.target_rank == rank:
            start = move.target_offset - target.piece(move.param, rank).offset
            run = targets[move.param].narrow(0, start, move.numel)
            received[move.source_rank].append(run)
    arrived = _all_to_all(sent, received, info.shard_group, device)
    runs = [run for each in received for run in each]
    for run, part in zip(runs, arrived.split([run.numel() for run in runs]), strict=True):
        run.copy_(part)


def _all_to_all(
    sent: Sequence[Sequence[torch.Tensor]],
    received: Sequence[Sequence[torch.Tensor]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> torch.Tensor:
    """Send runs to each rank and return what all have sent here, (sum of received,)."""
    runs = [run for each in (*sent, *received) for run in each]
    dtype = runs[0].dtype if runs else torch.uint8
    out = torch.cat([torch.empty(0, dtype=dtype, device=device), *_on(sent, device)])
    if group is None or group.size() == 1:
        return out
    counts = [[sum(run.numel() for run in each) for each in side] for side in (sent, received)]
    arrived = torch.empty(sum(counts[1]), dtype=dtype, device=device)
    # As bytes: not every backend exchanges every dtype.
    to_ranks, from_ranks = ([n * dtype.itemsize for n in side] for side in counts)
    dist.all_to_all_single(
        arrived.view(torch.uint8), out.view(torch.uint8), from_ranks, to_ranks, group=group
    )
    return arrived


def _on(sent: Sequence[Sequence[torch.Tensor]], device: torch.device) -> list[torch.Tensor]:
    # Blocking: on the host a run could be sent before it has arrived.
    return [run.to(device) for each in sent for run in each]
