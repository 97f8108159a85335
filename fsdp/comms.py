"""All-gather and reduce-scatter whose buffers come from the process group's own allocator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp.api import AllGather, ReduceOp, ReduceScatter
from fsdp.engine.torch_private import all_gather, group_allocate, reduce_scatter


class GroupAllocatedAllGather(AllGather):
    """Gathers into memory of ``group``'s allocator, or ordinary memory if it has none."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a flat tensor of ``size``."""
        return group_allocate(self._group, math.prod(size), dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (n,) of every rank into ``output_tensor`` (world * n,)."""
        return all_gather(output_tensor, input_tensor, group, async_op=async_op)


class GroupAllocatedReduceScatter(ReduceScatter):
    """Reduces from and into memory of ``group``'s allocator, or ordinary memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a flat tensor of ``size``."""
        return group_allocate(self._group, math.prod(size), dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (world * n,) and leave this rank's part in ``output_tensor``."""
        return reduce_scatter(output_tensor, input_tensor, group, op, async_op=async_op)
