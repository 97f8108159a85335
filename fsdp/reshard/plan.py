"""Who holds which units of which tensor, who needs them, and who sends what to whom.

Integers only: no tensors, no processes, no faces. A tensor is dealt out by a cut over shards, and
the shards lie on ranks, several times if there are replicas; whole on every rank is one shard with
many replicas. Nothing is computed before it is asked for, so a rank of a large job pays for its
own part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from fsdp.reshard.dealt import Dealt, Ranks, common
from fsdp.reshard.moves import Moves, moves_of
from fsdp.reshard.runs import Integers


class Plan:
    """What has to move from tensors dealt out in one way to the same tensors in another.

    Args:
        source: how each tensor is dealt out now.
        target: how it is wanted; the same names and shapes, in any order.
        host_size: how many ranks, from rank 0 on, share a host. Replicas on the host of the rank
            that needs them are preferred.

    Raises:
        ValueError: other names or shapes; names the first.
    """

    def __init__(
        self, source: Mapping[str, Dealt], target: Mapping[str, Dealt], *, host_size: int = 1
    ) -> None:
        check_alike(source, target)
        self.names = tuple(source)
        self.source = tuple(source.values())
        self.target = tuple(target[name] for name in source)
        self._host_size = host_size
        self._taken: dict[tuple[Ranks, int], Integers] = {}
        self._all_taken: dict[tuple[Ranks, Ranks], Integers] = {}
        self._served: dict[tuple[Ranks, Ranks, int], list[Integers]] = {}

    def receives(self, rank: int) -> Moves:
        """Return what ``rank`` needs, from itself too, by tensor and then by target offset."""
        found = []
        for number, (source, target) in enumerate(zip(self.source, self.target, strict=True)):
            shard = target.ranks.shard_of(rank)
            if shard is None:
                continue
            numbers = target.runs.of_shard(shard)
            if numbers.size:
                shared = common(target, source, numbers)
                taken = self._takes(source.ranks, rank)[shared.theirs.shard]
                found.append(
                    moves_of(number, shared.numel, shared.theirs, taken, shared.mine, rank)
                )
        return Moves.together(found)

    def sends(self, rank: int) -> Moves:
        """Return what others and ``rank`` itself need of it, by tensor, then as they receive it."""
        found = []
        for number, (source, target) in enumerate(zip(self.source, self.target, strict=True)):
            shard = source.ranks.shard_of(rank)
            if shard is None:
                continue
            numbers = source.runs.of_shard(shard)
            if not numbers.size:
                continue
            shared = common(source, target, numbers)
            for takers in self._serves(source.ranks, target.ranks, rank):
                # (shards,) of one replica of the target: the rank if it takes from us, else -1
                to = takers[shared.theirs.shard]
                moves = moves_of(number, shared.numel, shared.mine, rank, shared.theirs, to)
                found.append(moves.chosen(to >= 0))
        moves = Moves.together(found)
        return moves.chosen(np.lexsort((moves.target_offset, moves.target_rank, moves.tensor)))

    def all_moves(self) -> Iterator[Moves]:
        """Yield all moves of all ranks, one tensor after the other."""
        for number, (source, target) in enumerate(zip(self.source, self.target, strict=True)):
            shared = common(target, source, target.runs.all())
            parts = []
            for replica, row in enumerate(target.ranks.table):
                needs = row[shared.mine.shard]
                choices = self._all_takes(source.ranks, target.ranks)[replica]
                taken = choices[shared.mine.shard, shared.theirs.shard]
                parts.append(
                    moves_of(number, shared.numel, shared.theirs, taken, shared.mine, needs)
                )
            yield Moves.together(parts)

    @cached_property
    def world(self) -> int:
        """One more than the highest rank that has or needs anything."""
        sides = {dealt.ranks for dealt in (*self.source, *self.target)}
        return 1 + max((int(ranks.table.max()) for ranks in sides), default=-1)

    def _takes(self, source: Ranks, rank: int) -> Integers:
        """Return from whom ``rank`` takes each shard of ``source``."""
        key = (source, rank)
        if key not in self._taken:
            self._taken[key] = source.nearest(rank, self._host_size)
        return self._taken[key]

    def _all_takes(self, source: Ranks, target: Ranks) -> Integers:
        """Return from whom each holder takes each shard, (replicas, shards, source shards)."""
        key = (source, target)
        if key not in self._all_taken:
            taken = [source.nearest(int(rank), self._host_size) for rank in target.table.ravel()]
            self._all_taken[key] = np.stack(taken).reshape(*target.table.shape, -1)
        return self._all_taken[key]

    def _serves(self, source: Ranks, target: Ranks, rank: int) -> list[Integers]:
        """Return for each replica of ``target`` who of it takes the shard of ``rank`` from it."""
        key = (source, target, rank)
        if key not in self._served:
            shard = source.shard_of(rank)
            self._served[key] = [
                np.array(
                    [each if self._takes(source, int(each))[shard] == rank else -1 for each in row],
                    np.int64,
                )
                for row in target.table
            ]
        return self._served[key]


def check_alike(source: Mapping[str, Dealt], target: Mapping[str, Dealt]) -> None:
    """Refuse two sets of tensors that are not the same tensors.

    Raises:
        ValueError: other names or shapes; names the first.
    """
    for name, one in source.items():
        other = target.get(name)
        if other is None:
            raise ValueError(
                f"'{name}' is in the source and not in the target, which has {len(target)} "
                "tensors. Build the same model on both sides."
            )
        if tuple(one.shape) != tuple(other.shape):
            raise ValueError(
                f"'{name}' has shape {tuple(one.shape)} in the source and {tuple(other.shape)} in "
                "the target. Build the same model on both sides."
            )
    for name in target:
        if name not in source:
            raise ValueError(
                f"'{name}' is in the target and not in the source, which has {len(source)} "
                "tensors. Build the same model on both sides."
            )
