"""PyTorch's ``FullyShardedDataParallel``: flat parameters, or views of them with original names."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from conformance.adapters import torch_flat
from conformance.adapters.covering import pairs
from conformance.adapters.flat import Entry
from conformance.adapters.flat_states import STATES, FlatStatesAdapter, StateTypes
from conformance.adapters.torch_checkpoint import CheckpointDirectory


class FullyShardedAdapter(FlatStatesAdapter, CheckpointDirectory):
    """With its states of every kind."""

    wrapper = FullyShardedDataParallel
    strategies = ShardingStrategy
    policy = ModuleWrapPolicy
    prefetches = BackwardPrefetch
    offload = CPUOffload
    precision = MixedPrecision
    state_types: ClassVar[StateTypes] = {
        "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig, FullOptimStateDictConfig),
        "sharded": (
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig,
            ShardedOptimStateDictConfig,
        ),
        "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig, LocalOptimStateDictConfig),
    }
    capabilities = STATES | frozenset(
        {
            "gradients",
            "no_sync",
            "clip.gradients",
            "clip.p1",
            "clip.p2",
            "clip.pinf",
            # no "two_forwards": docs/findings/fsdp1-two-forwards.md
            "unused_parameters",
            "shard.parameters",
            "shard.optimizer",
        }
    )

    def entries(self, root: nn.Module) -> list[Entry]:
        """From the wrapper's own layout."""
        return torch_flat.entries(root)


class PairsAdapter(FullyShardedAdapter):
    """The same, in variants among which every two options meet."""

    variants = pairs()
