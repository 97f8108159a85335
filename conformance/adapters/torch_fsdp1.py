"""PyTorch's ``FullyShardedDataParallel``: flat parameters, or views of them with original names."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from conformance.adapter import Wrapped
from conformance.adapters import torch_flat
from conformance.adapters.covering import pairs
from conformance.adapters.flat import Entry
from conformance.adapters.flat_states import STATES, FlatStatesAdapter, state_types_of
from conformance.adapters.precision import FlatPrecision
from conformance.adapters.torch_checkpoint import CheckpointDirectory
from conformance.adapters.wrapping import hybrid_variants


class FullyShardedAdapter(FlatStatesAdapter, CheckpointDirectory):
    """With its states of every kind."""

    wrapper = FullyShardedDataParallel
    strategies = ShardingStrategy
    policy = ModuleWrapPolicy
    prefetches = BackwardPrefetch
    offload = CPUOffload
    precision = MixedPrecision
    state_types = state_types_of(fsdp)
    capabilities = STATES | frozenset(
        {
            "gradients",
            "no_sync",
            "no_sync.dropped",
            "clip.gradients",
            "clip.p1",
            "clip.p2",
            "clip.pinf",
            # no "two_forwards": docs/findings/fsdp1-two-forwards.md
            "unused_parameters",
            "unused_parameters.varying",
            "unused_parameters.ranks",
            "scaler",
            "shard.parameters",
            "shard.optimizer",
        }
    )

    def entries(self, root: nn.Module) -> list[Entry]:
        """From the wrapper's own layout."""
        return torch_flat.entries(root)

    def make_scaler(self, w: Wrapped, device: torch.device) -> ShardedGradScaler:
        """Its own."""
        return ShardedGradScaler(device.type)


class PairsAdapter(FullyShardedAdapter):
    """The same, in variants among which every two options meet."""

    variants = pairs()


class PrecisionAdapter(FlatPrecision, FullyShardedAdapter):
    """The same in low dtypes, as variants."""

    precision = MixedPrecision


class MeshesAdapter(FullyShardedAdapter):
    """The same over every mesh of four ranks, as variants."""

    variants = hybrid_variants()
