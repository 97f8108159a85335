"""A tensor that is cut twice: into boxes, and each box into runs. Integers only.

Tensor parallelism cuts a tensor into boxes; a unit cuts the box that it finds once more, by rows or
as a part of a flat parameter. Here the result is what any cut is: runs of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fsdp.engine.layout import Cut
from fsdp.reshard.runs import EMPTY, Integers, Runs, Stretches

_TABLES = 16  # kept at a time: the tensors of a model have few different forms

Window = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes in every dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes:
    """How a tensor is cut into boxes, and how each of them is dealt out.

    Shard ``box * inner_shards + i`` is the i-th of the shards of a box; boxes are counted with the
    first cut outermost.

    Attributes:
        shape: of the tensor, dims in the order in which its elements are enumerated.
        chunks: (dim, parts) of each cut into boxes, one after the other, as ``torch.chunk`` cuts.
        inner: which elements of a box each of its shards holds, boxes being alike; None: a box is
            one shard.
        inner_shards: how many shards a box has.
    """

    shape: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    inner: Cut | None = None
    inner_shards: int = 1

    @property
    def count(self) -> int:
        """How many boxes there are."""
        return math.prod(parts for _, parts in self.chunks)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def window(self, box: int) -> Window:
        """Return where a box lies in the tensor; it may be empty."""
        places: list[int] = []
        for _, parts in reversed(self.chunks):
            box, place = divmod(box, parts)
            places.insert(0, place)
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for (dim, parts), place in zip(self.chunks, places, strict=True):
            step = -(-sizes[dim] // parts)
            start = min(place * step, sizes[dim])
            offsets[dim], sizes[dim] = offsets[dim] + start, min(step, sizes[dim] - start)
        return tuple(offsets), tuple(sizes)

    def runs_in(self, box: int) -> Stretches:
        """Return the runs of a box, as units of the box and with the shards of the tensor."""
        _, sizes = self.window(box)
        first = box * self.inner_shards
        if self.inner is None:
            numel = np.full(min(1, math.prod(sizes)), math.prod(sizes), np.int64)
            zero = np.zeros_like(numel)
            return Stretches(start=zero, stop=numel, shard=zero + first, offset=zero)
        if self.inner.extent.numel != math.prod(sizes):
            raise ValueError(
                f"box {box} of shape {sizes} is dealt out as {self.inner.extent.numel} elements; "
                "boxes that are cut by one rule must be alike"
            )
        inner = Runs(self.inner)
        found = inner.at(inner.all())
        return Stretches(
            start=found.start, stop=found.stop, shard=found.shard + first, offset=found.offset
        )


class NestedRuns:
    """The runs of a tensor that is cut twice; see ``Runs``, whose methods these are.

    They are listed, one row of integers for each: a box that is cut out of the inner dims of a
    tensor has as many as it has rows. Tensors of one form share the list.

    Args:
        boxes: how the tensor is dealt out.
    """

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self.numel = boxes.numel

    def of_shard(self, shard: int) -> Integers:
        """Return the numbers of the runs that ``shard`` holds."""
        return np.flatnonzero(_listed(self._boxes).shard == shard).astype(np.int64)

    def all(self) -> Integers:
        """Return the numbers of all runs."""
        return np.arange(_listed(self._boxes).start.size, dtype=np.int64)

    def at(self, numbers: Integers) -> Stretches:
        """Return the runs of these numbers."""
        return _listed(self._boxes).chosen(numbers)

    def holding(self, units: Integers) -> Integers:
        """Return the numbers of the runs that hold these units of the flattened tensor."""
        found: Integers = np.searchsorted(_listed(self._boxes).start, units, side="right") - 1
        return found

    def held(self, shards: int) -> Integers:
        """Return how many units each of ``shards`` shards holds, (shards,)."""
        found: Integers = np.zeros(shards, np.int64)
        for box in range(self._boxes.count):
            runs = self._boxes.runs_in(box)
            np.add.at(found, runs.shard, runs.stop - runs.start)
        return found


@lru_cache(maxsize=_TABLES)
def _listed(boxes: Boxes) -> Stretches:
    """Return all runs of a tensor, in the order of its units."""
    parts = list(_of_each_box(boxes))
    columns = [
        np.concatenate([EMPTY, *(getattr(part, name) for part in parts)])
        for name in ("start", "stop", "shard", "offset")
    ]
    start, stop, shard, offset = columns
    every = Stretches(start=start, stop=stop, shard=shard, offset=offset)
    return every.chosen(np.argsort(start, kind="stable"))


def _of_each_box(boxes: Boxes) -> Iterator[Stretches]:
    for box in range(boxes.count):
        offsets, sizes = boxes.window(box)
        if math.prod(sizes):
            yield _in_tensor(boxes.runs_in(box), boxes.shape, offsets, sizes)


def _in_tensor(
    runs: Stretches, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Stretches:
    """Return the runs of a box as runs of the tensor, cut where the box has gaps."""
    # The last dim that the box does not fill: what lies below it is without a gap.
    last = max((dim for dim in range(len(shape)) if sizes[dim] != shape[dim]), default=0)
    solid = math.prod(sizes[last:])
    first, end = runs.start // solid, (runs.stop - 1) // solid
    counts = end - first + 1
    which = np.repeat(np.arange(counts.size), counts)
    ends = np.cumsum(counts)
    stretch = np.arange(which.size) - (ends - counts)[which] + first[which]
    start = np.maximum(runs.start[which], stretch * solid)
    stop = np.minimum(runs.stop[which], (stretch + 1) * solid)
    outer = np.zeros_like(stretch)
    if last:
        indices = np.unravel_index(stretch, sizes[:last])
        moved = [index + offset for index, offset in zip(indices, offsets[:last], strict=True)]
        outer = np.ravel_multi_index(moved, shape[:last]).astype(np.int64)
    inner = math.prod(shape[last + 1 :])
    begin = outer * math.prod(shape[last:]) + (offsets[last] * inner if shape else 0)
    begin = begin + start - stretch * solid
    return Stretches(
        start=begin,
        stop=begin + stop - start,
        shard=runs.shard[which],
        offset=runs.offset[which] + start - runs.start[which],
    )
