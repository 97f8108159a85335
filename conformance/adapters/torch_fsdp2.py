"""PyTorch's ``fully_shard``."""

from __future__ import annotations

from torch.distributed.fsdp import fully_shard

from conformance.adapters.composable import ComposableAdapter
from conformance.adapters.meshes import meshes_of_four


class FullyShardAdapter(ComposableAdapter):
    """PyTorch's composable wrapper."""

    shard = staticmethod(fully_shard)


class MeshesAdapter(FullyShardAdapter):
    """The same over every mesh of four ranks, as variants."""

    variants = meshes_of_four()
