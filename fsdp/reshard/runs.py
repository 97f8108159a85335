"""Which units of one tensor lie on which shard, asked for many runs at once. Integers only.

A run is a stretch of the flattened tensor that one shard holds without a gap. Runs are numbered in
the order of the tensor's units. Nothing here knows ranks, dtypes or where in a shard's memory a
tensor lies: offsets count from the start of what the shard holds of this tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fsdp.engine.layout import Cut, Extent

Integers = npt.NDArray[np.int64]
EMPTY: Integers = np.empty(0, np.int64)


def whole_cut(numel: int) -> Cut:
    """Return the cut that leaves ``numel`` units in one shard."""
    return Cut(extent=Extent.flat(numel), base=0, first=0, step=max(1, numel))


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """Runs as columns: units [start, stop) on ``shard``, from ``offset`` of what it holds."""

    start: Integers
    stop: Integers
    shard: Integers
    offset: Integers

    def chosen(self, rows: npt.NDArray[np.bool_] | Integers) -> Stretches:
        """Return some of the rows."""
        return Stretches(
            start=self.start[rows],
            stop=self.stop[rows],
            shard=self.shard[rows],
            offset=self.offset[rows],
        )


class Runs:
    """The runs of one cut.

    Args:
        cut: how the tensor is dealt out, in elements.
    """

    def __init__(self, cut: Cut) -> None:
        extent = cut.extent
        self.numel = extent.numel
        if self.numel == 0:
            self._first_shard, self._per_row = 0, 0
        else:
            self._first_shard = cut.owner(0)
            self._per_row = cut.owner(extent.dim - 1) - self._first_shard + 1
        if self._per_row == 1 and extent.outer > 1:
            # One shard holds it all: one run, whatever dim would have been cut.
            flat, whole = Extent.flat(self.numel), self.numel
            cut = replace(cut, extent=flat, first=-self._first_shard * whole, step=whole)
        self._cut = cut
        self.count = cut.extent.outer * self._per_row

    def of_shard(self, shard: int) -> Integers:
        """Return the numbers of the runs that ``shard`` holds."""
        place = shard - self._first_shard
        if not 0 <= place < self._per_row:
            return EMPTY
        return np.arange(self._cut.extent.outer, dtype=np.int64) * self._per_row + place

    def all(self) -> Integers:
        """Return the numbers of all runs."""
        return np.arange(self.count, dtype=np.int64)

    def at(self, numbers: Integers) -> Stretches:
        """Return the runs of these numbers."""
        cut, extent = self._cut, self._cut.extent
        outer, place = np.divmod(numbers, max(1, self._per_row))
        shard = place + self._first_shard
        window = cut.first + shard * cut.step
        first = np.clip(window, 0, extent.dim)
        last = np.clip(window + cut.step, 0, extent.dim)
        row = outer * (extent.dim * extent.inner)
        return Stretches(
            start=row + first * extent.inner,
            stop=row + last * extent.inner,
            shard=shard,
            offset=outer * (last - first) * extent.inner,
        )

    def holding(self, units: Any) -> Integers:
        """Return the numbers of the runs that hold these units of the flattened tensor."""
        cut, extent = self._cut, self._cut.extent
        outer, within = np.divmod(units, extent.dim * extent.inner)
        row = within // extent.inner
        found: Integers = outer * self._per_row + (row - cut.first) // cut.step - self._first_shard
        return found

    def held(self, shards: int) -> Integers:
        """Return how many units each of ``shards`` shards holds, (shards,)."""
        cut, extent = self._cut, self._cut.extent
        window = cut.first + np.arange(shards, dtype=np.int64) * cut.step
        rows = np.clip(window + cut.step, 0, extent.dim) - np.clip(window, 0, extent.dim)
        held: Integers = rows * (extent.outer * extent.inner)
        return held


@dataclass(frozen=True, kw_only=True)
class Overlaps:
    """What runs of one side and of the other have in common, as columns of ``numel`` units."""

    numel: Integers
    mine: Stretches
    theirs: Stretches


class Numbered(Protocol):
    """Runs that are numbered in the order of the units of a tensor; see ``Runs``."""

    def at(self, numbers: Integers) -> Stretches:
        """Return the runs of these numbers."""

    def holding(self, units: Integers) -> Integers:
        """Return the numbers of the runs that hold these units."""


def overlaps(mine: Stretches, seen: Integers, other: Numbered) -> Overlaps:
    """Cut the runs of one side where runs of the other side begin and end.

    Args:
        mine: runs of one side.
        seen: where they start as the other side counts the units of the tensor.
        other: how the other side deals out the same tensor.
    """
    if mine.start.size == 0:
        return Overlaps(numel=EMPTY, mine=mine, theirs=mine)
    end = seen + mine.stop - mine.start
    first, last = other.holding(seen), other.holding(end - 1)
    counts = last - first + 1
    which = np.repeat(np.arange(counts.size), counts)
    ends = np.cumsum(counts)
    theirs = other.at(np.arange(ends[-1]) - (ends - counts)[which] + first[which])
    start = np.maximum(seen[which], theirs.start)
    stop = np.minimum(end[which], theirs.stop)
    skipped = start - seen[which]
    return Overlaps(
        numel=stop - start,
        mine=Stretches(
            start=mine.start[which] + skipped,
            stop=mine.start[which] + skipped + stop - start,
            shard=mine.shard[which],
            offset=mine.offset[which] + skipped,
        ),
        theirs=Stretches(
            start=start,
            stop=stop,
            shard=theirs.shard,
            offset=theirs.offset + start - theirs.start,
        ),
    )
