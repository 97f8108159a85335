"""Runs of elements that go from rank to rank, as columns of integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp.reshard.runs import EMPTY, Integers, Stretches


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Runs of elements that go from one rank to another, one per row of equal columns.

    Attributes:
        tensor: number of the tensor in the plan.
        start: of the run, as the target enumerates the tensor.
        numel: elements.
        source_rank: who has it.
        source_offset: where, in what that rank holds of the tensor.
        target_rank: who needs it.
        target_offset: where, in what that rank will hold of the tensor.
    """

    tensor: Integers
    start: Integers
    numel: Integers
    source_rank: Integers
    source_offset: Integers
    target_rank: Integers
    target_offset: Integers

    def __len__(self) -> int:
        return int(self.numel.size)

    def columns(self) -> tuple[Integers, ...]:
        """Return the columns in the order in which they are declared."""
        return (
            self.tensor,
            self.start,
            self.numel,
            self.source_rank,
            self.source_offset,
            self.target_rank,
            self.target_offset,
        )

    def chosen(self, rows: np.typing.NDArray[np.bool_] | Integers) -> Moves:
        """Return some of the rows."""
        return Moves.of(*(column[rows] for column in self.columns()))

    def window(self, start: int, stop: int) -> Moves:
        """Return the parts of the moves that lie in [start, stop) of their tensors."""
        first = np.maximum(self.start, start)
        numel = np.minimum(self.start + self.numel, stop) - first
        skipped = first - self.start
        clipped = Moves(
            tensor=self.tensor,
            start=first,
            numel=numel,
            source_rank=self.source_rank,
            source_offset=self.source_offset + skipped,
            target_rank=self.target_rank,
            target_offset=self.target_offset + skipped,
        )
        return clipped.chosen(numel > 0)

    @classmethod
    def of(cls, *columns: Integers) -> Moves:
        """Make them of columns in the order in which they are declared."""
        names = cls.__dataclass_fields__
        return cls(**dict(zip(names, columns, strict=True)))

    @classmethod
    def together(cls, parts: Sequence[Moves]) -> Moves:
        """Put several into one, in order."""
        if not parts:
            return cls.of(*[EMPTY] * 7)
        return cls.of(
            *(
                np.concatenate(columns)
                for columns in zip(*(p.columns() for p in parts), strict=True)
            )
        )


def moves_of(
    tensor: int,
    numel: Integers,
    source: Stretches,
    source_rank: Integers | int,
    target: Stretches,
    target_rank: Integers | int,
) -> Moves:
    """Make the columns of moves of one tensor, in the order of ``numel``."""
    like = np.zeros_like(numel)
    return Moves(
        tensor=like + tensor,
        start=target.start,
        numel=numel,
        source_rank=like + source_rank,
        source_offset=source.offset,
        target_rank=like + target_rank,
        target_offset=target.offset,
    )
