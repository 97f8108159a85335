"""Runs of a flattened tensor as boxes of the tensor itself. Integers only.

Files of checkpoints are indexed by boxes: offsets and sizes in every dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp.engine.layout import Cut, Extent
from fsdp.reshard.dealt import Dealt
from fsdp.reshard.nested import Boxes
from fsdp.reshard.runs import Runs


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a tensor, and where its elements lie in what a shard holds of the tensor.

    Attributes:
        offsets: of the box in the tensor.
        sizes: of the box.
        start: of its first element in what the shard holds.
        order: of dims in which its elements lie there, outermost first; None: as they are.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    order: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    @property
    def stored(self) -> tuple[int, ...]:
        """Its sizes in the order in which the elements lie."""
        if self.order is None:
            return self.sizes
        return tuple(self.sizes[dim] for dim in self.order)

    @property
    def inverse(self) -> tuple[int, ...]:
        """The permutation from the order in which the elements lie to that of the tensor."""
        if self.order is None:
            return tuple(range(len(self.sizes)))
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


def boxes_of(dealt: Dealt, shard: int | None) -> list[Box]:
    """Return the boxes that make up what a shard holds, in the order of its elements.

    A cut of one dim, or of several one after another, is one box; a run of elements is at most two
    per dim. A tensor without elements is one empty box of the first shard.
    """
    if shard is None:
        return []
    if math.prod(dealt.shape) == 0:
        empty = Box(offsets=(0,) * len(dealt.shape), sizes=dealt.shape, start=0)
        return [empty] if shard == 0 else []
    cut, order = dealt.cut, dealt.order
    if isinstance(cut, Boxes):
        box = shard // cut.inner_shards
        first, shape = cut.window(box)
        held = cut.runs_in(box)
        found = held.chosen(held.shard == shard)
    elif cut.extent != Extent.flat(cut.extent.numel):
        return _window(dealt.shape, cut, shard)
    else:
        runs = Runs(cut)
        found = runs.at(runs.of_shard(shard))
        shape = dealt.shape if order is None else tuple(dealt.shape[dim] for dim in order)
        first = (0,) * len(shape)
    boxes = []
    for start, stop, offset in zip(
        found.start.tolist(), found.stop.tolist(), found.offset.tolist(), strict=True
    ):
        at = offset
        for offsets, sizes in cut_run(shape, start, stop):
            place = tuple(a + b for a, b in zip(first, offsets, strict=True))
            boxes.append(_in_place(place, sizes, at, order))
            at += math.prod(sizes)
    return boxes


def _window(shape: tuple[int, ...], cut: Cut, shard: int) -> list[Box]:
    """Return the box of a cut of one dim."""
    dim = next(d for d in range(len(shape)) if Extent.of(shape, d) == cut.extent)
    start, stop = cut.rows(shard)
    if start == stop:
        return []
    offsets = tuple(start if each == dim else 0 for each in range(len(shape)))
    sizes = (*shape[:dim], stop - start, *shape[dim + 1 :])
    return [Box(offsets=offsets, sizes=sizes, start=0)]


def _in_place(
    offsets: tuple[int, ...], sizes: tuple[int, ...], start: int, order: tuple[int, ...] | None
) -> Box:
    if order is None:
        return Box(offsets=offsets, sizes=sizes, start=start)
    back = [order.index(dim) for dim in range(len(order))]
    return Box(
        offsets=tuple(offsets[i] for i in back),
        sizes=tuple(sizes[i] for i in back),
        start=start,
        order=order,
    )


def cut_run(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes whose elements are [start, stop), in their order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    row, skipped = divmod(start, inner)
    if skipped or stop - start < inner:
        end = min(stop, (row + 1) * inner)
        for offsets, sizes in cut_run(shape[1:], skipped, end - row * inner):
            yield (row, *offsets), (1, *sizes)
        yield from cut_run(shape, end, stop)
        return
    rows = (stop - start) // inner
    yield (row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
    yield from cut_run(shape, start + rows * inner, stop)
