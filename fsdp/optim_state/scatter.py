"""Runs of a unit from the first rank, which has the whole values, to the ranks that keep them.

Each rank receives what it keeps where it keeps it. The first rank puts together what the others
keep before it makes room for its own, so that nobody needs memory beside the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from fsdp.engine.layout import Fragment, Layout
from fsdp.optim_state.vocabulary import FSDPParamInfo, Member

LIMIT = 16 << 20  # bytes that the first rank puts together at a time, if its own run is as large
LEAST = 1 << 20  # and if it is not

Groups = Sequence[dist.ProcessGroup]


def can_scatter(info: FSDPParamInfo, member: Member, groups: Groups, device: torch.device) -> bool:
    """Whether a member is one run of elements on each rank of the first of ``groups``.

    The same on all ranks.
    """
    params = [info.params[index] for index in member.indices]
    cuts = [info.group.shard.layout.cuts[index] for index in member.indices]
    gapless = all(one.first - one.extent.numel == other.first for one, other in pairwise(cuts))
    plain = all(param.outer is None or not param.outer.is_cut for param in params)
    here = bool(groups) and groups[0] is info.mesh.shard_group
    return here and gapless and plain and not member.is_whole and params[0].local.device == device


def scattered(
    info: FSDPParamInfo, member: Member, values: Sequence[Any], groups: Groups
) -> torch.Tensor:
    """Return this rank's run (numel,) of one state of a member.

    Args:
        info: its unit.
        member: one that ``can_scatter``.
        values: of its parameters, in order: whole tensors on the first rank, and shape and dtype
            of them elsewhere; None: zeros.
        groups: the shard group, and then those whose first ranks know what the others are to have.

    *Collective*: some all-to-alls over the shard group; one broadcast over each other group.
    *Memory*: the result; on the first rank, before that, as much as is sent at a time.
    """
    shards, *beside = groups
    layout, dtype = info.group.shard.layout, next(v.dtype for v in values if v is not None)
    device = info.params[member.indices[0]].local.device
    takes_part = all(group.rank() == 0 for group in beside)
    first = shards.rank() == 0 and takes_part
    own = torch.zeros(0 if first else member.numel, dtype=dtype, device=device)
    if takes_part:
        runs = [_fragments(layout, member, rank) for rank in range(shards.size())]
        if first:
            flat = [_in_order(info, *each) for each in zip(member.indices, values, strict=True)]
            _send(runs, flat, own, shards)
            own = torch.zeros(member.numel, dtype=dtype, device=device)
            _fill(_target(own, member, runs[0]), 0, runs[0], flat)
        else:
            _receive(runs, _target(own, member, runs[shards.rank()]), shards)
    for number, group in enumerate(beside):
        if all(later.rank() == 0 for later in beside[number + 1 :]):
            dist.broadcast(own, src=dist.get_process_group_ranks(group)[0], group=group)
    return own


def _in_order(info: FSDPParamInfo, index: int, value: torch.Tensor | None) -> torch.Tensor | None:
    """Return the elements of a whole value as the flat parameter enumerates them, (n,)."""
    return None if value is None else info.params[index].in_order(value.detach()).reshape(-1)


def _fragments(layout: Layout, member: Member, rank: int) -> list[Fragment]:
    """Return what a rank holds of each parameter of ``member``; one run together."""
    return [layout.piece(index, rank) for index in member.indices]


def _length(run: Sequence[Fragment]) -> int:
    return sum(piece.numel for piece in run)


def _target(own: torch.Tensor, member: Member, run: Sequence[Fragment]) -> torch.Tensor:
    """Return where the run lies in what this rank keeps."""
    start = next((piece.offset for piece in run if piece.numel), member.offset)
    return own.narrow(0, start - member.offset, _length(run))


def _steps(runs: Sequence[Sequence[Fragment]], itemsize: int) -> Iterator[tuple[int, list[int]]]:
    """Yield from where in each run how much is sent to each rank, nothing to the first."""
    first, *others = map(_length, runs)
    room = max(min(LIMIT, first * itemsize), LEAST) // itemsize
    step = max(1, room // max(1, len(others)))
    for start in range(0, max(others, default=0), step):
        yield start, [0, *(max(0, min(step, length - start)) for length in others)]


def _send(
    runs: Sequence[Sequence[Fragment]],
    flat: Sequence[torch.Tensor | None],
    empty: torch.Tensor,
    group: dist.ProcessGroup,
) -> None:
    nothing = [0] * len(runs)
    for start, sizes in _steps(runs, empty.element_size()):
        message = empty.new_empty(sum(sizes))
        for run, part in zip(runs, message.split(sizes), strict=True):
            _fill(part, start, run, flat)
        dist.all_to_all_single(empty, message, nothing, sizes, group=group)


def _receive(
    runs: Sequence[Sequence[Fragment]], target: torch.Tensor, group: dist.ProcessGroup
) -> None:
    nothing, empty = [0] * len(runs), target.new_empty(0)
    for start, sizes in _steps(runs, target.element_size()):
        mine = sizes[group.rank()]
        arrives = [mine, *nothing[1:]]
        place = target.narrow(0, min(start, target.numel()), mine)
        dist.all_to_all_single(place, empty, arrives, nothing, group=group)


def _fill(
    part: torch.Tensor, start: int, run: Sequence[Fragment], flat: Sequence[torch.Tensor | None]
) -> None:
    """Copy [start, start + n) of a run into ``part`` (n,); zeros where there is no value."""
    end = start + part.numel()
    position = 0
    for piece, value in zip(run, flat, strict=True):
        begin, stop = max(start, position), min(end, position + piece.numel)
        if begin < stop:
            target = part.narrow(0, begin - start, stop - begin)
            if value is None:
                target.zero_()
            else:
                target.copy_(value.narrow(0, piece.start + begin - position, stop - begin))
        position += piece.numel
