"""PyTorch's ``fully_shard``: one DTensor per parameter, hooks instead of a wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from conformance.adapter import Adapter, BuildConfig, OptimizerFactory, Wrapped, toggled


class FullyShardAdapter(Adapter):
    """Shards the units that the model case names, then the root."""

    name: ClassVar[str] = "torch.fully_shard"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "reshard_after_forward=False": {"reshard_after_forward": False},
    }
    capabilities = frozenset(
        {
            "gradients",
            "no_sync",
            "clip.p1",
            "clip.p2",
            "clip.pinf",
            "unused_parameters",
            "shard.parameters",
            "shard.optimizer",
        }
    )

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Shard in place; the optimizer is made over the sharded parameters."""
        mesh = init_device_mesh(config.device.type, (config.world_size,))
        for child in reversed(list(model.modules())):
            if isinstance(child, config.units):
                fully_shard(child, mesh=mesh, **config.options)
        fully_shard(model, mesh=mesh, **config.options)
        optimizer = make_optimizer(model.parameters())
        return Wrapped(module=model, optimizer=optimizer)

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """This wrapper's form of it: reduction is switched off and on again."""
        return toggled(w.module.set_requires_gradient_sync)  # type: ignore[operator, arg-type]
