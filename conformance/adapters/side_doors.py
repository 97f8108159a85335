"""Pieces of full tensors: gathered from all ranks of a group, put together by position alone.

Adapters of wrappers that cut or distribute tensors build their side doors on this. Knows elements,
positions and one object collective; no wrapper, no state dict, nothing of what it is used to judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """A run of elements of one tensor.

    Attributes:
        first: position of the first of them in the tensor's own flat order.
        values: (count,), on CPU.
    """

    first: int
    values: Tensor


def gathered(own: T, group: dist.ProcessGroup | None) -> list[T]:
    """What every rank of `group` passed, by rank; without a group, the own value alone.

    Collective: one object all-gather on `group`, none without it.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [own]
    received: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(received, own, group=group)
    return [value for value in received if value is not None]


def joined(pieces: Iterable[Piece], numel: int, name: str) -> Tensor:
    """The flat tensor, (numel,), that the pieces make up.

    Raises:
        RuntimeError: the pieces leave a gap, overlap, or reach beyond the end.
    """
    parts = sorted((p for p in pieces if p.values.numel()), key=lambda piece: piece.first)
    end = 0
    for part in parts:
        if part.first != end:
            raise RuntimeError(
                f"{name}: the ranks' pieces do not make up the tensor; a piece starts at element"
                f" {part.first}, wanted {end}"
            )
        end += part.values.numel()
    if end != numel:
        raise RuntimeError(f"{name}: the ranks hold {end} elements of {numel}")
    return torch.cat([part.values for part in parts]) if parts else torch.empty(0)


def shaped(flat: Tensor, shape: Sequence[int], stride: Sequence[int] | None) -> Tensor:
    """`flat`, (numel,), as a contiguous tensor of `shape`.

    Args:
        flat: elements in the order of storage.
        shape: of the result.
        stride: of the tensor that was flattened, if its storage was not in index order.
    """
    if stride is None:
        return flat.reshape(tuple(shape))
    return flat.as_strided(tuple(shape), tuple(stride)).contiguous()


def merged(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Entries of all ranks in one mapping; on a clash the lowest rank's entry stands."""
    whole: dict[str, T] = {}
    for part in parts:
        for key, value in part.items():
            whole.setdefault(key, value)
    return whole
