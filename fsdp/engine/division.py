"""How a reduction divides, so that sums stay inside their dtype's range. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.torch_private import premul_sum

# Sums over many ranks stay inside the range of these dtypes.
_WIDE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float64})


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How a reduction divides: before it, inside it, after it."""

    before: float
    scatter_op: Any
    all_reduce_op: Any
    after: float


UNDIVIDED = Division(
    before=1.0, scatter_op=dist.ReduceOp.SUM, all_reduce_op=dist.ReduceOp.SUM, after=1.0
)


def choose_division(
    info: DataParallelMeshInfo,
    dtype: torch.dtype,
    *,
    factor: float | None,
    force_sum: bool,
    premultiplies: bool,
) -> Division:
    """Return how a reduction in ``dtype`` gives sum / ``factor`` (default: the mean).

    ``premultiplies`` says whether the backend knows "multiply, then sum".
    """
    total = info.shard_size * info.replicate_size
    if factor is None and total == 1:
        return UNDIVIDED
    wide = dtype in _WIDE_DTYPES
    if wide and not force_sum and total > 1:
        if factor is None:
            mean = dist.ReduceOp.AVG
            return Division(before=1.0, scatter_op=mean, all_reduce_op=mean, after=1.0)
        if factor == info.shard_size:
            return Division(
                before=1.0,
                scatter_op=dist.ReduceOp.AVG,
                all_reduce_op=dist.ReduceOp.SUM,
                after=1.0,
            )
        if premultiplies and info.shard_size > 1:
            return Division(
                before=1.0,
                scatter_op=premul_sum(1 / factor),
                all_reduce_op=dist.ReduceOp.SUM,
                after=1.0,
            )
    divisor = float(total) if factor is None else float(factor)
    before = 1.0 if wide else half_of(divisor)
    return replace(UNDIVIDED, before=before, after=divisor / before)


def half_of(divisor: float) -> float:
    """Return a power of two near the square root of ``divisor``.

    Dividing by it first and by the rest afterwards keeps fp16 sums from overflowing without
    pushing small gradients below its smallest number.
    """
    half = 1.0
    while divisor % half == 0 and divisor / half > half:
        half *= 2
    return half
