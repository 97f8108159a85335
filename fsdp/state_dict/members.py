"""One parameter of a unit in the forms of a state dict, and back.

What ``form.py`` does for plain tensors, and for those that tensor parallelism has cut: these are
cut twice, and become DTensors over both meshes. Knows one parameter at a time and no names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.engine.mesh import DataParallelMeshInfo, device_of
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.torch_private import dtensor_of, local_tensor
from fsdp.flat_parameter import FlatParam, flat_params
from fsdp.state_dict.form import (
    from_chunk,
    gathered,
    is_chunk,
    own_chunk,
    own_rows,
)

Place = tuple[int, torch.Size]


def chunk_of(
    param: FlatParam,
    own: torch.Tensor,
    info: DataParallelMeshInfo,
    *,
    use_dtensor: bool,
    offload_to_cpu: bool = False,
) -> torch.Tensor:
    """Return the value of ``param`` of whose part here ``own`` (rows, ...) is this rank's chunk.

    A chunk of a parameter that was cut becomes a DTensor over the mesh of ``info`` and that of the
    parameter, as ``fully_shard`` has it. Not copied.
    """
    if param.outer is None:
        shape = param.shape
        return from_chunk(own, shape, info, use_dtensor=use_dtensor, offload_to_cpu=offload_to_cpu)
    if offload_to_cpu:
        own = own.cpu()
    return dtensor_of(own, param.outer.chunk_spec(info, own.dtype), requires_grad=False)


def cut(
    param: FlatParam,
    part: torch.Tensor,
    info: DataParallelMeshInfo,
    *,
    use_dtensor: bool,
    offload_to_cpu: bool = False,
) -> torch.Tensor:
    """Return ``part``, all of ``param`` that is not cut before, in the sharded form; a copy."""
    return chunk_of(
        param, own_rows(part, info), info, use_dtensor=use_dtensor, offload_to_cpu=offload_to_cpu
    )


def whole_of(param: FlatParam, part: torch.Tensor) -> torch.Tensor:
    """Return the whole of ``param``, of which ``part`` is here; ``part`` itself if that is all.

    *Collective* over the mesh over which ``param`` was cut, if it was. *Memory*: the whole.
    """
    return part if param.outer is None else param.outer.gathered(part)


def is_own_chunk(param: FlatParam, value: torch.Tensor, info: DataParallelMeshInfo) -> bool:
    """Whether ``value`` is cut as ``chunk_of`` does, so that nobody has to gather it."""
    if param.outer is None:
        return is_chunk(value, info)
    spec = param.outer.chunk_spec(info, value.dtype)
    placements = getattr(value, "placements", None)
    return placements == spec.placements and getattr(value, "device_mesh", None) == spec.mesh


def to_load(param: FlatParam, value: torch.Tensor, info: DataParallelMeshInfo) -> torch.Tensor:
    """Return this rank's chunk (rows, ...) of the part here of ``value``, in any form.

    *Collective* over the ranks of a value that is cut in another way. *Memory*: then, the whole.
    """
    if param.outer is None:
        return own_chunk(value, info)
    if is_own_chunk(param, value, info):
        return local_tensor(value).detach()
    return own_rows(part_of(param, value, info), info)


def part_of(param: FlatParam, value: Any, info: DataParallelMeshInfo) -> Any:
    """Return what is here of ``value``, whole or cut in any way, on the device of ``info``.

    All of it where nothing was cut; what is no tensor, or of another shape, as it is.

    *Collective* over the ranks of a value that is cut in another way. *Memory*: then, the whole.
    """
    if not isinstance(value, torch.Tensor):
        return value
    device = device_of(info.mesh)
    outer = param.outer
    if outer is None or not outer.is_form(value):
        value = gathered(value, device, group=info.shard_group)
    return param.inside(value).detach()


@contextmanager
def parts_of_entries(groups: Iterable[FSDPParamGroup]) -> Iterator[None]:
    """Let modules that are loaded take whole entries, or any other, for what was cut.

    After their own hooks, which see the entries as they are.

    *Collective*, *Memory*: as ``part_of``, at the load of each module that has such a parameter.
    """
    handles = [
        module.register_load_state_dict_pre_hook(partial(_take_part, param, group.mesh_info, name))
        for group in groups
        for param in flat_params(group.fsdp_params)
        if param.outer is not None
        for module, name in param.info.owners()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _take_part(
    param: FlatParam,
    info: DataParallelMeshInfo,
    name: str,
    _module: nn.Module,
    found: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    value = found.get(prefix + name)
    if is_of(param, value):
        found[prefix + name] = param.shown(part_of(param, value, info))


def is_of(param: FlatParam, value: Any) -> bool:
    """Whether ``value`` has the shape of ``param``."""
    return isinstance(value, torch.Tensor) and value.shape == param.outer_shape


def place_of_part(value: Any) -> Place | None:
    """Return where the local tensor of a DTensor lies, and its shape; None of anything else."""
    if not isinstance(value, DTensor):
        return None
    local = local_tensor(value)
    return local.data_ptr(), local.shape
