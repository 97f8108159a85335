"""PyTorch's ``fully_shard``."""

from __future__ import annotations

from torch.distributed.fsdp import fully_shard

from conformance.adapters.composable import ComposableAdapter


class FullyShardAdapter(ComposableAdapter):
    """PyTorch's composable wrapper."""

    shard = staticmethod(fully_shard)
