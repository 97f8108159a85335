"""The two collectives of a group: shards to whole parameters, gradients to reduced shards.

A plan is made once from a layout and knows every size; a pass over it allocates, copies and
launches. Nothing here knows modules, hooks or order. Legend: ``W`` ranks of the group, ``S``
units of a shard (``layout.shard_numel``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp.api import AllGather
from fsdp.engine.layout import Layout
from fsdp.engine.param import FSDPParam
from fsdp.engine.streams import Done, Streams
from fsdp.engine.torch_private import all_gather, chunk_cat


class WholeBuffer:
    """The memory of a group's whole parameters: allocated for a pass, freed, allocated again.

    Its tensor stays the same object, so that the autograd leaves over it, and what autograd has
    saved of them, keep pointing at the right place; only the storage behind it comes and goes.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(numel, dtype=dtype, device=device)  # (W * S,)
        self._storage = self.data.untyped_storage()
        self._nbytes = self._storage.nbytes()

    def allocate(self) -> None:
        """Get memory on the current stream; its contents are undefined."""
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Give the memory back to the stream that it was allocated on."""
        self._storage.resize_(0)


def param_view(
    buffer: torch.Tensor, offset: int, param: FSDPParam, dtype: torch.dtype, rows: int | None = None
) -> torch.Tensor:
    """Return ``param`` (or ``rows`` rows of it) inside ``buffer``, which may be one of bytes."""
    shape = param.shape if rows is None else param.local_shape(rows)
    numel = shape.numel()
    if buffer.dtype == dtype:
        return buffer.narrow(0, offset, numel).view(shape)
    return buffer.narrow(0, offset, numel * dtype.itemsize).view(dtype).view(shape)


@dataclass(eq=False, slots=True)
class Gathering:
    """An all-gather in flight, or W = 1, where the shard itself is what was gathered."""

    plan: GatherPlan
    gathered: torch.Tensor  # (W * S,), or (S,) if W = 1
    done: Done | None
    sided: bool  # whether it ran on side streams, so that the next may overlap its copy-out


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
        buffer: WholeBuffer,
        *,
        blocks: Sequence[tuple[int | None, int]],
        in_place: bool,
    ) -> None:
        self.layout = layout
        self.group = group
        self.buffer = buffer
        self.in_place = in_place
        self._own = rank * layout.shard_numel
        self._widths = [width for _, width in blocks]
        self._blocks = [
            torch.empty(layout.world, width, dtype=buffer.data.dtype, device=buffer.data.device)
            if start is None
            else buffer.data.narrow(0, start, layout.world * width).view(layout.world, width)
            for start, width in blocks
        ]
        self._restaged = _cuts_within(layout) if not in_place else []

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
            gathered = self._allocate(comm)
            if recast is not None:
                shard = recast(shard)
            if shard.dtype != gathered.dtype or shard.device != gathered.device:
                own = gathered.narrow(0, self._own, self.layout.shard_numel)
                own.copy_(shard, non_blocking=True)
                shard = own
            if comm is None:
                work = all_gather(gathered, shard, self.group, async_op=late)
            else:
                work = comm(
                    output_tensor=gathered, input_tensor=shard, group=self.group, async_op=late
                )
            event = None if late else streams.record(stream)
        return Gathering(self, gathered, Done(streams, work if late else None, event), sided=sided)

    def _allocate(self, comm: AllGather | None) -> torch.Tensor:
        if self.in_place:
            self.buffer.allocate()
            return self.buffer.data
        target = self.buffer.data
        if comm is not None:
            return comm.allocate(
                (self.layout.total_numel,), dtype=target.dtype, device=target.device
            )
        return torch.empty(self.layout.total_numel, dtype=target.dtype, device=target.device)

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
        if not self.in_place:
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


def _cuts_within(layout: Layout) -> list[tuple[int, int, int, int]]:
    """Return (column, parameter, outer, step * inner) where the pieces of ranks interleave."""
    return [
        (index, column.param, cut.extent.outer, cut.step * cut.extent.inner)
        for index, column in enumerate(layout.columns)
        if column.param is not None and (cut := layout.cuts[column.param]).extent.outer > 1
    ]


class ReducePlan:
    """How the gradients of some parameters of a group become one reduced shard.

    ``layout`` counts elements and holds exactly ``params``, in order.
    """

    def __init__(self, params: Sequence[FSDPParam], layout: Layout, rank: int) -> None:
        self.params = tuple(params)
        self.layout = layout
        self._pieces = tuple(
            (piece.offset, piece.numel, tuple(param.local_shape(piece.stop - piece.start)))
            for param, piece in (
                (param, layout.piece(index, rank)) for index, param in enumerate(params)
            )
        )
        self._has_columns = layout.has_columns
        self._order = layout.packing_order
        self._within = {
            param: (outer, rows_inner)
            for _, param, outer, rows_inner in (
                _cuts_within(layout) if layout.world > 1 and layout.has_columns else ()
            )
        }
        # Where any element may be a border, the rows of a gradient say nothing.
        self._runs = [index for index, param in enumerate(params) if param.dim is None]
        self._plain = [param for param, _ in self._order] == list(range(len(params)))
        self._gaps: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def pack(self, gradients: list[torch.Tensor], packed: torch.Tensor) -> None:
        """Lay whole ``gradients`` into ``packed`` (W * S,), cast; the rest becomes zero."""
        world = self.layout.world
        for index in self._runs:
            gradients[index] = gradients[index].reshape(-1)
        for index, (outer, rows_inner) in self._within.items():
            ranks = gradients[index].reshape(outer, world, rows_inner).transpose(0, 1)
            gradients[index] = ranks.reshape(world, outer * rows_inner)
        ordered = gradients if self._plain else self._with_gaps(gradients)
        if self._has_columns:
            chunk_cat(ordered, world, packed.view(world, -1))
        else:
            runs = packed.split([run.numel() for run in ordered])
            torch._foreach_copy_(list(runs), [run.reshape(-1) for run in ordered])

    def _with_gaps(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        key = (gradients[0].dtype, gradients[0].device)
        gaps = self._gaps.get(key)
        if gaps is None:
            gaps = [
                torch.zeros(width, dtype=key[0], device=key[1])
                for param, width in self._order
                if param is None
            ]
            self._gaps[key] = gaps
        spare = iter(gaps)
        return [next(spare) if param is None else gradients[param] for param, _ in self._order]

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's part of every parameter as a view of ``shard`` (S,)."""
        return [shard.narrow(0, start, n).view(shape) for start, n, shape in self._pieces]
