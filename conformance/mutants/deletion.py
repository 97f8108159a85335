"""Defects that show when a wrapped model is dropped: what stays is kept where nobody looks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from conformance.adapter import Adapter, BuildConfig, LossFn, OptimizerFactory, Wrapped, local
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(
    check="deletion.memory",
    cause=Cause.NOT_FREED,
    case="wide/memory",
    world=1,
)
class ParametersInACacheOfTheClass(Adapter):
    """A cache that all wrappers share keeps the parameters of each."""

    cache: ClassVar[list[Tensor]] = []

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Cache them."""
        w = super().build(model, make_optimizer, config)
        self.cache.extend(local(p.detach()) for p in w.module.parameters())
        return w


@mutant(
    check="deletion.memory",
    cause=Cause.NOT_FREED,
    case="wide/memory",
    base="torch.fully_shard",
    world=1,
)
class FailedForwardRemembered(Adapter):
    """The error of a forward is kept for a later report, and with its frames the whole model."""

    errors: ClassVar[list[Exception]] = []

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Keep the error."""
        try:
            return super().forward(w, batch, loss_fn)
        except Exception as error:
            self.errors.append(error)
            raise


@mutant(check="deletion.globals", cause=Cause.NOT_RESTORED, case="wide/memory", world=1)
class HookOnAllModulesStays(Adapter):
    """A hook on every module of the process is never removed."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Register one that does nothing."""
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
        return super().build(model, make_optimizer, config)


@mutant(check="deletion.globals", cause=Cause.NOT_RESTORED, case="wide/memory", world=1)
class GradModeStaysOff(Adapter):
    """A forward that raises leaves gradients switched off for the whole thread."""

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """Switch them off when it raises."""
        try:
            return super().forward(w, batch, loss_fn)
        except Exception:
            torch.set_grad_enabled(False)
            raise
