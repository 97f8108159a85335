"""What is said about a parameter group from outside: once by its face, at any time by the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp.api import AllGather, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, ReduceScatter
from fsdp.engine.exposure import AnyExposure, LayOut


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """What the groups of one call have in common: the face's choices and the user's policies.

    Attributes:
        device: where whole parameters are computed with.
        exposure: what users see.
        lay_out: who holds what.
        mp_policy: dtypes of computation and reduction.
        offload_policy: where shards live between uses.
        whole_reductions: reduce the whole shard or nothing; a parameter without a gradient counts
            as zero. For exposures with one gradient for all.
    """

    device: torch.device
    exposure: AnyExposure
    lay_out: LayOut
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    whole_reductions: bool = False

    @property
    def offload(self) -> bool:
        """Whether shards live on the CPU."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    @property
    def pin_memory(self) -> bool:
        """Whether offloaded shards are page-locked, where there is an accelerator to gain by it."""
        policy = self.offload_policy
        return isinstance(policy, CPUOffloadPolicy) and policy.pin_memory


@dataclass(slots=True, kw_only=True)
class GroupSettings:
    """What a user may change between passes; every setter of a face ends here."""

    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    reduce_scatter_unused_params: bool = False
    unshard_in_backward: bool = True
    unshard_async_op: bool = False
    max_input_buffers: int = 1
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False
    all_gather_comm: AllGather | None = None
    reduce_scatter_comm: ReduceScatter | None = None
    reduce_scatter_group: dist.ProcessGroup | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
