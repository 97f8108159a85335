"""Defects of how much is sent: the numbers are right, and too many bytes have travelled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import (
    Adapter,
    BuildConfig,
    Conventions,
    LossFn,
    OptimizerFactory,
    Wrapped,
)
from conformance.causes import Cause
from conformance.mutants.registry import mutant
from conformance.mutants.states import FSDP2

PLAIN = "mlp/train/optimizer=sgd"
ACCUMULATED = "mlp/train/accumulation=3,optimizer=sgd"


@mutant(check="collectives.bytes", cause=Cause.GATHERED_REPEATEDLY, case=PLAIN, base=FSDP2)
class GathersForNothing(Adapter):
    """Parameters are gathered before each forward, and freed before it begins."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Run the forward once for nothing."""
        with torch.no_grad():
            super().forward(w, batch, loss_fn)
        return super().forward(w, batch, loss_fn)


@mutant(check="collectives.bytes", cause=Cause.GATHERED_REPEATEDLY, case=PLAIN, base=FSDP2)
class GathersAgainForBackward(Adapter):
    """Parameters are freed between forward and backward, though they were to stay."""

    conventions = Conventions(gathers="once")


class ReducedWhole:
    """A reduce-scatter made of an all-reduce, of which each rank keeps its part."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the parts."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - as it is called
    ) -> None:
        """All of it everywhere."""
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)])


@mutant(check="collectives.bytes", cause=Cause.NOT_SCATTERED, case=PLAIN, base=FSDP2)
class GradientsReducedWhole(Adapter):
    """Gradients are all-reduced, and each rank then takes its part."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Replace the reduction of every unit."""
        w = super().build(model, make_optimizer, config)
        for module in w.module.modules():
            if hasattr(module, "set_custom_reduce_scatter"):
                unit: Any = module
                unit.set_custom_reduce_scatter(ReducedWhole())
        return w


@mutant(
    check="collectives.bytes",
    cause=Cause.UNEXPECTED_GRADIENT,
    case="frozen/train/accumulation=1,optimizer=sgd",
)
class FrozenGradientsReduced(Adapter):
    """Gradients of frozen parameters are computed, reduced, and dropped."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Let the wrapper see none as frozen."""
        self.frozen = [p for p in model.parameters() if not p.requires_grad]
        for parameter in self.frozen:
            parameter.requires_grad_()
        return super().build(model, make_optimizer, config)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Drop theirs."""
        super().backward(w, loss)
        for parameter in self.frozen:
            parameter.grad = None


@mutant(check="collectives.bytes", cause=Cause.WRONG_DTYPE, case=PLAIN)
class GradientsTravelInDouble(Adapter):
    """Gradients are reduced in twice the precision of the parameters, unasked."""

    travels_as = torch.float64

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Let the wrapper reduce nothing by itself."""
        with w.native.no_sync():
            return super().forward(w, batch, loss_fn)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Average by hand."""
        super().backward(w, loss)
        for parameter in w.module.parameters():
            total = parameter.grad.to(self.travels_as)  # type: ignore[union-attr]
            dist.all_reduce(total)
            parameter.grad.copy_(total / dist.get_world_size())  # type: ignore[union-attr]


@mutant(check="dtypes.reduced", cause=Cause.DTYPE_ROUND_TRIP, case=PLAIN)
class GradientsTravelInBfloat16(GradientsTravelInDouble):
    """Gradients are reduced in half the precision of the parameters, unasked."""

    travels_as = torch.bfloat16


@mutant(check="collectives.regathered", cause=Cause.NOT_FREED, case=ACCUMULATED, base=FSDP2)
class UnshardedWhileAccumulating(Adapter):
    """Parameters stay unsharded from one micro-batch to the next, though they are to be freed."""

    @contextmanager
    def no_sync(self, w: Wrapped) -> Iterator[None]:
        """Keep them."""
        module: Any = w.module
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
        with super().no_sync(w):
            yield
        module.set_reshard_after_forward(True)
        module.set_reshard_after_backward(True)


@mutant(check="collectives.after_backward", cause=Cause.REDUCED_REPEATEDLY, case=PLAIN)
class AveragedOnceMore(Adapter):
    """The optimizer's step averages gradients that are averages already."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Average, which changes no number; then step."""
        for p in w.module.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())  # type: ignore[union-attr]
        super().optimizer_step(w)


@mutant(check="collectives.after_backward", cause=Cause.GATHERED_REPEATEDLY, case=PLAIN)
class ParametersSentAfterEachStep(Adapter):
    """After each step rank 0 sends its parameters to ranks that have the same."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Step, then send."""
        super().optimizer_step(w)
        for p in w.module.parameters():
            dist.broadcast(p.detach(), src=0)
