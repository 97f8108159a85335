"""PyTorch's ``fully_shard``."""

from __future__ import annotations

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from conformance.adapters.composable import ComposableAdapter
from conformance.adapters.composable_pairs import PairsOfComposable
from conformance.adapters.meshes import meshes_of_four
from conformance.adapters.precision import ComposablePrecision


class FullyShardAdapter(ComposableAdapter):
    """PyTorch's composable wrapper."""

    shard = staticmethod(fully_shard)
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # new in torch 2.13
        # docs/findings/fsdp2-ranks-use-other-parameters.md
        capabilities = ComposableAdapter.capabilities - {"unused_parameters.ranks"}


class PairsAdapter(PairsOfComposable, FullyShardAdapter):
    """The same, in variants among which every two options meet."""

    offload = CPUOffloadPolicy
    precision = MixedPrecisionPolicy


class PrecisionAdapter(ComposablePrecision, FullyShardAdapter):
    """The same in low dtypes, as variants."""

    precision = MixedPrecisionPolicy


class MeshesAdapter(FullyShardAdapter):
    """The same over every mesh of four ranks, as variants."""

    variants = meshes_of_four()
