"""Sharded data parallel training: a reference implementation, small enough to read in a day.

Reading order: ``composable`` (the public face), ``engine.unit`` (when things happen),
``engine.param_group`` (what one group does), ``engine.layout`` (where every element lives),
then the rest of ``engine``.
"""

from fsdp.api import (
    AllGather,
    Comm,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from fsdp.composable import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    fully_shard,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp.dtensor import ShardPlacementResult
from fsdp.engine.mesh import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
