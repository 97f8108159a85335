"""The reference implementation's ``FullyShardedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from conformance.adapter import StateKind, Wrapped, clean_fqn
from conformance.adapters.covering import CoveringAdapter, pairs
from conformance.adapters.flat import Entry
from conformance.adapters.torch_checkpoint import from_rank0
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel
from fsdp.wrapper_options import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
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


class FullyShardedAdapter(CoveringAdapter):
    """With its full model state."""

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
            "two_forwards",
            "unused_parameters",
            "shard.parameters",
            "shard.optimizer",
            "model_state.full",
        }
    )

    def entries(self, root: nn.Module) -> list[Entry]:
        """From the wrapper's own layout."""
        return entries(root)

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The wrapper's own full state."""
        self._plain(kind, "model_state")
        config: dict[str, bool] = {"rank0_only": rank0_only}
        with FullyShardedDataParallel.state_dict_type(
            w.module,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=cpu, **config),
            FullOptimStateDictConfig(**config),
        ):
            return dict(w.module.state_dict())

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """A state that rank 0 alone holds is broadcast: the wrapper wants it on all ranks."""
        self._plain(kind, "load_model_state")
        w.module.load_state_dict(from_rank0(state))


class PairsAdapter(FullyShardedAdapter):
    """The same, in variants among which every two options meet."""

    variants = pairs()
