"""The reference implementation's ``FullyShardedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from conformance.adapter import StateKind, Wrapped, clean_fqn
from conformance.adapters.flat import Entry
from conformance.adapters.torch_checkpoint import from_rank0
from conformance.adapters.wrapping import WrapperAdapter
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel
from fsdp.wrapper_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
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
            stride=None,
            first=piece.start,
            count=piece.numel,
            offset=piece.offset,
            flat=shard.data if flat is None else flat,
            original=param.original,
            group=info.shard_group,
        )


class FullyShardedAdapter(WrapperAdapter):
    """With its full model state."""

    name: ClassVar[str] = "fsdp.FullyShardedDataParallel"
    wrapper = FullyShardedDataParallel
    strategies = ShardingStrategy
    policy = ModuleWrapPolicy
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
