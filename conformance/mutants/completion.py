"""Defects by which a rank does not get to the end of a scenario."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.adapter import Adapter, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant
from conformance.verdicts import Verdict

CASE = "mlp/train/optimizer=sgd"
HANG_SECONDS = 8.0


@mutant(
    check="run.completed",
    cause=Cause.HUNG,
    case=CASE,
    verdict=Verdict.HANG,
    timeout=HANG_SECONDS,
    bugs=("lightseekorg/TorchSpec#126", "pytorch/pytorch#134095"),
)
class RankNeverComes(Adapter):
    """One rank never enters the gradient reduction."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Wait for something that does not happen."""
        if dist.get_rank() == 1:
            time.sleep(10 * HANG_SECONDS)
        super().backward(w, loss)


@mutant(check="run.completed", cause=Cause.CRASHED, case=CASE, verdict=Verdict.CRASH)
class RankKilled(Adapter):
    """One rank is killed between backward and the optimizer step."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Die."""
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().optimizer_step(w)


@mutant(check="run.completed", cause=Cause.CRASHED, case=CASE, verdict=Verdict.CRASH)
class RankExitsWithStatusZero(Adapter):
    """One rank leaves quietly, with exit status 0 and without a report."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Leave."""
        if dist.get_rank() == 1:
            os._exit(0)
        super().optimizer_step(w)


@mutant(
    check="run.completed",
    cause=Cause.DESYNCHRONISED,
    case=CASE,
    verdict=Verdict.DESYNC,
    timeout=4 * HANG_SECONDS,
)
class OtherShapeOnOneRank(Adapter):
    """One rank reduces a tensor of another shape."""

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Reduce one element more on rank 1."""
        super().backward(w, loss)
        dist.all_reduce(torch.zeros(2 + dist.get_rank(), device=loss.device))


@mutant(check="run.completed", cause=Cause.EXCEPTION, case=CASE)
class ExceptionOnOneRank(Adapter):
    """One rank raises in the optimizer step."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Raise."""
        if dist.get_rank() == 1:
            raise ArithmeticError("the gradient of this rank overflowed")
        super().optimizer_step(w)
