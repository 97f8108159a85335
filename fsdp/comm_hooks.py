"""Ready-made communication hooks for ``register_comm_hook``, on any device.

They reduce as the wrapper does by itself, in the gradients' dtype or in a narrower one. Those of
``torch.distributed.algorithms`` work as well, where its compressing hooks have streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp.engine.division import half_of
from fsdp.engine.torch_private import reduce_scatter

_COMPRESSING = frozenset({"fp16_compress_hook", "bf16_compress_hook"})


class DefaultState:
    """What the hooks need to know: the ranks, and how sums become means.

    Args:
        process_group: over which gradients are reduced.

    Attributes:
        world_size: ranks of the group.
        gradient_predivide_factor: gradients are divided by it before they are summed.
        gradient_postdivide_factor: the sum is divided by it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        if process_group is None:
            raise ValueError(f"Expected to pass in an explicit ProcessGroup to {self}.")
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor = half_of(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """The same for a compressing hook.

    Args:
        process_group: over which gradients are reduced.
        parameter_type: the dtype that gradients get afterwards.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        parameter_type: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Replace ``grad`` by its mean over the ranks. *Collective*: one all-reduce."""
    _divide(grad, state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Fill ``output`` (S,) with this rank's part of the mean of ``grad`` (W * S,).

    *Collective*: one reduce-scatter.
    """
    _divide(grad, state.gradient_predivide_factor)
    work = reduce_scatter(output, grad, state.process_group, dist.ReduceOp.SUM, async_op=False)
    if work is not None:
        work.wait()
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Reduce in float16; see ``allreduce_hook`` and ``reduce_scatter_hook``."""
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Reduce in bfloat16; see ``allreduce_hook`` and ``reduce_scatter_hook``."""
    _compressed(torch.bfloat16, state, grad, output)


def compresses(hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` chooses the dtype of the communication: one of these two, or of torch's."""
    return getattr(hook, "__name__", "") in _COMPRESSING


def _compressed(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    grad.data = grad.to(dtype)
    if output is None:
        allreduce_hook(state, grad)
        grad.data = grad.to(state.parameter_type)
        return
    output.data = output.to(dtype)
    reduce_scatter_hook(state, grad, output)
    output.data = output.to(state.parameter_type)


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor != 1:
        tensor.div_(factor)
