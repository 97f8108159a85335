"""Where each element of each parameter lives, as integers. No tensors, no processes.

A parameter is seen as (outer, dim, inner): the rows of its middle dim are cut into one window
per rank, and every rank lays its windows into a shard of the same length. Two builders fill the
same value: ``side_by_side`` cuts each parameter by itself, ``end_to_end`` concatenates all of
them, pads, and cuts the whole into equal runs. Nothing that reads a layout asks which it was.

Offsets and lengths count units. A unit is one element, or one byte where a group mixes dtypes
(``Extent.in_bytes``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A parameter seen as (outer, dim, inner), of which the middle dim is cut."""

    outer: int
    dim: int
    inner: int

    @classmethod
    def of(cls, shape: Sequence[int], dim: int) -> Extent:
        """View ``shape`` with ``dim`` in the middle; ``dim`` must be in range and not negative."""
        if not 0 <= dim < len(shape):
            raise ValueError(f"dim {dim} does not exist in shape {tuple(shape)}")
        return cls(outer=math.prod(shape[:dim]), dim=shape[dim], inner=math.prod(shape[dim + 1 :]))

    @classmethod
    def flat(cls, numel: int) -> Extent:
        """View a parameter as one row of ``numel`` units, any of which may be a border."""
        return cls(outer=1, dim=numel, inner=1)

    def in_bytes(self, itemsize: int) -> Extent:
        """Return the same extent with one unit per byte."""
        return Extent(outer=self.outer, dim=self.dim, inner=self.inner * itemsize)

    @property
    def numel(self) -> int:
        """Units of the whole parameter."""
        return self.outer * self.dim * self.inner


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """Rows [start, stop) of a parameter and where they lie in one rank's shard.

    ``param`` is None for units that belong to no parameter (alignment and padding).
    """

    param: int | None
    start: int
    stop: int
    offset: int
    numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """The units [offset, offset + width) of every rank's shard, held by one parameter or none."""

    param: int | None
    offset: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How one parameter is dealt out: rank r's window is [first + r * step, + step) rows.

    The window starts ``base`` units into the shard. Rows outside [0, dim) do not exist.
    """

    extent: Extent
    base: int
    first: int
    step: int

    def rows(self, rank: int) -> tuple[int, int]:
        """Return the rows that ``rank`` holds, as (start, stop); start == stop if none."""
        window = self.first + rank * self.step
        start = min(max(window, 0), self.extent.dim)
        return start, max(start, min(window + self.step, self.extent.dim))

    def offset(self, rank: int) -> int:
        """Return where in ``rank``'s shard its first row lies."""
        start, stop = self.rows(rank)
        if start == stop:
            return self.base
        return self.base + (start - self.first - rank * self.step) * self.extent.inner

    def owner(self, row: int) -> int:
        """Return the rank that holds ``row``."""
        return (row - self.first) // self.step

    @property
    def slot(self) -> int:
        """Units that a full window takes in a shard."""
        return self.extent.outer * self.step * self.extent.inner


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each unit of each parameter lives over ``world`` shards of ``shard_numel`` units."""

    world: int
    shard_numel: int
    cuts: tuple[Cut, ...]

    @property
    def total_numel(self) -> int:
        """Units of all shards together, padding included."""
        return self.world * self.shard_numel

    def piece(self, param: int, rank: int) -> Fragment:
        """Return what ``rank`` holds of ``param``; an empty fragment if nothing."""
        cut = self.cuts[param]
        start, stop = cut.rows(rank)
        numel = cut.extent.outer * (stop - start) * cut.extent.inner
        return Fragment(param=param, start=start, stop=stop, offset=cut.offset(rank), numel=numel)

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """Return ``rank``'s shard from its first unit to its last, gaps included."""
        held = [self.piece(param, rank) for param in range(len(self.cuts))]
        found: list[Fragment] = []
        end = 0
        for piece in sorted((p for p in held if p.numel), key=lambda p: p.offset):
            if piece.offset > end:
                found.append(_gap(end, piece.offset))
            found.append(piece)
            end = piece.offset + piece.numel
        if end < self.shard_numel:
            found.append(_gap(end, self.shard_numel))
        return tuple(found)

    def locate(self, param: int, index: int) -> tuple[int, int]:
        """Return (rank, offset in its shard) of unit ``index`` of the flattened ``param``."""
        cut = self.cuts[param]
        extent = cut.extent
        outer, within = divmod(index, extent.dim * extent.inner)
        row, inner = divmod(within, extent.inner)
        rank = cut.owner(row)
        start, stop = cut.rows(rank)
        local = (outer * (stop - start) + row - start) * extent.inner + inner
        return rank, cut.offset(rank) + local

    def one_run(self, param: int) -> bool:
        """Whether ``param`` is one contiguous run, in order, in the gathered shards."""
        cut = self.cuts[param]
        if cut.extent.numel == 0 or cut.owner(0) == cut.owner(cut.extent.dim - 1):
            return True
        return cut.extent.outer == 1 and cut.step * cut.extent.inner == self.shard_numel

    def gathered_offset(self, param: int) -> int:
        """Return where ``param`` starts in the gathered shards; it must be ``one_run``."""
        cut = self.cuts[param]
        if cut.extent.numel == 0:
            return 0
        rank = cut.owner(0)
        return rank * self.shard_numel + cut.offset(rank)

    @cached_property
    def is_view(self) -> bool:
        """Whether every parameter can be a view of the gathered shards, with no copy."""
        return all(self.one_run(param) for param in range(len(self.cuts)))

    @cached_property
    def unsharded_offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in a buffer of ``total_numel`` units that holds them whole.

        The gathered shards themselves if ``is_view``. Otherwise the columns one after another,
        each a block of ``world * width`` units.
        """
        params = range(len(self.cuts))
        if self.is_view:
            return tuple(self.gathered_offset(param) for param in params)
        return tuple(self.world * self.cuts[param].base for param in params)

    @cached_property
    def has_columns(self) -> bool:
        """Whether every parameter lies at the same offset of every shard, apart from the others."""
        if any(cut.first for cut in self.cuts):
            return False
        try:
            return sum(column.width for column in self.columns) == self.shard_numel
        except ValueError:
            return False

    @cached_property
    def packing_order(self) -> tuple[tuple[int | None, int], ...]:
        """(parameter or gap, units over all shards) in the order in which they are packed.

        With columns, a parameter's units include the padding of its windows.
        """
        if self.has_columns:
            return tuple((column.param, self.world * column.width) for column in self.columns)
        found: list[tuple[int | None, int]] = []
        end = 0
        starts = sorted((self.gathered_offset(i), i) for i in range(len(self.cuts)))
        for start, param in starts:
            if start > end:
                found.append((None, start - end))
            numel = self.cuts[param].extent.numel
            found.append((param, numel))
            end = max(end, start + numel)
        if end < self.total_numel:
            found.append((None, self.total_numel - end))
        return tuple(found)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The shard cut where the same parameters lie on every rank; covers it exactly."""
        found: list[Column] = []
        end = 0
        for param, cut in sorted(enumerate(self.cuts), key=lambda pair: (pair[1].base, pair[0])):
            if cut.base > end:
                found.append(Column(param=None, offset=end, width=cut.base - end))
            if cut.base < end and cut.slot:
                raise ValueError("the windows of this layout overlap: it has no columns")
            found.append(Column(param=param, offset=cut.base, width=cut.slot))
            end = max(end, cut.base + cut.slot)
        if end < self.shard_numel:
            found.append(Column(param=None, offset=end, width=self.shard_numel - end))
        return tuple(found)

    def runs(self, param: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (start, stop, rank, offset) of ``param``'s flattened units, in order of start."""
        extent = self.cuts[param].extent
        if extent.numel == 0:
            return
        row_block = extent.dim * extent.inner
        cut = self.cuts[param]
        ranks = range(cut.owner(0), cut.owner(extent.dim - 1) + 1)
        for outer in range(extent.outer):
            for rank in ranks:
                start, stop = cut.rows(rank)
                width = (stop - start) * extent.inner
                begin = outer * row_block + start * extent.inner
                yield begin, begin + width, rank, cut.offset(rank) + outer * width


def _gap(start: int, stop: int) -> Fragment:
    return Fragment(param=None, start=0, stop=0, offset=start, numel=stop - start)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def side_by_side(extents: Sequence[Extent], world: int, *, align: int = 1) -> Layout:
    """Cut each parameter by itself, as ``torch.chunk`` does, and lay the pieces side by side.

    Every rank reserves a full window for every parameter, so that shards are equal and a
    parameter starts at the same offset on every rank; windows start at multiples of ``align``.
    """
    cuts: list[Cut] = []
    end = 0
    for extent in extents:
        base = _round_up(end, align)
        cut = Cut(extent=extent, base=base, first=0, step=-(-extent.dim // world))
        cuts.append(cut)
        end = base + cut.slot
    # Parameters without elements still have a gap: what is packed and sent is never nothing.
    shard_numel = _round_up(max(end, 1 if cuts else 0), align)
    return Layout(world=world, shard_numel=shard_numel, cuts=tuple(cuts))


def end_to_end(extents: Sequence[Extent], world: int, *, align: int = 1) -> Layout:
    """Concatenate all parameters, pad the tail, and cut the whole into ``world`` equal runs.

    Every parameter starts at a multiple of ``align`` units of the whole. Only the sizes of
    ``extents`` count: a border may be anywhere.
    """
    starts: list[int] = []
    end = 0
    for extent in extents:
        starts.append(_round_up(end, align))
        end = starts[-1] + extent.numel
    # An empty group still has a window, or nobody could say who owns unit 0.
    shard_numel = max(1, -(-end // world))
    cuts = tuple(
        Cut(extent=Extent.flat(extent.numel), base=0, first=-start, step=shard_numel)
        for extent, start in zip(extents, starts, strict=True)
    )
    return Layout(world=world, shard_numel=shard_numel, cuts=cuts)
