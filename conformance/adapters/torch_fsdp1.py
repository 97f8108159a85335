"""PyTorch's ``FullyShardedDataParallel``: flat parameters, or views of them with original names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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

from conformance.adapter import StateKind, Wrapped
from conformance.adapters import torch_flat
from conformance.adapters.covering import CoveringAdapter, pairs
from conformance.adapters.flat import Entry
from conformance.adapters.torch_checkpoint import CheckpointDirectory, from_rank0, only_rank0_holds
from conformance.adapters.wrapping import HYBRID, strategy_warnings_ignored

LOCAL_STATES = frozenset({"model_state.local", "optim_state.local"})
# refused by the wrapper without sharding; `save` writes a sharded state
SHARDED_STATES = frozenset({"model_state.sharded", "optim_state.sharded", "save"})
STATE_TYPES: Mapping[StateKind, tuple[StateDictType, Any, Any]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig, FullOptimStateDictConfig),
    "sharded": (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig,
        ShardedOptimStateDictConfig,
    ),
    "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig, LocalOptimStateDictConfig),
}


class FullyShardedAdapter(CoveringAdapter, CheckpointDirectory):
    """With its states of every kind."""

    wrapper = FullyShardedDataParallel
    strategies = ShardingStrategy
    policy = ModuleWrapPolicy
    prefetches = BackwardPrefetch
    offload = CPUOffload
    precision = MixedPrecision
    capabilities = frozenset(
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
            "model_state.full",
            "model_state.sharded",
            "model_state.local",
            "optim_state.full",
            "optim_state.sharded",
            "optim_state.local",
            "save",
        }
    )

    def configure(self, options: Mapping[str, Any]) -> None:
        """Claims by strategy and kind of parameters."""
        super().configure(options)
        strategy = options["sharding_strategy"]
        if strategy == "NO_SHARD":
            self.capabilities -= SHARDED_STATES
        # local state exists for flat parameters that are sharded without a device mesh
        if options["use_orig_params"] or strategy in ("NO_SHARD", *HYBRID):
            self.capabilities -= LOCAL_STATES

    def entries(self, root: nn.Module) -> list[Entry]:
        """From the wrapper's own layout."""
        return torch_flat.entries(root)

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Under the state type of that kind."""
        with _state_type(w.module, kind, cpu=cpu, rank0_only=rank0_only):
            return dict(w.module.state_dict())

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """A full state that rank 0 alone holds is broadcast: the wrapper wants it on all ranks."""
        content = from_rank0(state) if kind == "full" else dict(state)
        with _state_type(w.module, kind):
            w.module.load_state_dict(content)

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Under the state type of that kind."""
        with _state_type(w.module, kind, cpu=cpu, rank0_only=rank0_only):
            return dict(FullyShardedDataParallel.optim_state_dict(w.module, w.optimizer))

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """The wrapper broadcasts a full state that rank 0 alone holds."""
        alone = kind == "full" and only_rank0_holds(state)
        with _state_type(w.module, kind, cpu=alone, rank0_only=alone):
            mine = FullyShardedDataParallel.optim_state_dict_to_load(
                w.module, w.optimizer, dict(state)
            )
        w.optimizer.load_state_dict(mine)


class PairsAdapter(FullyShardedAdapter):
    """The same, in variants among which every two options meet."""

    variants = pairs()


@contextmanager
def _state_type(
    module: nn.Module, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
) -> Iterator[None]:
    """The state type of `kind` for the body; the wrapper's default options unless one is set."""
    state_type, model_config, optim_config = STATE_TYPES[kind]
    given: dict[str, bool] = {"offload_to_cpu": True} if cpu else {}
    if rank0_only:
        given["rank0_only"] = True
    with (
        strategy_warnings_ignored(),
        FullyShardedDataParallel.state_dict_type(
            module, state_type, model_config(**given), optim_config(**given)
        ),
    ):
        yield
