"""The reference implementation's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from conformance.adapter import StateKind, Wrapped
from conformance.adapters.composable import ComposableAdapter
from conformance.adapters.composable_pairs import PairsOfComposable
from conformance.adapters.fsdp_checkpoint import OwnCheckpoint
from conformance.adapters.meshes import meshes_of_four
from conformance.adapters.precision import ComposablePrecision
from conformance.adapters.torch_checkpoint import only_rank0_holds
from fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardedGradScaler,
    checkpoint,
    fully_shard,
)


class FullyShardAdapter(OwnCheckpoint, ComposableAdapter):
    """The composable face of the reference, with its own functions for optimizer states."""

    shard = staticmethod(fully_shard)

    def make_scaler(self, w: Wrapped, device: torch.device) -> ShardedGradScaler:
        """Its own."""
        return ShardedGradScaler(device.type)

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """An evaluation just before the load does no harm."""
        self._no_local(kind)
        options = _loading(kind, state)
        checkpoint.set_model_state_dict(w.module, dict(state), options=options)

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Parameters without an entry, because they never had a gradient, get no state."""
        self._no_local(kind)
        options = _loading(kind, state)
        checkpoint.set_optimizer_state_dict(w.module, w.optimizer, dict(state), options=options)


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


def _loading(kind: StateKind, state: Mapping[str, Any]) -> checkpoint.StateDictOptions:
    full = kind == "full"
    return checkpoint.StateDictOptions(
        full_state_dict=full, broadcast_from_rank0=full and only_rank0_holds(state)
    )
