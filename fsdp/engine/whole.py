"""The whole parameters of a group: one buffer, its autograd leaves, and what fills it.

Made when a group is first gathered and again whenever its parameters have changed. Knows how to
gather and how to keep a part; when to do so is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp.api import AllGather
from fsdp.engine.buffer import Buffer, param_view
from fsdp.engine.collectives import Gathering, GatherPlan
from fsdp.engine.extension import ExtendedGathering, ExtendedParams
from fsdp.engine.group_options import GroupOptions
from fsdp.engine.layout import Layout
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.optimizer_guard import refuse_in_optimizers
from fsdp.engine.schedule import FSDPCommContext
from fsdp.engine.shard import Shard


class WholeParams:
    """The buffer behind a group's leaves, and the plans that fill it."""

    def __init__(self, shard: Shard, info: DataParallelMeshInfo, options: GroupOptions) -> None:
        self._shard = shard
        self._info = info
        self._exposure = options.exposure
        self._device = options.device
        dtypes = [param.compute_dtype for param in shard.plain]
        layout, unit = shard.lay_out(dtypes, info.shard_size)
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = Buffer(layout.total_numel, unit, options.device)
            self._make_leaves(layout)
            self._plan = self._plan_for(layout)
        # Its first memory may be that of a tensor which kernels given before have yet to write;
        # a side stream does not wait for those, and would fill the buffer before them.
        self._buffer.free()
        self._recast: Callable[[torch.Tensor], torch.Tensor] | None = None
        if shard.data.dtype is torch.uint8 and (layout, unit) != (shard.layout, torch.uint8):
            self._recast = self._recast_mixed
        self._smaller: tuple[DataParallelMeshInfo, GatherPlan] | None = None
        self._sent: torch.Tensor | None = None  # what an extended gather in flight took
        self._extended: ExtendedParams | None = None
        if shard.extended:
            self._extended = ExtendedParams(
                shard.extended, options.exposure, info, options.device, options.mp_policy
            )

    def _make_leaves(self, layout: Layout) -> None:
        for param, start in zip(self._shard.plain, layout.unsharded_offsets, strict=True):
            whole = param_view(self._buffer.data, start, param, param.compute_dtype)
            # ``.data`` has a version counter of its own: refilling the buffer leaves the
            # counters alone that autograd compares with those of saved tensors.
            param.unsharded = self._exposure.leaf(param, whole.data)
            refuse_in_optimizers(param.unsharded, param.name, "were whole when it was made")

    def _plan_for(self, layout: Layout) -> GatherPlan:
        info, world = self._info, self._info.shard_size
        blocks = (
            []
            if layout.is_view
            else [(world * column.offset, column.width) for column in layout.columns]
        )
        return GatherPlan(
            layout,
            info.shard_rank,
            info.shard_group if world > 1 else None,
            self._buffer,
            blocks=blocks,
            in_place=layout.is_view,
        )

    def _recast_mixed(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a shard of bytes with every piece in its compute dtype."""
        layout, rank = self._plan.layout, self._info.shard_rank
        recast = torch.zeros(layout.shard_numel, dtype=self._buffer.data.dtype, device=self._device)
        for index, param in enumerate(self._shard.plain):
            piece = layout.piece(index, rank)
            rows = piece.stop - piece.start
            target = param_view(recast, piece.offset, param, param.compute_dtype, rows)
            source = self._shard.layout.piece(index, rank)
            target.copy_(param_view(shard, source.offset, param, param.dtype, rows))
        return recast

    def gather(
        self,
        comm: FSDPCommContext,
        *,
        sided: bool,
        async_op: bool,
        custom: AllGather | None,
        kept: torch.Tensor | None = None,
    ) -> Gathering | ExtendedGathering:
        """Start to gather from the shard, or from ``kept``, which ``keep_part`` returned.

        *Collective* over the shard group, or the smaller one. *Memory*: the whole parameters, and
        until they are copied out the gathered shards. *Blocks*: nothing.
        """
        plan, shard, recast = self._plan, self._shard.data, self._recast
        if kept is not None:
            assert self._smaller is not None
            plan, shard, recast = self._smaller[1], kept, None
        if self._extended is not None:
            if recast is not None:
                shard = recast(shard)
            self._sent = shard.to(device=self._device, dtype=self._buffer.data.dtype)
            return self._extended.start(self._sent, comm.streams, async_op=async_op)
        comm.reclaim(plan)
        return plan.start(
            shard, comm.streams, sided=sided, async_op=async_op, comm=custom, recast=recast
        )

    def finish(
        self, gathering: Gathering | ExtendedGathering, comm: FSDPCommContext, *, forward: bool
    ) -> None:
        """Wait for ``gathering`` and copy it out; ``forward``: let the next one overlap.

        *Blocks* the current stream until the gather is over (the host, without streams).
        """
        if isinstance(gathering, Gathering):
            gathering.plan.finish(gathering)
            comm.after_copy_out(gathering, overlap=forward and gathering.sided)
            return
        assert self._extended is not None
        assert self._sent is not None
        with torch.inference_mode(False), torch.no_grad():
            self._extended.finish(gathering, self._sent, self._plan.copy_out)
        self._sent = None

    def drop(
        self, gathering: Gathering | ExtendedGathering, comm: FSDPCommContext, *, in_use: bool
    ) -> None:
        """Wait for a gather that nobody asked to see; ``in_use``: its target is read all the same.

        *Blocks* the current stream until the gather is over (the host, without streams).
        """
        if gathering.done is not None:
            gathering.done.wait()
        if isinstance(gathering, Gathering):
            gathering.release()
            if gathering.plan.in_place and not in_use:
                comm.free(self._buffer, gathered_in_place=True)

    def free(self, comm: FSDPCommContext) -> None:
        """Free the whole parameters after the kernels given so far; leaves stay the same."""
        if self._extended is not None:
            self._extended.free()
            self._buffer.free()
            return
        in_place = self._plan.in_place and self._plan.group is not None
        comm.free(self._buffer, gathered_in_place=in_place)

    def keep_part(
        self, info: DataParallelMeshInfo, name: str
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy this rank's part over the smaller mesh ``info``: (S of it,), and its pieces.

        Raises:
            NotImplementedError: parameters with extensions, or a layout that is not column-wise.
        """
        if self._extended is not None:
            raise NotImplementedError(
                f"Resharding '{name}' to a smaller mesh is not supported for parameters with "
                "all-gather extensions yet"
            )
        starts = self._plan.layout.unsharded_offsets
        parts = []
        with torch.inference_mode(False), torch.no_grad():
            layout = self._smaller_plan(info).layout
            kept = torch.zeros(
                layout.shard_numel, dtype=self._buffer.data.dtype, device=self._device
            )
            for index, param in enumerate(self._shard.plain):
                piece, dtype = layout.piece(index, info.shard_rank), param.compute_dtype
                rows = piece.stop - piece.start
                whole = param_view(self._buffer.data, starts[index], param, dtype)
                part = param_view(kept, piece.offset, param, dtype, rows)
                part.copy_(param.cut_view(whole, piece.start, rows))
                parts.append(part)
        return kept, parts

    def _smaller_plan(self, info: DataParallelMeshInfo) -> GatherPlan:
        if self._smaller is not None and self._smaller[0] is info:
            return self._smaller[1]
        dtypes = [param.compute_dtype for param in self._shard.plain]
        layout, _ = self._shard.lay_out(dtypes, info.shard_size)
        if not layout.has_columns or any(param.dim is None for param in self._shard.plain):
            raise NotImplementedError(
                "resharding to a smaller mesh needs a layout that cuts each parameter by itself"
            )
        starts = self._plan.layout.unsharded_offsets
        # A gap has no place among the whole parameters: nobody reads its units.
        blocks = [
            (starts[column.param] if column.param is not None else None, column.width)
            for column in layout.columns
        ]
        plan = GatherPlan(
            layout, info.shard_rank, info.shard_group, self._buffer, blocks=blocks, in_place=False
        )
        self._smaller = (info, plan)
        return plan
