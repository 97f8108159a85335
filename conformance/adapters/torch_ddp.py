"""PyTorch's ``DistributedDataParallel``: the baseline that every run judges first."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance.adapter import Adapter, BuildConfig, Conventions, OptimizerFactory, Wrapped

UNUSED_ANNOUNCED = (
    "built with find_unused_parameters=True, because the model has parameters that take no part"
    " in forward"
)


class ReplicatedAdapter(Adapter):
    """What adapters on top of this wrapper share; ``native`` is the wrapper, ``module`` too."""

    conventions = Conventions(buffers="rank0")

    def wrap(
        self, model: nn.Module, config: BuildConfig, options: Mapping[str, Any]
    ) -> tuple[DistributedDataParallel, tuple[str, ...]]:
        """The wrapper, and remarks: unused parameters have to be announced to it."""
        announce = config.unused_parameters and not options.get("static_graph", False)
        wrapped = DistributedDataParallel(
            model, find_unused_parameters=announce, **spelt_as_installed(options)
        )
        return wrapped, (UNUSED_ANNOUNCED,) if announce else ()

    def bare(self, w: Wrapped) -> nn.Module:
        """The user's module."""
        inner: nn.Module = w.native.module
        return inner

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """The wrapper's own context; without the claim every backward reduces."""
        if "no_sync" not in self.capabilities:
            return nullcontext()
        context: AbstractContextManager[Any] = w.native.no_sync()
        return context


class DataParallelAdapter(ReplicatedAdapter):
    """Replicates the model; every rank has the whole optimizer."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "gradient_as_bucket_view=True": {"gradient_as_bucket_view": True},
        "broadcast_buffers=False": {"broadcast_buffers": False},
        # every backward reduces here, so buffers would be broadcast at every micro-batch too
        "static_graph=True,broadcast_buffers=False": {
            "static_graph": True,
            "broadcast_buffers": False,
        },
    }
    capabilities = frozenset(
        {
            "gradients",
            "no_sync",
            "no_sync.dropped",
            "clip.gradients",
            "clip.p1",
            "clip.p2",
            "clip.pinf",
            # no "two_forwards": docs/findings/ddp-two-forwards.md
            "unused_parameters",
            "unused_parameters.varying",
            "unused_parameters.ranks",
            "optimizer.whole",
            "hooks.parameters",
            "scaler",
            "model_state.full",
            "optim_state.full",
        }
    )

    def configure(self, options: Mapping[str, Any]) -> None:
        """Without broadcasts every rank keeps its own buffers."""
        if options.get("static_graph", False):
            # docs/findings/ddp-static-graph-no-sync.md
            self.capabilities -= {"no_sync", "no_sync.dropped"}
            # the graph of the first step is that of all
            self.capabilities -= {"unused_parameters.varying", "unused_parameters.ranks"}
        if not options.get("broadcast_buffers", True):
            self.conventions = Conventions(buffers="local")

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Wrap, with the optimizer over all parameters."""
        wrapped, remarks = self.wrap(model, config, config.options)
        optimizer = make_optimizer(wrapped.parameters())
        return Wrapped(module=wrapped, optimizer=optimizer, native=wrapped, remarks=remarks)


def spelt_as_installed(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with ``broadcast_buffers`` under the name that replaced it in torch 2.13."""
    spelt = dict(options)
    new = "forward_sync_buffers"
    if "broadcast_buffers" in spelt and new in signature(DistributedDataParallel).parameters:
        spelt[new] = spelt.pop("broadcast_buffers")
    return spelt
