"""Gathers shards into whole parameters.

A plan is made once from a layout and knows every size and every view; a pass over it allocates,
copies and launches. Nothing here knows modules, hooks or order. Legend: ``W`` ranks of the group,
``S`` units of a shard (``layout.shard_numel``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp.api import AllGather
from fsdp.engine.buffer import Buffer
from fsdp.engine.layout import Layout
from fsdp.engine.streams import Done, Streams
from fsdp.engine.torch_private import all_gather

# Units up to which the host's time counts: copies take the operators that are called soonest.
# Those of a larger group run for longer than any call, and take the operators that run fastest.
LIGHT = 1 << 24
# Runs that are copied out one by one. A launch of a foreach operator takes 64 and copies no table
# to the device, as splitting does; with many ranks there are more runs than that saves.
_MAX_RUNS = 128


@dataclass(eq=False, slots=True)
class Gathering:
    """An all-gather in flight, or W = 1, where the shard itself is what was gathered."""

    plan: GatherPlan
    gathered: torch.Tensor  # (W * S,), or (S,) if W = 1
    done: Done | None
    sided: bool  # whether it ran on side streams, so that the next may overlap its copy-out
    memory: Buffer | None = None  # behind ``gathered``, if it is the plan's and free afterwards

    def release(self) -> None:
        """Give the gathered shards back to their stream, which is behind all that reads them."""
        if self.memory is not None:
            self.memory.free()


class GatherPlan:
    """How the shards of one group become its whole parameters.

    Args:
        layout: where everything lies in a shard.
        rank: this rank in ``group``.
        group: None if W = 1.
        buffer: where the whole parameters go; at least ``layout.total_numel`` units.
        blocks: (start in ``buffer``, units per rank) of every column of the layout; a start of
            None marks units that nobody reads.
        in_place: gather straight into ``buffer``, of which the parameters are views.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        group: dist.ProcessGroup | None,
        buffer: Buffer,
        *,
        blocks: Sequence[tuple[int | None, int]],
        in_place: bool,
    ) -> None:
        self.layout = layout
        self.group = group
        self.buffer = buffer
        self.in_place = in_place
        self._widths = [width for _, width in blocks]
        self._blocks = [
            torch.empty(layout.world, width, dtype=buffer.data.dtype, device=buffer.data.device)
            if start is None
            else buffer.data.narrow(0, start, layout.world * width).view(layout.world, width)
            for start, width in blocks
        ]
        self._restaged = cuts_within(layout) if not in_place else []
        self._staging: Buffer | None = None  # (W * S,), what is gathered, to be copied out
        if not in_place and group is not None:
            self._staging = Buffer(layout.total_numel, buffer.data.dtype, buffer.data.device)
        self._target = self._staging or buffer
        self._own = self._target.data.narrow(0, rank * layout.shard_numel, layout.shard_numel)
        self._runs = self._find_runs([start for start, _ in blocks])
        if self._staging is not None:
            self._staging.free()
        self._event: Any = None  # at the end of the last gather; the next begins after its waits

    def _find_runs(
        self, starts: Sequence[int | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Return where each run of gathered units goes and where it lies; None: do not copy so."""
        world = self.layout.world
        light = self.layout.total_numel <= LIGHT and world * len(starts) <= _MAX_RUNS
        if self._staging is None or self._restaged or not light:
            return None
        sources = self._staging.data.view(world, -1).split(self._widths, dim=1)
        pairs = [
            (block[rank], source[rank])
            for start, block, source in zip(starts, self._blocks, sources, strict=True)
            if start is not None and block.numel()
            for rank in range(world)
        ]
        if not pairs:
            return None  # parameters without elements only: there is nothing to copy
        return [target for target, _ in pairs], [source for _, source in pairs]

    def start(
        self,
        shard: torch.Tensor,
        streams: Streams,
        *,
        sided: bool,
        async_op: bool,
        comm: AllGather | None,
        recast: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> Gathering:
        """Launch the all-gather of ``shard`` (S,), cast to the buffer's dtype on the way.

        ``recast`` does the cast where parameters of several dtypes share the shard as bytes.

        *Collective* over the group. *Memory*: ``W * S`` units until the copy-out, beside the
        whole parameters, unless ``in_place``. *Blocks*: nothing.
        """
        if self.group is None:
            return Gathering(self, recast(shard) if recast else shard, None, sided=False)
        stream = streams.gather if sided else streams.current()
        late = async_op or streams.blocks_host
        with streams.on(stream):
            gathered, own, memory = self._allocate(comm)
            if recast is not None:
                shard = recast(shard)
            if shard.dtype != gathered.dtype or shard.device != gathered.device:
                own.copy_(shard, non_blocking=True)
                shard = own
            if comm is None:
                work = all_gather(gathered, shard, self.group, async_op=late)
            else:
                work = comm(
                    output_tensor=gathered, input_tensor=shard, group=self.group, async_op=late
                )
            if not late:
                self._event = streams.record(stream, self._event)
        done = Done(streams, work, None) if late else Done(streams, None, self._event)
        return Gathering(self, gathered, done, sided=sided, memory=memory)

    def _allocate(self, comm: AllGather | None) -> tuple[torch.Tensor, torch.Tensor, Buffer | None]:
        """Return where to gather, (W * S,), this rank's part of it, (S,), and what to free then."""
        target = self._target
        if comm is None or self.in_place:
            target.allocate()
            return target.data, self._own, self._staging
        numel, like = self.layout.total_numel, target.data
        gathered = comm.allocate((numel,), dtype=like.dtype, device=like.device)
        own = gathered.narrow(0, self._own.storage_offset(), self.layout.shard_numel)
        return gathered, own, None

    def finish(self, gathering: Gathering) -> None:
        """Wait, and copy the gathered shards (W, S) into the whole parameters.

        *Blocks* the current stream until the collective is over (the host, without streams).
        """
        if gathering.done is not None:
            gathering.done.wait()
        if self.group is None:
            self.buffer.allocate()
            self.buffer.data.copy_(gathering.gathered, non_blocking=True)
            return
        if self.in_place:
            return
        if self._runs is not None and gathering.memory is not None:
            self.buffer.allocate()
            torch._foreach_copy_(*self._runs)
        else:
            self.copy_out(gathering.gathered.view(self.layout.world, -1))

    def copy_out(self, gathered: torch.Tensor) -> None:
        """Copy gathered shards (W, S) into the whole parameters, whose memory is allocated."""
        if not self.layout.total_numel:
            return  # a group whose parameters all see to themselves
        self.buffer.allocate()
        world = self.layout.world
        if self.in_place:
            self.buffer.data.view(world, -1).copy_(gathered)
            return
        outs = self._blocks
        if self._restaged:
            outs = list(outs)
            for index, _, _, _ in self._restaged:
                outs[index] = torch.empty_like(outs[index])
        torch.split_with_sizes_copy(gathered, self._widths, dim=1, out=outs)
        for index, _, outer, rows_inner in self._restaged:
            # (W, outer, c * inner) to (outer, W, c * inner): the rows of a dim other than 0
            ranks = outs[index].view(world, outer, rows_inner).transpose(0, 1)
            self._blocks[index].view(outer, world, rows_inner).copy_(ranks)


def cuts_within(layout: Layout) -> list[tuple[int, int, int, int]]:
    """Return (column, parameter, outer, step * inner) where the pieces of ranks interleave."""
    return [
        (index, column.param, cut.extent.outer, cut.step * cut.extent.inner)
        for index, column in enumerate(layout.columns)
        if column.param is not None and (cut := layout.cuts[column.param]).extent.outer > 1
    ]
