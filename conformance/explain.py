"""Which known defect a wrong number looks like.

Each cause has a tensor that the wrapper would have produced under that defect; the first one that
the wrong number agrees with names the cause. Pure functions of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from conformance.causes import Cause
from conformance.tolerance import distance

Suspect = tuple[Cause, Tensor]


def explain(got: Tensor, expected: Tensor, bound: float, suspects: Iterable[Suspect] = ()) -> Cause:
    """The cause whose tensor `got` is within `bound` of; structural patterns come last."""
    if not bool(got.double().isfinite().all()) and bool(expected.double().isfinite().all()):
        return Cause.NON_FINITE
    for cause, suspect in (*suspects, *patterns(expected)):
        if suspect.shape == got.shape and _alike(got, suspect, expected, bound):
            return cause
    if is_permutation(got, expected, bound):
        return Cause.PERMUTED
    if is_scaled(got, expected, bound):
        return Cause.SCALED
    return Cause.LAST_ROWS if only_last_rows(got, expected, bound) else Cause.UNEXPLAINED


def patterns(expected: Tensor) -> Iterator[Suspect]:
    """What the expected tensor becomes under defects that need no other knowledge."""
    yield Cause.ZERO, torch.zeros_like(expected)
    yield Cause.SIGN, -expected
    if expected.dim() and expected.shape[0] > 1:
        yield Cause.OFF_BY_ONE_SHARD, expected.roll(1, 0)
        yield Cause.OFF_BY_ONE_SHARD, expected.roll(-1, 0)
    if expected.dtype == torch.float32:
        for short in (torch.bfloat16, torch.float16):
            yield Cause.DTYPE_ROUND_TRIP, expected.to(short).to(expected.dtype)


def _alike(got: Tensor, suspect: Tensor, expected: Tensor, bound: float) -> bool:
    """`got` is the suspect's tensor, and that is closer than the expected one by far."""
    error = distance(got, suspect)
    return error <= bound and 4 * error < distance(got, expected)


def is_permutation(got: Tensor, expected: Tensor, bound: float) -> bool:
    """The same numbers in other places."""
    if got.shape != expected.shape or got.numel() < 2:
        return False
    return distance(got.flatten().sort().values, expected.flatten().sort().values) <= bound


def is_scaled(got: Tensor, expected: Tensor, bound: float) -> bool:
    """One factor explains all elements."""
    if got.shape != expected.shape or got.numel() < 2:
        return False
    factor = ratio(got, expected)
    return factor is not None and distance(got, expected.double() * factor) <= bound * max(
        1.0, factor
    )


def only_last_rows(got: Tensor, expected: Tensor, bound: float) -> bool:
    """Fewer than half of the rows are wrong, the last ones: half may be one of two ranks' shard."""
    rows = wrong_rows(got, expected, bound)
    return rows is not None and rows.stop == len(expected) and 2 * len(rows) < len(expected)


def wrong_rows(got: Tensor, expected: Tensor, bound: float) -> range | None:
    """The rows that differ by more than `bound`, if they stand together and others are right.

    ``None`` also where all others should be zero: that these are right says nothing.

    Args:
        got: (rows, ...).
        expected: of the same shape.
        bound: of the absolute difference of two elements.
    """
    if not expected.dim() or not expected.numel():
        return None
    a, b = got.double(), expected.double()
    gap = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    wrong = (gap > bound).reshape(len(b), -1).any(1)  # (rows,)
    found: list[int] = wrong.nonzero().flatten().tolist()
    if not found or found[-1] - found[0] + 1 != len(found) or not bool(b[~wrong].any()):
        return None
    return range(found[0], found[-1] + 1)


def ratio(got: Tensor, expected: Tensor) -> float | None:
    """Least-squares factor from `expected` to `got`; ``None`` if `expected` is zero."""
    a, b = got.double().flatten(), expected.double().flatten()
    square = float(b @ b)
    return float(a @ b) / square if square > 0 else None
