"""Defects of an accelerator's streams: something is used before another stream has made it.

Each keeps a stream of its own busy before it works there, and lets the current stream go on. They
need an accelerator; on CPU nothing runs beside anything else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.adapter import Adapter, LossFn, Wrapped, to_cpu
from conformance.causes import Cause
from conformance.mutants.registry import mutant

CASE = "mlp/train/optimizer=sgd"
DELAY = 60
"""Products of two matrices of 4096 rows: some tens of milliseconds, longer than a step of the
case takes and far shorter than its time-out."""


class Beside(Adapter):
    """Base of what works on a stream of its own and waits for nothing.

    ``_kept`` holds what that stream still uses: the memory must not be given to anybody else.
    """

    _stream: torch.Stream | None = None
    _kept: tuple[list[Tensor], ...] = ()

    def beside(self, device: torch.device) -> torch.Stream:
        """The stream, busy for a while."""
        if self._stream is None:
            self._stream = torch.Stream(device=device)
            self._busy = torch.ones(4096, 4096, device=device)
            self._product = torch.empty_like(self._busy)
            torch.accelerator.synchronize()
        with self._stream:
            for _ in range(DELAY):
                torch.mm(self._busy, self._busy, out=self._product)
        return self._stream


@mutant(
    check="gradients.value",
    cause=Cause.NOT_REDUCED,
    case=CASE,
    bugs=("pytorch/pytorch#144535",),
    device="accelerator",
)
class ReductionNotAwaited(Beside):
    """Backward returns before gradients are reduced, and nobody waits for the stream that does."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """The wrapper's own reduction is left out."""
        with self.no_sync(w):
            return super().forward(w, batch, loss_fn)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Reduce copies elsewhere, and put them in place when they are there."""
        super().backward(w, loss)
        gradients = [p.grad for p in w.module.parameters() if p.grad is not None]
        self._kept += (gradients,)
        with self.beside(loss.device):
            for gradient in gradients:
                reduced = gradient.clone()
                dist.all_reduce(reduced)
                gradient.copy_(reduced / dist.get_world_size())


@mutant(
    check="losses.value",
    cause=Cause.STALE,
    case=CASE,
    bugs=("pytorch/pytorch#178142",),
    device="accelerator",
)
class ForwardBeforeTheCopy(Beside):
    """Forward starts while the new parameters are still being copied to where it reads them."""

    def optimizer_step(self, w: Wrapped) -> None:
        """The step's result arrives late."""
        parameters = list(w.module.parameters())
        before = [p.detach().clone() for p in parameters]
        super().optimizer_step(w)
        after = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        ready = torch.accelerator.current_stream().record_event()
        self._kept += (before, after)
        with self.beside(parameters[0].device) as beside, torch.no_grad():
            beside.wait_event(ready)
            for parameter, value in zip(parameters, after, strict=True):
                parameter.copy_(value)

    def full_parameters(self, w: Wrapped) -> dict[str, Tensor]:
        """What is there in the end: who asks for it has waited."""
        if not self._kept:
            return super().full_parameters(w)
        names = [name for name, _ in self.bare(w).named_parameters()]
        return dict(zip(names, map(to_cpu, self._kept[-1]), strict=True))


@mutant(
    check="gradients.value",
    cause=Cause.ZERO,
    case=CASE,
    bugs=("pytorch/pytorch#180665",),
    device="accelerator",
)
class BufferReusedBeforeTheCopy(Beside):
    """A reduced gradient's buffer is used again before it has been copied to the gradient."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Copy late; meanwhile the buffer is cleared for the next gradient."""
        super().backward(w, loss)
        gradients = [p.grad for p in w.module.parameters() if p.grad is not None]
        buffers = [gradient.clone() for gradient in gradients]
        torch.accelerator.synchronize()
        with self.beside(loss.device) as beside:
            for gradient, buffer in zip(gradients, buffers, strict=True):
                gradient.copy_(buffer)
        buffers[0].zero_()
        self._kept += (gradients, buffers)
        torch.accelerator.current_stream().wait_stream(beside)
