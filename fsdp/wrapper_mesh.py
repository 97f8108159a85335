"""From a group, a pair of groups or a mesh to the mesh of a unit, and on which device it computes.

Knows process groups and devices; no parameters are changed here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp.engine.mesh import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    default_device,
)
from fsdp.wrapper_options import STRATEGIES, ShardingStrategy

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
_NAMES = ("replicate", "shard")


def check_groups(
    groups: Any, mesh: DeviceMesh | None, strategy: ShardingStrategy, *, has_policy: bool
) -> None:
    """Refuse groups and meshes that do not fit the strategy; nothing is made.

    Raises:
        ValueError: both are given, or they have the wrong form.
    """
    if groups is not None and mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass "
            "only one of them."
        )
    row = STRATEGIES[strategy]
    if not (row.shards and row.replicates):
        if groups is not None and not isinstance(groups, dist.ProcessGroup):
            raise ValueError(
                f"process_group should be a ProcessGroup for {strategy.name}, got {groups!r}"
            )
        return
    if mesh is not None and mesh.ndim != 2:
        raise ValueError(f"Expected device_mesh to have ndim=2 but got {mesh.ndim}")
    if groups is None and mesh is None and not has_policy:
        raise ValueError(
            f"Manual wrapping with {strategy.name} requires explicit specification of process "
            "group or device_mesh."
        )
    pair = isinstance(groups, tuple) and len(groups) == 2
    if groups is not None and not (pair and all(isinstance(g, dist.ProcessGroup) for g in groups)):
        raise ValueError(
            "Expected process_group to be passed in as either None or a pair (shard group, "
            f"replicate group) of ProcessGroup, but got {type(groups)}"
        )


def make_mesh(
    groups: ProcessGroups, mesh: DeviceMesh | None, strategy: ShardingStrategy, device: torch.device
) -> DeviceMesh:
    """Return the mesh of a unit: 1-D, or (replicate, shard) for the hybrid strategies.

    *Collective*: a pair of groups exchanges its ranks once; without one, groups are made.
    """
    row = STRATEGIES[strategy]
    if mesh is not None:
        return mesh
    if not (row.shards and row.replicates):
        assert not isinstance(groups, tuple)
        group = dist.group.WORLD if groups is None else groups
        assert group is not None, "the default process group is not initialised"
        return DeviceMesh.from_group(group, device.type)
    if groups is None:
        return _mesh_of_nodes(device)
    assert isinstance(groups, tuple)
    return _mesh_of_pair(*groups, device)


def _mesh_of_pair(
    shard: dist.ProcessGroup, replicate: dist.ProcessGroup, device: torch.device
) -> DeviceMesh:
    rows: list[list[int]] = [[]] * replicate.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    return DeviceMesh.from_group(
        [replicate, shard], device.type, mesh=torch.tensor(rows), mesh_dim_names=_NAMES
    )


def _mesh_of_nodes(device: torch.device) -> DeviceMesh:
    """Shard inside a node and replicate over nodes; without an accelerator there is one node."""
    world = dist.get_world_size()
    per_node = torch.accelerator.device_count() if device.type != "cpu" else world
    per_node = min(per_node, world)
    if world % per_node:
        raise ValueError(
            f"a hybrid strategy needs nodes of equal size, got {world} ranks and {per_node} "
            "devices on this node; pass process_group or device_mesh"
        )
    return init_device_mesh(device.type, (world // per_node, per_node), mesh_dim_names=_NAMES)


def mesh_info(mesh: DeviceMesh, strategy: ShardingStrategy) -> DataParallelMeshInfo:
    """Give the dims of ``mesh`` their roles under ``strategy``."""
    row = STRATEGIES[strategy]
    if not row.shards:
        return DDPMeshInfo(mesh, replicate_mesh_dim=0)
    if row.replicates:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return FSDPMeshInfo(mesh, shard_mesh_dim=0)


def settle_strategy(asked: ShardingStrategy, mesh: DeviceMesh) -> ShardingStrategy:
    """Return the strategy for this many ranks: a single rank has nothing to shard."""
    hybrid = STRATEGIES[asked].shards and STRATEGIES[asked].replicates
    world = mesh.size() if hybrid else mesh.size(0)
    if asked is ShardingStrategy.NO_SHARD:
        if world > 1:
            warnings.warn(
                "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use "
                "`DistributedDataParallel` instead.",
                FutureWarning,
                stacklevel=3,
            )
        return asked
    if world == 1 and not hybrid:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {asked} since the world size is 1.",
            UserWarning,
            stacklevel=3,
        )
        return ShardingStrategy.NO_SHARD
    return asked


def compute_device(
    device_id: int | torch.device | None, tensors: Sequence[torch.Tensor], rank: int
) -> torch.device:
    """Return where this unit computes: as asked, where its tensors are, or the accelerator.

    Raises:
        ValueError: ``device_id`` is not where the tensors are.
        RuntimeError: the tensors are on several devices.
    """
    found = list(dict.fromkeys(t.device for t in tensors if t.device.type not in ("cpu", "meta")))
    if len(found) > 1:
        raise RuntimeError(
            f"FSDP only supports single device modules but got params on {set(found)}"
        )
    asked = _device_of_id(device_id)
    if asked is None:
        if not found:
            return default_device()
        if any(t.device.type == "cpu" for t in tensors):
            raise RuntimeError(
                "The module has CPU module parameters and parameters on "
                f"{found[0]}; please pass in device_id argument, which moves them together."
            )
        return found[0]
    if found and found[0] != asked:
        raise ValueError(
            f"Inconsistent compute device and `device_id` on rank {rank}: {found[0]} vs {asked}"
        )
    return asked


def warn_about_cpu(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Say that a module on the CPU stays there until the user moves it."""
    if device.type != "cpu" and any(tensor.device.type == "cpu" for tensor in tensors):
        warnings.warn(
            "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization "
            f"run on CPU. Pass `device_id` to move it to {device} first, or move the wrapped "
            "module yourself before training. `sync_module_states=True` needs it there.",
            UserWarning,
            stacklevel=3,
        )


def _device_of_id(device_id: int | torch.device | None) -> torch.device | None:
    if device_id is None:
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device_id, int):
        if accelerator is None:
            raise ValueError(
                f"device_id={device_id} names an accelerator and there is none; leave it out, or "
                "pass torch.device('cpu')"
            )
        return torch.device(accelerator.type, device_id)
    device = torch.device(device_id)  # a string as well
    if device.type == "cpu":
        return torch.device("cpu")
    if ":" not in str(device):
        index = torch.accelerator.current_device_index()
        warnings.warn(
            f"FSDP got the argument `device_id` {device}, which does not have an explicit index. "
            f"FSDP will use the current device {device.type}:{index}.",
            UserWarning,
            stacklevel=4,
        )
        return torch.device(device.type, index)
    return device
