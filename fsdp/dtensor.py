"""The exposure of ``fully_shard``: one DTensor per parameter while it is sharded.

Turns an original parameter into (plain local tensor, DTensor spec), and plain memory back into
DTensors. Knows placements; knows nothing of collectives' order or of hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp.engine.layout import Extent, side_by_side
from fsdp.engine.mesh import DataParallelMeshInfo, FSDPMeshInfo
from fsdp.engine.param import FSDPParam, ParamModuleInfo, uid_of
from fsdp.engine.torch_private import (
    AsyncCollectiveTensor,
    DTensorSpec,
    concatenate_meshes,
    dtensor_of,
    local_tensor,
    make_spec,
    post_accumulate_hooks,
    set_local_tensor,
    spec_of,
    spec_with_dtype,
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


def shard_parameter(
    original: nn.Parameter,
    owners: ParamModuleInfo,
    info: DataParallelMeshInfo,
    placement: Shard,
    *,
    offload: bool = False,
) -> FSDPParam:
    """Replace ``original`` on its owners by this rank's part of it, on the CPU if ``offload``.

    *Memory*: one padded piece. *Collective*: no.

    Raises:
        NotImplementedError: not contiguous, or a dim other than 0 that does not divide.
        AssertionError: the parameter has no such dim.
        ValueError: a parameter that does not fit ``dp_mesh_dims``.
    """
    name = owners.param_name
    if not original.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: {name} has "
            f"shape={tuple(original.shape)} stride={original.stride()}"
        )
    whole = local_tensor(original) if isinstance(original, DTensor) else original.data
    dim = placement.dim + original.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < whole.ndim:
        raise AssertionError(
            f"Shard dim {placement.dim} is invalid for {whole.ndim}D tensor: {original.shape}"
        )
    if dim > 0 and whole.shape[dim] % info.shard_size:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {name} has "
            f"{tuple(whole.shape)} (world size: {info.shard_size})"
        )
    spec = _sharding_spec(original, name, info, dim)
    piece = side_by_side([Extent.of(whole.shape, dim)], info.shard_size).piece(0, info.shard_rank)
    # A copy: a view would keep the whole parameter alive until it is moved into a shard.
    local = whole.narrow(dim, piece.start, piece.stop - piece.start).clone(
        memory_format=torch.contiguous_format
    )
    if offload and local.device.type != "meta":
        # Before it is wrapped: a DTensor reports the device it was made with.
        local = local.cpu()
    sharded = nn.Parameter(
        dtensor_of(local, spec, requires_grad=False), requires_grad=original.requires_grad
    )
    param = FSDPParam(
        info=owners,
        uid=uid_of(original),
        shape=whole.shape,
        dim=dim,
        dtype=original.dtype,
        sharded=sharded,
        spec=spec,
        whole_spec=spec_of(original) if isinstance(original, DTensor) else None,
        data_parallel_dims=_data_parallel_dims(original, info),
    )
    param.install(sharded)
    return param


def _data_parallel_dims(original: nn.Parameter, info: DataParallelMeshInfo) -> frozenset[int]:
    """Return the mesh dims of a parameter over which this package reduces its gradient."""
    dims = info.dp_mesh_dims
    if dims is None or not isinstance(original, DTensor):
        return frozenset()
    names = spec_of(original).mesh.mesh_dim_names or ()
    wanted = (*dims.shard_names, *dims.replicate_names)
    return frozenset(names.index(name) for name in wanted)


def _sharding_spec(
    original: nn.Parameter, name: str, info: DataParallelMeshInfo, dim: int
) -> DTensorSpec:
    if info.dp_mesh_dims is not None:
        if not isinstance(original, DTensor):
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full "
                f"SPMD mesh (e.g. via distribute_module). Got plain tensor for parameter '{name}'."
            )
        return _spec_on_named_mesh(original, info, dim)
    if isinstance(original, DTensor):
        return _spec_beside_model_parallel(original, info, dim)
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


def _spec_beside_model_parallel(
    original: DTensor, info: DataParallelMeshInfo, dim: int
) -> DTensorSpec:
    """Put the data-parallel dims before those of tensor or expert parallelism."""
    spec = spec_of(original)
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


class DTensorExposure:
    """Registers one DTensor per parameter; gradients are DTensors of the same placements."""

    def local(self, param: FSDPParam) -> torch.Tensor:
        """Return the local tensor of the registered parameter."""
        return local_tensor(param.sharded)

    def bind(self, param: FSDPParam, piece: torch.Tensor) -> None:
        """Point the DTensor at ``piece``; optimizers keep the object."""
        set_local_tensor(param.sharded, piece)

    def reread(self, param: FSDPParam) -> None:
        """Adopt a parameter that the user registered since.

        Raises:
            ValueError: it is no DTensor, or is cut in another way.
        """
        found: torch.Tensor | None = param.registered()
        if found is param.unsharded and found is not None:
            return
        if not isinstance(found, DTensor) or not isinstance(found, nn.Parameter):
            raise ValueError(
                f"parameter '{param.fqn or param.info.param_name}' was replaced after sharding by "
                f"{type(found).__name__}; wanted a DTensor Parameter with placements "
                f"{param.spec.placements}. Use distribute_tensor on the mesh, or replace it before "
                "sharding."
            )
        spec = spec_of(found)
        if spec.placements != param.spec.placements or spec.shape != param.spec.shape:
            raise ValueError(
                f"parameter '{param.fqn or param.info.param_name}' was replaced after sharding by "
                f"one of shape {tuple(spec.shape)} and placements {spec.placements}; wanted "
                f"{tuple(param.spec.shape)} and {param.spec.placements}"
            )
        if found is not param.sharded:
            param.sharded = cast("nn.Parameter", found)
            param.install(param.sharded)
        param.spec = spec

    def leaf(self, param: FSDPParam, whole: torch.Tensor) -> nn.Parameter:
        """Make the leaf of forward and backward: a plain tensor, or a DTensor under TP."""
        if param.whole_spec is not None:
            spec = spec_with_dtype(param.whole_spec, whole.dtype)
            whole = dtensor_of(whole, spec, requires_grad=False)
        return nn.Parameter(whole, requires_grad=param.sharded.requires_grad)

    def post_forward(
        self, param: FSDPParam, piece: torch.Tensor, info: DataParallelMeshInfo
    ) -> nn.Parameter:
        """Make the DTensor over the smaller mesh: replicated over its groups, sharded inside."""
        if param.whole_spec is not None:
            raise NotImplementedError(
                "Resharding to smaller mesh is not supported for DTensor parameters yet: "
                f"'{param.fqn}'"
            )
        spec = make_spec(
            info.mesh,
            (Replicate(), Shard(param.dim)),
            shape=param.shape,
            stride=param.spec.tensor_meta.stride,
            dtype=piece.dtype,
        )
        return nn.Parameter(
            dtensor_of(piece, spec, requires_grad=False), requires_grad=param.sharded.requires_grad
        )

    def plain_gradient(self, param: FSDPParam, gradient: torch.Tensor) -> torch.Tensor:
        """Return the local gradient, in the parameter's own placements under TP.

        *Collective* over the tensor-parallel mesh if the gradient is a partial sum there.
        """
        if param.whole_spec is None:
            return gradient
        if isinstance(gradient, AsyncCollectiveTensor):
            gradient = gradient.wait()
        if not isinstance(gradient, DTensor):
            raise AssertionError(
                f"Expected the gradient of '{param.fqn}' to be a DTensor, got {type(gradient)}"
            )
        wanted = tuple(
            found if index in param.data_parallel_dims else placement
            for index, (found, placement) in enumerate(
                zip(gradient.placements, param.whole_spec.placements, strict=True)
            )
        )
        if wanted != gradient.placements:
            gradient = gradient.redistribute(placements=wanted)
        local = local_tensor(gradient)
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    def accumulates(self, param: FSDPParam) -> bool:
        """Whether a gradient is there already, or user code waits for this one."""
        return param.sharded.grad is not None or bool(post_accumulate_hooks(param.sharded))

    def hand_over(self, params: Sequence[FSDPParam], pieces: Sequence[torch.Tensor]) -> None:
        """Set the gradients, or add to those that are there; then run the users' hooks."""
        sums: list[torch.Tensor] = []
        addends: list[torch.Tensor] = []
        hooked: list[nn.Parameter] = []
        for param, piece in zip(params, pieces, strict=True):
            sharded = param.sharded
            present = sharded.grad
            if sharded._post_accumulate_grad_hooks:
                hooked.append(sharded)
            if present is None:
                sharded.grad = dtensor_of(piece, param.spec, requires_grad=False)
                continue
            if not isinstance(present, DTensor):
                raise AssertionError(
                    f"Expected the gradient of '{param.fqn}' to be a DTensor, got {type(present)}"
                )
            sums.append(local_tensor(present))
            addends.append(piece)
        if sums:
            torch._foreach_add_(sums, addends)
        for sharded in hooked:
            for hook in post_accumulate_hooks(sharded):
                hook(sharded)
