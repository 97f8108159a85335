"""Over which ranks a group shards and over which it replicates. No parameters, no buffers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp.api import DataParallelMeshDims
from fsdp.engine.torch_private import concatenate_meshes


@dataclass(eq=False)
class DataParallelMeshInfo:
    """A mesh and the role of its dims; at least one of the two roles is taken.

    World 1, "no sharding" and "no replication" are sizes of 1 here, not cases.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)

    shard_group: dist.ProcessGroup | None = field(default=None, init=False, repr=False)
    shard_size: int = field(default=1, init=False)
    shard_rank: int = field(default=0, init=False)
    replicate_group: dist.ProcessGroup | None = field(default=None, init=False, repr=False)
    replicate_size: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise AssertionError(
                "At least one of shard_mesh_dim and replicate_mesh_dim must not be None"
            )
        if self.shard_mesh_dim is not None:
            self.shard_group = self.mesh.get_group(self.shard_mesh_dim)
            self.shard_size = self.mesh.size(self.shard_mesh_dim)
            self.shard_rank = self.shard_group.rank()
        if self.replicate_mesh_dim is not None:
            self.replicate_group = self.mesh.get_group(self.replicate_mesh_dim)
            self.replicate_size = self.mesh.size(self.replicate_mesh_dim)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh of the shard dim alone."""
        if self.mesh.ndim == 1:
            return self.mesh
        names = self.mesh.mesh_dim_names
        if names is None:
            raise AssertionError("a mesh of two dims needs dim names to be sliced")
        return self.mesh[names[-1]]

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups this rank is in: shard first, then replicate."""
        return tuple(g for g in (self.shard_group, self.replicate_group) if g is not None)


@dataclass(eq=False)
class FSDPMeshInfo(DataParallelMeshInfo):
    """Shards over ``shard_mesh_dim``."""

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None:
            raise AssertionError("Expects non-None shard_mesh_dim")
        super().__post_init__()


@dataclass(eq=False)
class DDPMeshInfo(DataParallelMeshInfo):
    """Replicates over ``replicate_mesh_dim`` and shards over nothing."""

    def __post_init__(self) -> None:
        if self.replicate_mesh_dim is None:
            raise AssertionError("Expects non-None replicate_mesh_dim")
        super().__post_init__()


@dataclass(eq=False)
class HSDPMeshInfo(FSDPMeshInfo):
    """Shards over ``shard_mesh_dim`` and replicates over ``replicate_mesh_dim``."""

    def __post_init__(self) -> None:
        if self.replicate_mesh_dim is None:
            raise AssertionError("Expects non-None replicate_mesh_dim")
        super().__post_init__()


def default_device() -> torch.device:
    """Return the current accelerator with its index, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where messages lie: on the host if the group knows nothing but the host."""
    if not dist.is_initialized() or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return default_device()


def default_mesh() -> DeviceMesh:
    """Return a 1-D mesh over the default group, which is started if it was not.

    Raises:
        ValueError: the environment does not say how to start it.

    *Collective*: over all ranks. The device is the current accelerator, or the CPU without one.
    """
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:
            raise ValueError(
                f"there is no process group, and none could be started: {error}. Call "
                "torch.distributed.init_process_group first, or start the script with torchrun."
            ) from error
    return init_device_mesh(default_device().type, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def mesh_info_of(
    mesh: DeviceMesh, dims: DataParallelMeshDims | None, function: str = "FSDP"
) -> DataParallelMeshInfo:
    """Check ``mesh`` and give its dims their roles.

    Raises:
        ValueError: the mesh has neither one nor two dims, or ``dims`` names what is not there.
        AssertionError: a 2-D mesh without dim names.
    """
    if dims is not None:
        return _from_named_dims(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"{function} expects a 1D or 2D DeviceMesh but got {mesh}. Pass the data-parallel "
            "slice of the mesh, or name its dims with dp_mesh_dims."
        )
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _from_named_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
    if not dims.shard_names:
        return DDPMeshInfo(
            _submesh(mesh, dims.replicate_names),
            replicate_mesh_dim=0,
            dp_mesh_dims=dims,
            spmd_mesh=mesh,
        )
    shard = _submesh(mesh, dims.shard_names)
    if not dims.replicate_names:
        return FSDPMeshInfo(shard, shard_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    both = concatenate_meshes([_submesh(mesh, dims.replicate_names), shard])
    return HSDPMeshInfo(
        both, shard_mesh_dim=1, replicate_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh
    )


def _submesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) == 1:
        return mesh[names[0]]
    return mesh[names]._flatten("_".join(names))


def post_forward_mesh_info(
    reshard: bool | int,  # noqa: FBT001 - the two types mean different things to users
    info: DataParallelMeshInfo,
) -> DataParallelMeshInfo | None:
    """Return over what the parameters are sharded between forward and backward.

    *Collective* over all ranks of the mesh if ``reshard`` is a proper divisor.

    Returns:
        None to keep them whole, ``info`` to shard them as before, or a smaller mesh.

    Raises:
        ValueError: neither bool nor int, or an int that does not divide the shard size.
    """
    check_reshard(reshard, info)
    if isinstance(reshard, bool):
        return info if reshard else None
    size = info.shard_size
    if reshard == 1:
        _warn_about_one()
        return None
    if reshard == size:
        return info
    smaller = DeviceMesh(info.mesh.device_type, info.mesh.mesh.view(-1, reshard))
    return HSDPMeshInfo(smaller, shard_mesh_dim=1, replicate_mesh_dim=0)


def check_reshard(reshard: object, info: DataParallelMeshInfo) -> None:
    """Refuse what says nothing about the parameters after forward.

    Raises:
        ValueError: neither bool nor int, or an int that does not divide the shard size.
    """
    if not isinstance(reshard, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {reshard}"
        )
    size = info.shard_size
    if not isinstance(reshard, bool) and (reshard < 1 or size % reshard):
        divisors = ", ".join(str(k) for k in range(1, size + 1) if not size % k)
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{size}, not {reshard}: parameters are sharded over {size} of "
            f"{dist.get_world_size()} ranks. Pass one of {divisors}, or True or False."
        )


def reshard_mesh_info(
    reshard: bool | int | None,  # noqa: FBT001 - what the user passed
    info: DataParallelMeshInfo,
) -> DataParallelMeshInfo | None:
    """Return over what parameters are sharded after forward; see ``post_forward_mesh_info``.

    Raises:
        NotImplementedError: a number of ranks, on a larger named mesh.
    """
    if info.shard_group is None:
        return None  # nothing is sharded, before forward or after
    if info.dp_mesh_dims is not None and isinstance(reshard, int) and reshard not in (True, False):
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    return post_forward_mesh_info(True if reshard is None else reshard, info)


_warned_about_one = False


def _warn_about_one() -> None:
    global _warned_about_one
    if _warned_about_one:
        return
    _warned_about_one = True
    warnings.warn(
        "reshard_after_forward=1 (int) means resharding parameters to world size 1, that is "
        "reshard_after_forward=False; if you meant True, pass the bool",
        UserWarning,
        stacklevel=4,
    )
