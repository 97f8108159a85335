"""The test that `harness.py` times, by itself: ranks import nothing of the harness."""

from __future__ import annotations

import torch
import torch.distributed as dist

from conformance.ranks import RankContext

WORLD = 2


def check_all_reduce(rank: int, device: torch.device) -> float:
    values = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(values)
    total = values[0].item()
    if total != WORLD * (WORLD + 1) / 2:
        raise AssertionError(f"rank {rank}: the sum over ranks is {total}")
    return total


def job_all_reduce(context: RankContext) -> float:
    return check_all_reduce(context.rank, context.device)
