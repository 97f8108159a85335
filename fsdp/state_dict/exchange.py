"""From the shards of a flat parameter to chunks of its original parameters, and back.

Every rank sends exactly the elements that others need: no rank ever has a whole parameter. Knows
one group and its layout, and says what is to move; how it moves is the transport's business. Knows
no names and no state dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp.engine.layout import Extent, Layout, side_by_side
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.flat_parameter import FlatParam, flat_params
from fsdp.reshard.dealt import Dealt, Ranks
from fsdp.reshard.plan import Plan
from fsdp.reshard.transport import Transport
from fsdp.state_dict.form import rows_of

Way = tuple[bool, tuple[int, ...]]  # whether from shards into chunks, and of which parameters
# What moves is the same every time, and computing it costs more than sending little.
_transports: WeakKeyDictionary[FSDPParamGroup, tuple[Layout, dict[Way, Transport]]]
_transports = WeakKeyDictionary()


@torch.no_grad()
def chunks_of(group: FSDPParamGroup) -> list[torch.Tensor]:
    """Return this rank's chunk (rows, ...) of every parameter of ``group``, on its device.

    *Collective* over the shard group: one all-to-all per round of bounded size. *Memory*: the
    result, and as much again twice, or two rounds if that is less, until it returns. *Blocks* the
    current stream until each round is over (the host, without streams).
    """
    params, indices = flat_params(group.shard.plain), range(len(group.shard.plain))
    _, chunks = _dealt(group, params, indices)
    device, rank = group.options.device, group.mesh_info.shard_rank
    targets = [
        torch.empty(chunk.held(rank), dtype=param.dtype, device=device)
        for param, chunk in zip(params, chunks.values(), strict=True)
    ]
    sources = [_piece(group, index) for index in indices]
    _transport(group, params, (True, tuple(indices))).run(_Lists(sources, targets))
    return [
        _logical(param, run, group.mesh_info).contiguous()
        for param, run in zip(params, targets, strict=True)
    ]


@torch.no_grad()
def fill_from_chunks(group: FSDPParamGroup, chunks: Mapping[int, torch.Tensor]) -> None:
    """Write whole parameters, of which ``chunks`` are this rank's, into the shards of all ranks.

    Args:
        group: whose shards.
        chunks: index of a parameter -> this rank's rows of it. The same indices on all ranks.

    *Collective* over the shard group: as ``chunks_of``. *Memory*: twice the chunks, or two rounds
    if that is less.
    """
    params, indices = flat_params(group.shard.plain), sorted(chunks)
    own = [_in_memory_order(params[i], chunks[i]).reshape(-1).to(params[i].dtype) for i in indices]
    pieces = [_piece(group, index) for index in indices]
    _transport(group, params, (False, tuple(indices))).run(_Lists(own, pieces))


def _transport(group: FSDPParamGroup, params: Sequence[FlatParam], way: Way) -> Transport:
    layout, known = _transports.get(group, (None, {}))
    if layout is not group.shard.layout:
        known = {}
        _transports[group] = group.shard.layout, known
    if way not in known:
        from_shards, indices = way
        shards, chunks = _dealt(group, params, indices)
        plan = Plan(shards, chunks) if from_shards else Plan(chunks, shards)
        known[way] = Transport(plan, group.mesh_info.shard_group, group.options.device)
    return known[way]


def _piece(group: FSDPParamGroup, index: int) -> torch.Tensor:
    """Return what this rank's shard holds of a parameter, as a view (n,)."""
    piece = group.shard.layout.piece(index, group.mesh_info.shard_rank)
    return group.shard.data.narrow(0, piece.offset, piece.numel)


def _dealt(
    group: FSDPParamGroup, params: Sequence[FlatParam], indices: Sequence[int]
) -> tuple[dict[str, Dealt], dict[str, Dealt]]:
    """Return who holds what of each parameter: in the shards, and in chunks of rows.

    Both enumerate the elements as the flat parameter does.
    """
    info = group.mesh_info
    members = [dist.get_rank()]
    if info.shard_group is not None:
        members = dist.get_process_group_ranks(info.shard_group)
    ranks = Ranks([members])
    shards: dict[str, Dealt] = {}
    chunks: dict[str, Dealt] = {}
    for index in indices:
        param = params[index]
        order = param.order or tuple(range(len(param.shape)))
        extent = Extent.of([param.shape[dim] for dim in order], order.index(0))
        (rows,) = side_by_side([extent], len(members)).cuts
        for dealt, cut in ((shards, group.shard.layout.cuts[index]), (chunks, rows)):
            dealt[str(index)] = Dealt(
                shape=tuple(param.shape), cut=replace(cut, base=0), ranks=ranks, order=param.order
            )
    return shards, chunks


def _logical(param: FlatParam, run: torch.Tensor, info: DataParallelMeshInfo) -> torch.Tensor:
    """Return the elements ``run`` of this rank's rows of ``param`` in its shape, as a view."""
    order = param.order or tuple(range(len(param.shape)))
    start, stop = rows_of(param.shape[0], info.shard_size, info.shard_rank)
    in_memory = [stop - start if dim == 0 else param.shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(len(order))]
    return run.view(in_memory).permute(back)


def _in_memory_order(param: FlatParam, chunk: torch.Tensor) -> torch.Tensor:
    return chunk if param.order is None else chunk.permute(param.order)


class _Lists:
    """The ends of the transport: what this rank holds of each tensor, before and afterwards."""

    def __init__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._sources, self._targets = sources, targets

    def riders(self, number: int) -> Sequence[torch.dtype]:
        """Return the dtype of a tensor, with which nothing else travels."""
        return (self._sources[number].dtype,)

    def read(self, number: int) -> Sequence[torch.Tensor]:
        """Return what is here of it now."""
        return (self._sources[number],)

    def open(self, number: int) -> Sequence[torch.Tensor]:
        """Return the memory for what will be here."""
        return (self._targets[number],)

    def close(self, number: int, filled: Sequence[torch.Tensor]) -> None:
        """Do nothing: it was filled in place."""
