"""The engine's adapter, and two that say of it what is not so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from conformance.adapter import (
    Adapter,
    BuildConfig,
    Conventions,
    LossFn,
    OptimizerFactory,
    StepResult,
    Wrapped,
)
from tests.engine.engine import Engine


class EngineAdapter(Adapter):
    """Leaves backward, reduction, clipping and the step to the engine."""

    capabilities = frozenset(
        {
            "gradients",
            "no_sync",
            "clip.p1",
            "clip.p2",
            "clip.pinf",
            "unused_parameters",
            "model_state.full",
            "optim_state.full",
            "save",
        }
    )
    conventions = Conventions(
        gradients="sum", loss_divided_by_accumulation=True, unused_grad="zero"
    )

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        optimizer = make_optimizer(model.parameters())
        engine = Engine(model, optimizer, config.accumulation)
        return Wrapped(module=engine, optimizer=optimizer, native=engine)

    def bare(self, w: Wrapped) -> nn.Module:
        inner: nn.Module = w.native.module
        return inner

    def step(
        self,
        w: Wrapped,
        micro_batches: Sequence[Any],
        loss_fn: LossFn,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> StepResult:
        engine: Engine = w.native
        engine.clipping = None if max_norm is None else (max_norm, norm_type)
        losses: list[Tensor] = []
        for index, batch in enumerate(micro_batches):
            loss = loss_fn(w.module, batch)
            w.observe("forward", index)
            losses.append(loss.detach())
            self.backward(w, loss)
            w.observe("backward", index)
        w.observe("gradients")
        self.optimizer_step(w)
        return StepResult(losses=losses, grad_norm=engine.grad_norm if max_norm else None)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        w.native.backward(loss)

    def optimizer_step(self, w: Wrapped) -> None:
        w.native.step()

    def save(self, w: Wrapped, directory: Path) -> None:
        w.native.save_checkpoint(directory)

    def load(self, w: Wrapped, directory: Path) -> None:
        w.native.load_checkpoint(directory)


class DeclaresTheMean(EngineAdapter):
    """The engine sums; this one says that it averages."""

    conventions = Conventions(loss_divided_by_accumulation=True, unused_grad="zero")


class DeclaresNoDivision(EngineAdapter):
    """The engine divides the loss; this one says that the caller does, and does it too."""

    conventions = Conventions(gradients="sum", unused_grad="zero")

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        super().backward(w, loss / w.native.accumulation)


class DeclaresNoGradient(EngineAdapter):
    """The engine gives unused parameters zeros; this one says that they get nothing."""

    conventions = Conventions(gradients="sum", loss_divided_by_accumulation=True)
