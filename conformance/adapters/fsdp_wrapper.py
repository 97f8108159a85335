"""The reference implementation's ``FullyShardedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

import fsdp
from conformance.adapter import Wrapped, clean_fqn
from conformance.adapters.covering import pairs
from conformance.adapters.flat import Entry
from conformance.adapters.flat_states import STATES, FlatStatesAdapter, state_types_of
from conformance.adapters.fsdp_checkpoint import OwnCheckpoint
from conformance.adapters.precision import FlatPrecision
from conformance.adapters.wrapping import hybrid_variants
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel
from fsdp.wrapper_options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)


def entries(root: nn.Module) -> list[Entry]:
    """Every original parameter of every unit under `root`, from its layout."""
    names: dict[tuple[nn.Module, str], list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name in (*module._parameters, *module.__dict__):
            names.setdefault((module, name), []).append(clean_fqn(f"{path}.{name}".lstrip(".")))
    return [
        entry
        for unit in FullyShardedDataParallel.fsdp_modules(root)
        for group in unit._state.groups
        for entry in _of_group(group, names)
    ]


def _of_group(group: Any, names: Mapping[tuple[nn.Module, str], list[str]]) -> Iterator[Entry]:
    info, shard = group.mesh_info, group.shard
    flat = getattr(group.options.exposure, "_flat", None)
    for index, param in enumerate(shard.plain):
        piece = shard.layout.piece(index, info.shard_rank)
        yield Entry(
            fqns=tuple(fqn for owner in param.info.owners() for fqn in names[owner]),
            shape=tuple(param.shape),
            stride=None if param.contiguous else param.stride,
            first=piece.start,
            count=piece.numel,
            offset=piece.offset,
            flat=shard.data if flat is None else flat,
            original=param.original,
            group=info.shard_group,
        )


class FullyShardedAdapter(OwnCheckpoint, FlatStatesAdapter):
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
            "two_forwards",
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
        return entries(root)

    def make_scaler(self, w: Wrapped, device: torch.device) -> fsdp.ShardedGradScaler:
        """Its own."""
        return fsdp.ShardedGradScaler(device.type)


class PairsAdapter(FullyShardedAdapter):
    """The same, in variants among which every two options meet."""

    variants = pairs()


class PrecisionAdapter(FlatPrecision, FullyShardedAdapter):
    """The same in low dtypes, as variants."""

    precision = MixedPrecision


class MeshesAdapter(FullyShardedAdapter):
    """The same over every mesh of four ranks, as variants."""

    variants = hybrid_variants()
