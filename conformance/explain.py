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
    return Cause.SCALED if is_scaled(got, expected, bound) else Cause.UNEXPLAINED


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


def ratio(got: Tensor, expected: Tensor) -> float | None:
    """Least-squares factor from `expected` to `got`; ``None`` if `expected` is zero."""
    a, b = got.double().flatten(), expected.double().flatten()
    square = float(b @ b)
    return float(a @ b) / square if square > 0 else None
