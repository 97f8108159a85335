"""What a parameter that tensor parallelism has cut is outside of a unit, and back: one place.

Units shard, gather and reduce plain tensors: this rank's part of such a parameter. Users, modules
and state dicts see a DTensor around it, on the mesh over which it was cut. Knows one parameter at a
time; must not know units, flat parameters or names of a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.torch_private import (
    AsyncCollectiveTensor,
    DTensorSpec,
    concatenate_meshes,
    dtensor_of,
    local_tensor,
    spec_of,
    spec_with_dtype,
)
from fsdp.placement import beside_model_parallel

_WHO = "FullyShardedDataParallel"


@dataclass(frozen=True, kw_only=True)
class OuterForm:
    """The form of one parameter: Shard or Replicate on a 1-D mesh beside that of the unit.

    Attributes:
        spec: mesh, placement and meta data of the whole parameter.
    """

    spec: DTensorSpec

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.spec.shape

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks over which it was cut, or which have it alike."""
        return self.spec.mesh.get_group()

    @property
    def is_cut(self) -> bool:
        """Whether the ranks of the group have different elements."""
        return isinstance(self.spec.placements[0], Shard)

    def around(self, local: torch.Tensor) -> DTensor:
        """Return ``local``, this rank's part, as users see it; the memory is the same."""
        spec = spec_with_dtype(self.spec, local.dtype)
        return dtensor_of(local, spec, requires_grad=False)

    def inside(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a value: of this form, whole, or cut in any other way.

        Memory is shared where it can be. A value of another shape comes back as it is.

        *Collective* over the mesh of a DTensor of another form. *Memory*: then, the whole value.
        """
        if value.shape != self.shape:
            return value
        if isinstance(value, DTensor):
            if self.is_form(value):
                return local_tensor(value)
            value = value.full_tensor()
        placement = self.spec.placements[0]
        if not isinstance(placement, Shard):
            return value
        rank, size = self.group.rank(), self.group.size()
        return value.chunk(size, placement.dim)[rank]

    def is_form(self, value: torch.Tensor) -> bool:
        """Whether ``value`` has this form already."""
        return (
            isinstance(value, DTensor)
            and value.placements == self.spec.placements
            and value.device_mesh == self.spec.mesh
        )

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole of which ``local`` is this rank's part; itself if nothing is cut.

        *Collective* over the group, if it is. *Memory*: the whole. *Blocks* the current stream.
        """
        if not self.is_cut:
            return local
        whole: torch.Tensor = self.around(local.contiguous()).full_tensor()
        return whole

    def chunk_spec(self, info: DataParallelMeshInfo, dtype: torch.dtype) -> DTensorSpec:
        """Describe the whole parameter once this rank's part is cut on dim 0 over ``info``."""
        return spec_with_dtype(beside_model_parallel(self.spec, info, 0), dtype)


def outer_form(param: nn.Parameter) -> OuterForm | None:
    """Return the form of ``param``; None for a plain tensor."""
    return OuterForm(spec=spec_of(param)) if isinstance(param, DTensor) else None


def local_gradient(
    gradient: torch.Tensor,
    placements: Sequence[Placement],
    name: str,
    free: Collection[int] = (),
) -> torch.Tensor:
    """Return this rank's part of a gradient of a DTensor, in the placements of the parameter.

    Args:
        gradient: as autograd has left it.
        placements: of the parameter.
        name: of the parameter.
        free: mesh dims over which it may be a partial sum, because it is reduced later.

    *Collective* over the mesh for gradients that are partial sums there.

    Raises:
        AssertionError: no DTensor.
    """
    if isinstance(gradient, AsyncCollectiveTensor):
        gradient = gradient.wait()
    if not isinstance(gradient, DTensor):
        raise AssertionError(
            f"Expected the gradient of '{name}' to be a DTensor, got {type(gradient)}"
        )
    wanted = tuple(
        found if index in free else placement
        for index, (found, placement) in enumerate(
            zip(gradient.placements, placements, strict=True)
        )
    )
    if wanted != gradient.placements:
        gradient = gradient.redistribute(placements=wanted)
    local = local_tensor(gradient)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def check_outer_forms(
    params: Iterable[nn.Parameter], mesh: DeviceMesh, given: DeviceMesh | None
) -> None:
    """Refuse DTensors that a unit cannot shard; nothing is changed, and nothing is sent.

    Args:
        params: all that are to be sharded.
        mesh: over which they are.
        given: the mesh that the user gave; None if that was groups, or nothing.

    Raises:
        ValueError: no mesh was given, or it does not lie beside that of a parameter.
        NotImplementedError: a parameter that was cut in a way that is not supported.
    """
    for param in params:
        if isinstance(param, DTensor):
            what = (
                f"{_WHO}: a parameter of shape {tuple(param.shape)} is a DTensor with placements "
                f"{tuple(param.placements)} on {param.device_mesh}"
            )
            _check_placement(param, what)
            _check_mesh(param, what, mesh, given)


def _check_placement(param: DTensor, what: str) -> None:
    if param.device_mesh.ndim != 1:
        raise NotImplementedError(
            f"{what}: wanted a mesh of one dim, as parallelize_module gives it. fully_shard takes "
            "parameters that are cut over two."
        )
    (placement,) = param.placements
    if type(placement) is Shard:
        size = param.device_mesh.size()
        if param.shape[placement.dim] % size:
            raise NotImplementedError(
                f"{what}: dim {placement.dim} is not cut evenly over {size} ranks. Choose a size "
                "that they divide, or leave the module out of the parallelize plan."
            )
    elif not isinstance(placement, Replicate):
        raise NotImplementedError(
            f"{what}: wanted Shard or Replicate. Redistribute it before wrapping."
        )


def _check_mesh(param: DTensor, what: str, mesh: DeviceMesh, given: DeviceMesh | None) -> None:
    remedy = (
        "Make one mesh with a dim for each, as init_device_mesh(device, (2, 2), mesh_dim_names="
        "('dp', 'tp')), and pass device_mesh=mesh['dp']."
    )
    if given is None:
        raise ValueError(f"{what}, and no device_mesh was given: its ranks are not known. {remedy}")
    own = set(mesh.mesh.flatten().tolist()) & set(param.device_mesh.mesh.flatten().tolist())
    if own != {dist.get_rank()}:
        raise ValueError(
            f"{what}, which shares the ranks {sorted(own)} with device_mesh {given}: wanted meshes "
            f"that have this rank alone in common. {remedy}"
        )
    try:
        concatenate_meshes([mesh, param.device_mesh])
    except (RuntimeError, TypeError) as error:  # the second for a mesh without names of dims
        raise ValueError(
            f"{what}, which is not cut out of the same mesh as device_mesh {given} ({error}). "
            f"{remedy}"
        ) from error
