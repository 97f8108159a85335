"""How a tensor is dealt out over ranks: a cut, and who holds its shards. Integers only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fsdp.engine.layout import Cut, Extent, end_to_end, side_by_side
from fsdp.reshard.nested import Boxes, NestedRuns
from fsdp.reshard.runs import Integers, Overlaps, Runs, Stretches, overlaps, whole_cut


class Ranks:
    """Which ranks of a job hold which shards.

    Args:
        ranks: one row per replica, one rank per shard in each; no rank twice.

    Raises:
        ValueError: rows of different lengths, none at all, or a rank twice.
    """

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self.table: Integers = np.array(ranks, np.int64)  # (replicas, shards)
        if self.table.ndim != 2 or not self.table.size:
            raise ValueError(f"ranks must be rows of equal length, one per replica, got {ranks}")
        if len(set(self.table.ravel().tolist())) != self.table.size:
            raise ValueError(f"a rank can hold one shard of a tensor, got {ranks}")

    @classmethod
    def whole(cls, ranks: Sequence[int]) -> Ranks:
        """Return that each of ``ranks`` holds everything."""
        return cls([[rank] for rank in ranks])

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return int(self.table.shape[1])

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return int(self.table.shape[0])

    @cached_property
    def _shards_of(self) -> dict[int, int]:
        return {int(rank): i % self.shards for i, rank in enumerate(self.table.ravel())}

    def shard_of(self, rank: int) -> int | None:
        """Return which shard ``rank`` holds; None if none."""
        return self._shards_of.get(rank)

    def nearest(self, rank: int, host_size: int) -> Integers:
        """Return for each shard from which of its holders ``rank`` takes it, (shards,).

        From itself, else from its own host, else from replicas in turn, so that no replica
        serves all.
        """
        other = self.table != rank
        far = self.table // host_size != rank // host_size
        turn = (np.arange(self.replicas)[:, None] - rank) % self.replicas
        best = np.argmin((other * 2 + far) * self.replicas + turn, axis=0)
        found: Integers = self.table[best, np.arange(self.shards)]
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Dealt:
    """How one tensor is dealt out.

    Attributes:
        shape: of the whole tensor.
        cut: which elements each shard holds; cut twice where tensor parallelism is beside.
        ranks: who holds the shards.
        order: in which the elements are enumerated: the dims of the tensor from the outermost to
            the innermost; None: as they are.
    """

    shape: tuple[int, ...]
    cut: Cut | Boxes
    ranks: Ranks
    order: tuple[int, ...] | None = None

    @cached_property
    def runs(self) -> Runs | NestedRuns:
        """The runs of ``cut``."""
        return NestedRuns(self.cut) if isinstance(self.cut, Boxes) else Runs(self.cut)

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of what is cut last: of the first box, or of the whole tensor."""
        if not isinstance(self.cut, Boxes):
            return self.shape
        _, sizes = self.cut.window(0)
        if self.order is None:
            return sizes
        return tuple(sizes[self.order.index(dim)] for dim in range(len(sizes)))

    def held(self, shard: int) -> int:
        """Return how many elements a shard holds."""
        return int(self.runs.held(self.ranks.shards)[shard])


def whole(shape: Sequence[int], ranks: Ranks) -> Dealt:
    """Return that each of ``ranks`` holds all of a tensor."""
    return Dealt(shape=tuple(shape), cut=whole_cut(math.prod(shape)), ranks=ranks)


def by_dim(shape: Sequence[int], ranks: Ranks, dim: int = 0) -> Dealt:
    """Return that a tensor is cut on one dim, as ``torch.chunk`` does."""
    (cut,) = side_by_side([Extent.of(shape, dim)], ranks.shards).cuts
    return Dealt(shape=tuple(shape), cut=cut, ranks=ranks)


def flat(shapes: Mapping[str, Sequence[int]], ranks: Ranks, *, align: int = 1) -> dict[str, Dealt]:
    """Return that tensors lie end to end, and that the whole is cut into equal runs."""
    extents = [Extent.flat(math.prod(shape)) for shape in shapes.values()]
    layout = end_to_end(extents, ranks.shards, align=align)
    return {
        name: Dealt(shape=tuple(shape), cut=cut, ranks=ranks)
        for (name, shape), cut in zip(shapes.items(), layout.cuts, strict=True)
    }


def common(one: Dealt, other: Dealt, numbers: Integers) -> Overlaps:
    """Cut some runs of ``one`` where those of ``other`` begin and end."""
    runs = one.runs.at(numbers)
    if one.order == other.order or not runs.start.size:
        return overlaps(runs, runs.start, other.runs)
    runs, seen = _reordered(runs, one, other)
    return overlaps(runs, seen, other.runs)


def _reordered(runs: Stretches, one: Dealt, other: Dealt) -> tuple[Stretches, Integers]:
    """Cut runs into what is consecutive for both sides, though they enumerate in other orders.

    *Memory*: some integers for every element of the runs.
    """
    lengths = runs.stop - runs.start
    ends = np.cumsum(lengths)
    which = np.repeat(np.arange(lengths.size), lengths)
    within = np.arange(ends[-1]) - (ends - lengths)[which]
    units = runs.start[which] + within
    seen = _enumerated(_logical(units, one), other)
    breaks = (np.diff(seen) != 1) | (np.diff(which) != 0)
    first = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(breaks) + 1])
    numel = np.diff(np.append(first, seen.size))
    cut = Stretches(
        start=units[first],
        stop=units[first] + numel,
        shard=runs.shard[which[first]],
        offset=(runs.offset[which] + within)[first],
    )
    return cut, seen[first]


def _logical(units: Integers, dealt: Dealt) -> Integers:
    """Return the row-major indices of elements that ``dealt`` enumerates as ``units``."""
    if dealt.order is None:
        return units
    indices = np.unravel_index(units, [dealt.shape[dim] for dim in dealt.order])
    by_dim = [indices[dealt.order.index(dim)] for dim in range(len(dealt.shape))]
    return np.ravel_multi_index(by_dim, dealt.shape).astype(np.int64)


def _enumerated(indices: Integers, dealt: Dealt) -> Integers:
    """Return which units of ``dealt`` the elements with these row-major indices are."""
    if dealt.order is None:
        return indices
    by_dim = np.unravel_index(indices, dealt.shape)
    shape = [dealt.shape[dim] for dim in dealt.order]
    return np.ravel_multi_index([by_dim[dim] for dim in dealt.order], shape).astype(np.int64)
