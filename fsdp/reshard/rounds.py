"""A plan cut into rounds, so that what is in flight stays small. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp.reshard.moves import Moves
from fsdp.reshard.plan import Plan
from fsdp.reshard.runs import Integers

_END = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Round:
    """Tensors [first, last) of a plan, of each the elements [start, stop)."""

    first: int
    last: int
    start: int = 0
    stop: int = _END

    def of(self, moves: Moves) -> Moves:
        """Return what of ``moves`` belongs to this round."""
        inside = (moves.tensor >= self.first) & (moves.tensor < self.last)
        return moves.chosen(inside).window(self.start, self.stop)


def rounds_of(plan: Plan, *, limit: int, sizes: Sequence[int]) -> list[Round]:
    """Cut a plan into rounds in which no rank has to give or gets more than ``limit``.

    Every rank finds the same rounds. A tensor that is larger by itself is moved in several.

    Args:
        plan: what has to move.
        limit: bytes, at least of one element and what travels with it; a rank that serves several
            replicas may send as often as much.
        sizes: bytes that travel with each element of each tensor of the plan.
    """
    found: list[Round] = []
    nothing: Integers = np.zeros((2, plan.world), np.int64)
    first, load = 0, nothing
    for number, size in enumerate(sizes):
        added = _load(plan, number) * size
        if number > first and int(np.max(load + added)) > limit:
            found.append(Round(first=first, last=number))
            first, load = number, nothing
        load = load + added
        if int(added.max()) > limit:
            numel = plan.target[number].runs.numel
            # All of a window may lie on one rank.
            width = max(1, limit // size)
            found += [
                Round(first=number, last=number + 1, start=start, stop=start + width)
                for start in range(0, numel, width)
            ]
            first, load = number + 1, nothing
    if first < len(sizes):
        found.append(Round(first=first, last=len(sizes)))
    return found


def _load(plan: Plan, number: int) -> Integers:
    """Return how many elements of a tensor each rank has and gets, (2, ranks)."""
    sides = (plan.source[number], plan.target[number])
    load: Integers = np.zeros((2, plan.world), np.int64)
    for side, dealt in enumerate(sides):
        load[side, dealt.ranks.table] = dealt.runs.held(dealt.ranks.shards)
    return load
