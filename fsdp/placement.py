"""Over which mesh and with which placements a parameter is shown as a DTensor. No memory.

A plain parameter is sharded over the data-parallel mesh; one that is a DTensor already (tensor or
expert parallelism) gets the data-parallel dims before its own, or in place of its replicated ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp.engine.mesh import DataParallelMeshInfo, FSDPMeshInfo
from fsdp.engine.torch_private import (
    DTensorSpec,
    concatenate_meshes,
    make_spec,
    spec_of,
    strided_shard,
)

_MAX_MODEL_PARALLEL_DIMS = 2


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a ``shard_placement_fn`` may return to choose placement and mesh.

    Attributes:
        placement: the dim to shard on; None: dim 0.
        mesh_info: over which ranks.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


ShardPlacementFnResult = Shard | ShardPlacementResult | None


def resolve_placement(
    result: ShardPlacementFnResult, info: DataParallelMeshInfo
) -> tuple[Shard, DataParallelMeshInfo]:
    """Return placement and mesh of what a user's function said.

    Raises:
        ValueError: it is none of the three things it may be.
    """
    if result is None:
        return Shard(0), info
    if isinstance(result, Shard):
        return result, info
    if isinstance(result, ShardPlacementResult):
        return result.placement or Shard(0), result.mesh_info
    raise ValueError(
        f"Invalid shard_placement_fn result: {result}; return None, Shard(dim), or a "
        "ShardPlacementResult"
    )


def data_parallel_dims(original: nn.Parameter, info: DataParallelMeshInfo) -> frozenset[int]:
    """Return the mesh dims of a parameter over which this package reduces its gradient."""
    dims = info.dp_mesh_dims
    if dims is None or not isinstance(original, DTensor):
        return frozenset()
    names = spec_of(original).mesh.mesh_dim_names or ()
    wanted = (*dims.shard_names, *dims.replicate_names)
    return frozenset(names.index(name) for name in wanted)


def sharding_spec(
    original: nn.Parameter, name: str, info: DataParallelMeshInfo, dim: int
) -> DTensorSpec:
    """Describe ``original`` once its ``dim`` is sharded over the mesh of ``info``.

    Raises:
        ValueError: a parameter that does not fit ``dp_mesh_dims``.
        NotImplementedError: more model-parallel dims than two.
    """
    if info.dp_mesh_dims is not None:
        if not isinstance(original, DTensor):
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full "
                f"SPMD mesh (e.g. via distribute_module). Got plain tensor for parameter '{name}'."
            )
        return _spec_on_named_mesh(original, info, dim)
    if isinstance(original, DTensor):
        return beside_model_parallel(spec_of(original), info, dim)
    return make_spec(
        info.mesh,
        _data_parallel_placements(info, Shard(dim)),
        shape=original.shape,
        stride=original.stride(),
        dtype=original.dtype,
    )


def _data_parallel_placements(
    info: DataParallelMeshInfo, shard: Placement
) -> tuple[Placement, ...]:
    placements: list[Placement] = []
    if info.replicate_mesh_dim is not None:
        placements.append(Replicate())
    if info.shard_mesh_dim is not None:
        placements.append(shard)
    return tuple(placements)


def _shards_on(placements: Sequence[Placement], dim: int, mesh: DeviceMesh, first: int) -> int:
    """Return over how many ranks mesh dims from ``first`` on shard ``dim``."""
    factor = 1
    for index in range(first, mesh.ndim):
        if getattr(placements[index], "dim", None) == dim:
            factor *= mesh.size(index)
    return factor


def beside_model_parallel(spec: DTensorSpec, info: DataParallelMeshInfo, dim: int) -> DTensorSpec:
    """Put the data-parallel dims before those of tensor or expert parallelism in ``spec``.

    Raises:
        NotImplementedError: more model-parallel dims than two.
    """
    if len(spec.placements) > _MAX_MODEL_PARALLEL_DIMS:
        raise NotImplementedError(f"FSDP only supports 1D TP/EP or 2D EP+TP, not {spec.placements}")
    mesh = concatenate_meshes([info.mesh, spec.mesh])
    factor = _shards_on(spec.placements, dim, spec.mesh, 0)
    # Model parallelism cut first, so a rank's rows are strided in the whole parameter.
    shard = strided_shard(dim, factor) if factor > 1 else Shard(dim)
    placements = (*_data_parallel_placements(info, shard), *spec.placements)
    return DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)


def _spec_on_named_mesh(original: DTensor, info: DataParallelMeshInfo, dim: int) -> DTensorSpec:
    """Replace Replicate by the shard on the named data-parallel dims of the parameter's mesh."""
    spec, dims = spec_of(original), info.dp_mesh_dims
    assert dims is not None
    if spec.mesh is not info.spmd_mesh:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got "
            "different mesh objects"
        )
    names = spec.mesh.mesh_dim_names or ()
    for role, role_names in (("shard", dims.shard_names), ("replicate", dims.replicate_names)):
        for name in role_names:
            found = spec.placements[names.index(name)]
            if not isinstance(found, Replicate):
                raise ValueError(
                    f"Expected Replicate() on DP {role} dim '{name}' "
                    f"(index {names.index(name)}) but got {found}"
                )
    placements = list(spec.placements)
    for name in dims.shard_names:
        index = names.index(name)
        factor = _shards_on(spec.placements, dim, spec.mesh, index + 1)
        placements[index] = strided_shard(dim, factor) if factor > 1 else Shard(dim)
    if len(dims.shard_names) <= 1:
        return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
    return _flattened_spec(spec, info, placements)


def _flattened_spec(
    spec: DTensorSpec, info: DataParallelMeshInfo, placements: Sequence[Placement]
) -> DTensorSpec:
    """Show several shard dims as the one flattened dim that this package shards over."""
    dims = info.dp_mesh_dims
    assert dims is not None
    names = spec.mesh.mesh_dim_names or ()
    meshes: list[DeviceMesh] = []
    shown: list[Placement] = []
    for index, name in enumerate(names):
        if name == dims.shard_names[0]:
            meshes.append(info.mesh)
            shown.extend(_data_parallel_placements(info, placements[index]))
        elif name not in dims.shard_names and name not in dims.replicate_names:
            meshes.append(spec.mesh[name])
            shown.append(placements[index])
    return DTensorSpec(concatenate_meshes(meshes), tuple(shown), tensor_meta=spec.tensor_meta)
