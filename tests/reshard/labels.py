"""The slow, obvious way to say who holds what: every element has a label, lists are cut.

Nothing here imports the package under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Labels = dict[int, dict[str, list[int]]]  # rank, tensor: the elements it holds, in order


def enumerated(shape: Sequence[int], order: Sequence[int] | None) -> list[int]:
    """Row-major labels in the order of memory."""
    labels = np.arange(math.prod(shape)).reshape(tuple(shape))
    return list(labels.transpose(order).ravel()) if order is not None else list(labels.ravel())


def whole(name: str, labels: list[int], ranks: Sequence[Sequence[int]]) -> Labels:
    return {rank: {name: labels} for row in ranks for rank in row}


def chunked(name: str, shape: Sequence[int], ranks: Sequence[Sequence[int]], dim: int) -> Labels:
    labels = np.arange(math.prod(shape)).reshape(tuple(shape))
    rows = -(-shape[dim] // len(ranks[0]))
    found: Labels = {}
    for row in ranks:
        for index, rank in enumerate(row):
            start = min(index * rows, shape[dim])
            part = labels.take(range(start, min(start + rows, shape[dim])), axis=dim)
            found[rank] = {name: list(part.ravel())}
    return found


def part(labels: Any, dim: int, parts: int, index: int) -> Any:
    """The part of an array that a cut of one dim into equal steps leaves to one of several."""
    step = -(-labels.shape[dim] // parts)
    start = min(index * step, labels.shape[dim])
    stop = min(start + step, labels.shape[dim])
    return labels.take(range(start, stop), axis=dim)


def box(shape: Sequence[int], dim: int | None, parts: int, index: int) -> Any:
    """The labels of a part of a tensor, as an array; of all of it if no dim is cut."""
    labels = np.arange(math.prod(shape)).reshape(tuple(shape))
    return labels if dim is None else part(labels, dim, parts, index)


def end_to_end(
    tensors: Mapping[str, list[int]], ranks: Sequence[Sequence[int]], align: int
) -> Labels:
    units: list[Any] = []
    for name, labels in tensors.items():
        units += [None] * (-len(units) % align)
        units += [(name, label) for label in labels]
    size = max(1, -(-len(units) // len(ranks[0])))
    found: Labels = {}
    for row in ranks:
        for index, rank in enumerate(row):
            held = [unit for unit in units[index * size : (index + 1) * size] if unit is not None]
            found[rank] = {
                name: [label for owner, label in held if owner == name] for name in tensors
            }
    return found


def merged(parts: Sequence[Labels]) -> Labels:
    found: Labels = {}
    for part in parts:
        for rank, tensors in part.items():
            found.setdefault(rank, {}).update(tensors)
    return found
