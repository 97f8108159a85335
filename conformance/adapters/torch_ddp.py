"""PyTorch's ``DistributedDataParallel``: the baseline that every run judges first."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance.adapter import Adapter, BuildConfig, Conventions, OptimizerFactory, Wrapped


class DistributedDataParallelAdapter(Adapter):
    """Replicates the model; ``native`` is the wrapper, ``module`` too."""

    name: ClassVar[str] = "torch.DistributedDataParallel"
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
        }
    )
    conventions = Conventions(buffers="rank0")

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Wrap; unused parameters have to be announced to this wrapper."""
        wrapped = DistributedDataParallel(
            model, find_unused_parameters=config.unused_parameters, **config.options
        )
        optimizer = make_optimizer(wrapped.parameters())
        return Wrapped(module=wrapped, optimizer=optimizer, native=wrapped)

    def bare(self, w: Wrapped) -> nn.Module:
        """The user's module."""
        inner: nn.Module = w.native.module
        return inner

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """The wrapper's own context."""
        context: AbstractContextManager[Any] = w.native.no_sync()
        return context
