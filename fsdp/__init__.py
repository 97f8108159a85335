"""Sharded data parallel training: a reference implementation, small enough to read in a day.

Reading order: ``composable`` or ``wrapper`` (the two public faces), ``engine.forward`` and
``engine.backward`` (when things happen), ``engine.param_group`` (what one group does),
``engine.layout`` (where every element lives), then the rest of ``engine``.
"""

from typing import Any

from fsdp.api import (
    AllGather,
    Comm,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from fsdp.composable import fully_shard
from fsdp.engine.mesh import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from fsdp.engine.unshard_handle import UnshardHandle
from fsdp.flat_parameter import FlatParameter
from fsdp.grad_scaler import ShardedGradScaler
from fsdp.module import (
    FSDPModule,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp.optim_state.vocabulary import OptimStateKeyType
from fsdp.placement import ShardPlacementResult
from fsdp.wrapper import FullyShardedDataParallel
from fsdp.wrapper_options import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "Comm",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "HSDPMeshInfo",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ReduceScatter",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_OF_CHECKPOINT = frozenset({"get_state_dict", "set_state_dict"})


def __getattr__(name: str) -> Any:
    """Import ``fsdp.checkpoint`` at its first use: what it stands on takes a second to load."""
    if name in _OF_CHECKPOINT:
        from fsdp import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
