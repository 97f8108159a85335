"""How whole gradients become one packed tensor, and what a reduced shard holds of each parameter.

Everything that can be known before there are gradients is: sizes, order, views of the memory that
is packed into. No communication. Legend: ``W`` ranks of the group, ``S`` elements of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp.engine import collectives
from fsdp.engine.buffer import Buffer
from fsdp.engine.layout import Layout
from fsdp.engine.param import FSDPParam
from fsdp.engine.torch_private import chunk_cat


class Packed:
    """Packed gradients, (W * S,), in memory that was lent for one reduction or belongs to nobody.

    Attributes:
        data: the gradients of rank 0, then those of rank 1, and so on.
        by_rank: the same memory as (W, S).
        own: this rank's row of it, (S,).
        buffer: what the plan has lent; None if the memory is somebody else's.
        runs: views of it in the shapes of what was packed last.
        shapes: those shapes.
    """

    __slots__ = ("buffer", "by_rank", "data", "own", "runs", "shapes")

    def __init__(
        self, data: torch.Tensor, world: int, rank: int, buffer: Buffer | None = None
    ) -> None:
        self.data = data
        self.by_rank = data.view(world, data.numel() // world)
        self.own = self.by_rank[rank]
        self.buffer = buffer
        self.runs: list[torch.Tensor] = []
        self.shapes: list[torch.Size] = []


class ReducePlan:
    """How the gradients of some parameters of a group become one reduced shard.

    ``layout`` counts elements and holds exactly ``params``, in order.

    Attributes:
        ends: by stream, the event at the end of the last reduction. Moved on by the next one: who
            still has to wait for the earlier place waits for more of the same stream.
    """

    def __init__(self, params: Sequence[FSDPParam], layout: Layout, rank: int) -> None:
        self.params = tuple(params)
        self.layout = layout
        self.ends: dict[Any, Any] = {}
        self._rank = rank
        self._pieces = tuple(
            (tuple(shape), _strides(shape), piece.offset)
            for param, piece in (
                (param, layout.piece(index, rank)) for index, param in enumerate(params)
            )
            for shape in [param.local_shape(piece.stop - piece.start)]
        )
        self._has_columns = layout.has_columns
        # A parameter without elements may have units, which are a gap like any other.
        self._order = [
            (param if param is not None and layout.cuts[param].extent.numel else None, units)
            for param, units in layout.packing_order
            if units
        ]
        self._within = {
            param: (outer, rows_inner)
            for _, param, outer, rows_inner in (
                collectives.cuts_within(layout) if layout.world > 1 and layout.has_columns else ()
            )
        }
        # Where any element may be a border, the rows of a gradient say nothing.
        self._runs = [index for index, param in enumerate(params) if param.dim is None]
        self._plain = [param for param, _ in self._order] == list(range(len(params)))
        self._even = (
            self._has_columns
            and layout.total_numel <= collectives.LIGHT
            and all(
                cut.step * layout.world == cut.extent.dim for cut in layout.cuts if cut.extent.numel
            )
        )  # else gradients need padding, or there is time
        self._gaps: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._spare: dict[tuple[torch.dtype, torch.device], Packed] = {}

    # Memory

    def borrow(self, dtype: torch.dtype, device: torch.device) -> Packed:
        """Return memory to pack into, on the current stream, until ``give_back``."""
        packed = self._spare.pop((dtype, device), None)
        if packed is None or packed.buffer is None:
            buffer = Buffer(self.layout.total_numel, dtype, device)
            return Packed(buffer.data, self.layout.world, self._rank, buffer)
        packed.buffer.allocate()
        return packed

    def around(self, data: torch.Tensor) -> Packed:
        """Return memory to pack into that belongs to nobody, or to a user; ``data`` is (W * S,)."""
        return Packed(data, self.layout.world, self._rank)

    def give_back(self, packed: Packed) -> None:
        """Free ``packed`` if it was borrowed, and keep its views for the next reduction."""
        if packed.buffer is not None:
            packed.buffer.free()
            self._spare[packed.data.dtype, packed.data.device] = packed

    # Packing

    def pack(self, gradients: list[torch.Tensor], packed: Packed) -> None:
        """Lay whole ``gradients`` into ``packed``, cast; the rest becomes zero."""
        for index, (outer, rows_inner) in self._within.items():
            world = self.layout.world
            ranks = gradients[index].reshape(outer, world, rows_inner).transpose(0, 1)
            gradients[index] = ranks.reshape(world, outer * rows_inner)
        if not self._has_columns:
            self._pack_runs(gradients if self._plain else self._with_gaps(gradients), packed)
            return
        if not self._even or gradients[0].dtype != packed.data.dtype:
            for index in self._runs:
                gradients[index] = gradients[index].reshape(-1)
            chunk_cat(self._with_gaps(gradients), self.layout.world, packed.by_rank)
            return
        # Takes what it needs as arguments of the kernel; the other operator, which pads and casts,
        # copies a table of them to the device first, through page-locked memory.
        torch.cat(self._by_rank(gradients), dim=1, out=packed.by_rank)

    def _by_rank(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return every gradient and gap as (W, n)."""
        ordered, world = self._with_gaps(gradients), self.layout.world
        # A view costs half of asking for one or, where that cannot be, a copy; and a shape given
        # as one tuple costs half as much again.
        return [g.view(world, -1) if g.is_contiguous() else g.reshape(world, -1) for g in ordered]

    def _pack_runs(self, ordered: list[torch.Tensor], packed: Packed) -> None:
        """Lay gradients and gaps end to end; each has its own place, in its own shape."""
        shapes = [gradient.shape for gradient in ordered]
        if shapes != packed.shapes:
            runs = packed.data.split([shape.numel() for shape in shapes])
            packed.runs = [run.view(shape) for run, shape in zip(runs, shapes, strict=True)]
            packed.shapes = shapes
        torch._foreach_copy_(packed.runs, ordered)

    def _with_gaps(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``gradients`` in the order in which they are packed, zeros for what is between."""
        if self._plain:
            return gradients
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

    # The reduced shard

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's part of every parameter as a view of ``shard`` (S,)."""
        shard = shard.contiguous()  # a user's reduction may have put other memory behind it
        start = shard.storage_offset()
        return [
            shard.as_strided(shape, stride, start + offset)
            for shape, stride, offset in self._pieces
        ]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``, as torch counts them."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))
