"""What is said about a parameter group from outside: once by its face, at any time by the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist

from fsdp.api import AllGather, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, ReduceScatter
from fsdp.engine.exposure import AnyExposure, HeldGradients, LayOut


class Kept(Enum):
    """What users see of whole parameters that stay in memory between forward and backward.

    Unless they are SHOWN throughout, they are given up after a forward without gradients: no
    backward follows that would, and the next optimizer step makes them stale. Those that are SHOWN
    are given up too while gradients wait for that step.
    """

    SHOWN = auto()
    UNTIL_BACKWARD = auto()  # not after a backward that reduces nothing and keeps them
    HIDDEN = auto()


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
        kept: whether whole parameters that stay in memory stay registered.
        held: with it, gradients that wait for a reduction are shown, in the dtype in which they
            were computed, and taken back as users leave them.
    """

    device: torch.device
    exposure: AnyExposure
    lay_out: LayOut
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    whole_reductions: bool = False
    kept: Kept = Kept.SHOWN
    held: HeldGradients[Any] | None = None

    @property
    def offload(self) -> bool:
        """Whether shards live on the CPU."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    @property
    def pin_memory(self) -> bool:
        """Whether offloaded shards are page-locked, if what computes is not the host."""
        policy = self.offload_policy
        computes_elsewhere = self.device.type != "cpu"
        return isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and computes_elsewhere


@dataclass(frozen=True, kw_only=True)
class OwnReduction:
    """A user's way from whole gradients to reduced ones, divisions included.

    Attributes:
        run: gets the packed gradients (W * S,) and the shard (S,) to fill; or the gradients alone,
            to be reduced in place, where nothing is sharded.
        casts: whether it chooses the dtype of the communication itself.
    """

    run: Callable[[torch.Tensor, torch.Tensor | None], None]
    casts: bool


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
    own_reduction: OwnReduction | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
