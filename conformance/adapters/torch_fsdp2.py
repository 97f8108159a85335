"""PyTorch's ``fully_shard``."""

from __future__ import annotations

from typing import ClassVar

from torch.distributed.fsdp import fully_shard

from conformance.adapters.composable import ComposableAdapter


class FullyShardAdapter(ComposableAdapter):
    """PyTorch's composable wrapper."""

    name: ClassVar[str] = "torch.fully_shard"
    shard = staticmethod(fully_shard)
