"""The reference implementation's ``FullyShardedDataParallel``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from conformance.adapter import (
    Adapter,
    BuildConfig,
    Conventions,
    OptimizerFactory,
    StateKind,
    Wrapped,
    clean_fqn,
)
from conformance.adapters import torch_flat
from conformance.adapters.torch_checkpoint import from_rank0
from conformance.adapters.torch_flat import Entry
from conformance.adapters.torch_fsdp1 import hybrid_mesh, variants
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel
from fsdp.wrapper_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
)


class FullyShardedAdapter(Adapter):
    """Wraps the units that the model case names, then the root."""

    name: ClassVar[str] = "fsdp.FullyShardedDataParallel"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = variants()
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

    # one flat gradient per unit: a unit that took part has zeros where a parameter did not
    conventions = Conventions(unused_grad="unit")

    def configure(self, options: Mapping[str, Any]) -> None:
        """Claims by strategy."""
        strategy = options["sharding_strategy"]
        if strategy in ("FULL_SHARD", "HYBRID_SHARD"):
            self.capabilities |= {"memory.reshard"}
        if strategy == "NO_SHARD":
            self.capabilities -= {"shard.parameters", "shard.optimizer"}
        self.replicas = options.get("replicas", 1)

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Wrap by module class; the optimizer is made over what the wrapper exposes."""
        options = dict(config.options)
        strategy = ShardingStrategy[options.pop("sharding_strategy")]
        replicas = options.pop("replicas", None)
        if replicas is not None:
            options["device_mesh"] = hybrid_mesh(config, replicas)
        with _warnings_of_strategies_ignored():
            wrapped = FullyShardedDataParallel(
                model,
                sharding_strategy=strategy,
                auto_wrap_policy=ModuleWrapPolicy(set(config.units)),
                device_id=config.device,
                **options,
            )
        return Wrapped(module=wrapped, optimizer=make_optimizer(wrapped.parameters()))

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """The wrapper's own context."""
        context: AbstractContextManager[Any] = w.module.no_sync()  # type: ignore[operator]
        return context

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor:
        """The wrapper's own method, which sees all shards."""
        norm: Tensor = w.module.clip_grad_norm_(max_norm, norm_type)  # type: ignore[operator]
        return norm

    def full_parameters(self, w: Wrapped) -> dict[str, Tensor]:
        """Gathered by position."""
        return torch_flat.full_parameters(entries(w.module))

    def full_gradients(self, w: Wrapped) -> dict[str, Tensor | None]:
        """Gathered by position."""
        return torch_flat.full_gradients(entries(w.module))

    def full_optimizer_state(self, w: Wrapped) -> dict[str, dict[str, Any]]:
        """Gathered by position."""
        return torch_flat.full_optimizer_state(entries(w.module), w.optimizer)

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


@contextmanager
def _warnings_of_strategies_ignored() -> Iterator[None]:
    """Inside, NO_SHARD is not reported as deprecated, nor as the choice for a single rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        yield
