"""Defects by which nothing is saved although sharding is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from conformance.adapter import Adapter, StateKind, Wrapped
from conformance.causes import Cause
from conformance.mutants.registry import mutant


@mutant(check="sharding.bytes", cause=Cause.NOT_SHARDED, case="mlp/train/optimizer=adamw")
class FullCopyOnEveryRank(Adapter):
    """Every rank keeps all parameters and the whole optimizer although both are claimed sharded."""

    capabilities = frozenset({"gradients", "no_sync", "shard.parameters", "shard.optimizer"})


@mutant(
    check="sharding.bytes",
    cause=Cause.NOT_SHARDED,
    case="mlp/train/optimizer=sgd",
    base="torch.fully_shard",
    bugs=("axolotl-ai-cloud/axolotl#3597",),
)
class ShardsKeepFullStorages(Adapter):
    """The shards of the optimizer's state are views that keep full tensors alive."""

    def optimizer_step(self, w: Wrapped) -> None:
        """Move each shard into a storage of the full size."""
        super().optimizer_step(w)
        for state in w.optimizer.state.values():
            for value in state.values():
                if isinstance(value, DTensor):
                    value._local_tensor = _view_of_full(value._local_tensor, value.numel())


def _view_of_full(shard: Any, numel: int) -> Any:
    part = torch.empty(numel, dtype=shard.dtype, device=shard.device)[: shard.numel()]
    return part.view(shard.shape).copy_(shard)


@mutant(
    check="sharding.loaded",
    cause=Cause.NOT_SHARDED,
    case="mlp/checkpoint/kind=sharded,options=default",
    base="torch.fully_shard",
    bugs=("axolotl-ai-cloud/axolotl#3597",),
)
class LoadedShardsKeepFullStorages(Adapter):
    """Only a load leaves shards of the optimizer's state that are views of full tensors."""

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Move each shard into a storage of the full size."""
        super().load_optim_state(w, kind, state)
        for values in w.optimizer.state.values():
            for value in values.values():
                if isinstance(value, DTensor):
                    value._local_tensor = _view_of_full(value._local_tensor, value.numel())


@mutant(
    check="sharding.saved",
    cause=Cause.NOT_SHARDED,
    case="mlp/checkpoint/kind=sharded,options=default",
    base="fsdp.fully_shard",
)
class FullStateForASharded(Adapter):
    """Every rank gets the whole state, whatever kind was asked for."""

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> Any:
        """A full one."""
        return super().model_state(w, "full", cpu=cpu)

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Any) -> None:
        """A full one, too."""
        super().load_model_state(w, "full", state)
