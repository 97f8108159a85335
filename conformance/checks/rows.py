"""What a tensor looks like whose rows ranks hold in wrong places. Pure functions of tensors.

Rows are dealt out in equal chunks, the last short; see `conformance.checks.recut` for loads that
cut for another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from conformance.causes import Cause
from conformance.explain import Suspect


def misplaced_rows(whole: Tensor, shards: int) -> list[Suspect]:
    """One of `shards` ranks' rows shifted by one; whole shards that are other ranks'."""
    parts = whole.chunk(shards) if whole.dim() and shards > 1 else ()
    if len(parts) < 2:
        return []
    shifted = ((Cause.OFF_BY_ONE_SHARD, rows) for rows in _shifted(parts))
    dealt = ((Cause.OTHER_RANK, rows) for rows in _dealt(parts))
    return [*shifted, *dealt]


def _shifted(parts: tuple[Tensor, ...]) -> Iterator[Tensor]:
    for index, part in enumerate(parts):
        if part.shape[0] > 1:
            for by in (1, -1):
                yield torch.cat([*parts[:index], part.roll(by, 0), *parts[index + 1 :]])


def _dealt(parts: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """All shards in turn one rank on, and one rank's shard that is another's."""
    if parts[0].shape[0] < 2:
        return  # one row each: the rows are shifted, which is said of them anyway
    if parts[0].shape == parts[-1].shape:
        yield from (torch.cat([*parts[by:], *parts[:by]]) for by in range(1, len(parts)))
    for index, part in enumerate(parts):
        for other in parts[:index] + parts[index + 1 :]:
            if other.shape == part.shape:
                yield torch.cat([*parts[:index], other, *parts[index + 1 :]])


def by_parts(whole: Tensor, factors: list[float]) -> Tensor:
    """`whole` with each rank's rows times that rank's factor; ranks beyond the rows are left out.

    Args:
        whole: (rows, ...).
        factors: one per rank.
    """
    pairs = zip(whole.chunk(len(factors)), factors, strict=False)
    return torch.cat([part * factor for part, factor in pairs])
