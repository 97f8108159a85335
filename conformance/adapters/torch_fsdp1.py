"""PyTorch's ``FullyShardedDataParallel``: flat parameters, or views of them with original names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from conformance.adapter import (
    BuildConfig,
    Conventions,
    OptimizerFactory,
    Refusal,
    StateKind,
    Wrapped,
)
from conformance.adapters import torch_flat
from conformance.adapters.torch_checkpoint import CheckpointDirectory, from_rank0, only_rank0_holds

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID)
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


def variants() -> dict[str, dict[str, Any]]:
    """Both kinds of parameters under every strategy; hybrid meshes are (replicas, the rest)."""
    table: dict[str, dict[str, Any]] = {}
    for original in (False, True):
        for strategy in STRATEGIES:
            names = ["use_orig_params"] if original else []
            names += [] if strategy == "FULL_SHARD" else [strategy]
            table[",".join(names) or "default"] = {
                "use_orig_params": original,
                "sharding_strategy": strategy,
                **({"replicas": 1} if strategy in HYBRID else {}),
            }
    for original in (False, True):
        name = "use_orig_params,HYBRID_SHARD,replicas=2" if original else "HYBRID_SHARD,replicas=2"
        table[name] = {
            "use_orig_params": original,
            "sharding_strategy": "HYBRID_SHARD",
            "replicas": 2,
        }
    return table


class FullyShardedAdapter(CheckpointDirectory):
    """Wraps the units that the model case names, then the root."""

    name: ClassVar[str] = "torch.FullyShardedDataParallel"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = variants()
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

    # one flat gradient per unit: a unit that took part has zeros where a parameter did not
    conventions = Conventions(unused_grad="unit")

    def configure(self, options: Mapping[str, Any]) -> None:
        """Claims by strategy and kind of parameters."""
        strategy = options["sharding_strategy"]
        if strategy in ("FULL_SHARD", "HYBRID_SHARD"):
            self.capabilities |= {"memory.reshard"}
        if strategy == "NO_SHARD":
            self.capabilities -= {"shard.parameters", "shard.optimizer", *SHARDED_STATES}
        # local state exists for flat parameters that are sharded without a device mesh
        if options["use_orig_params"] or strategy in ("NO_SHARD", *HYBRID):
            self.capabilities -= LOCAL_STATES
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
        with _deprecations_ignored():
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
        return torch_flat.full_parameters(torch_flat.entries(w.module))

    def full_gradients(self, w: Wrapped) -> dict[str, Tensor | None]:
        """Gathered by position."""
        return torch_flat.full_gradients(torch_flat.entries(w.module))

    def full_optimizer_state(self, w: Wrapped) -> dict[str, dict[str, Any]]:
        """Gathered by position."""
        return torch_flat.full_optimizer_state(torch_flat.entries(w.module), w.optimizer)

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


def hybrid_mesh(config: BuildConfig, replicas: int) -> Any:
    """A mesh (replicas, ranks per replica).

    Raises:
        Refusal: the ranks cannot be divided into that many replicas.
    """
    world = config.world_size
    if world % replicas:
        raise Refusal(f"{world} ranks cannot form {replicas} replicas of equal size")
    return init_device_mesh(
        config.device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )


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
        _deprecations_ignored(),
        FullyShardedDataParallel.state_dict_type(
            module, state_type, model_config(**given), optim_config(**given)
        ),
    ):
        yield


@contextmanager
def _deprecations_ignored() -> Iterator[None]:
    """Inside, FutureWarnings are silent: this adapter drives the old interface on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
