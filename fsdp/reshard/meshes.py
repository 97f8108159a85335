"""Who holds what of a tensor that lies on a mesh: from placements to integers.

Knows placements, mesh tables and cuts. Must not know units, names of parameters or memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp.engine.layout import Cut
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.torch_private import concatenate_meshes, split_factor_of
from fsdp.outer_form import OuterForm
from fsdp.reshard.dealt import Dealt, Ranks, by_dim, whole
from fsdp.reshard.nested import Boxes

Table = Callable[[list[list[int]]], Ranks]


def dealt_on_mesh(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], table: Table
) -> Dealt | None:
    """Return how a DTensor is dealt out; None if a placement is neither a cut nor a copy.

    Args:
        shape: of the whole tensor.
        mesh: over which it lies.
        placements: one for each dim of the mesh.
        table: makes the ranks of rows, one row for each replica.
    """
    cuts = _in_order(mesh, placements)
    if cuts is None:
        return None
    ranks = table(_rows(mesh, cuts))
    if not cuts:
        return whole(shape, ranks)
    dims = [placements[each].dim % len(shape) for each in cuts]  # type: ignore[attr-defined]
    if len(cuts) == 1:
        return by_dim(shape, ranks, dims[0])
    chunks = tuple((dim, mesh.size(each)) for dim, each in zip(dims, cuts, strict=True))
    return Dealt(shape=tuple(shape), cut=Boxes(shape=tuple(shape), chunks=chunks), ranks=ranks)


def dealt_in_unit(
    outer: OuterForm,
    cut: Cut,
    info: DataParallelMeshInfo,
    order: tuple[int, ...] | None,
    table: Table,
) -> Dealt:
    """Return how a parameter is dealt out that tensor parallelism has cut before its unit did.

    Args:
        outer: its form outside of the unit, which is that of a whole parameter.
        cut: what the unit does with this rank's part.
        info: over which ranks.
        order: in which the elements of the part are enumerated.
        table: see ``dealt_on_mesh``.
    """
    mesh = concatenate_meshes([info.mesh, outer.spec.mesh])
    model, shard = mesh.ndim - 1, info.shard_mesh_dim
    inner = [] if shard is None else [shard]
    shape = tuple(outer.shape)
    if not outer.is_cut:
        return Dealt(shape=shape, cut=cut, ranks=table(_rows(mesh, inner)), order=order)
    dim = outer.spec.placements[0].dim % len(shape)  # type: ignore[attr-defined]
    if order is not None:
        dim, shape = order.index(dim), tuple(shape[each] for each in order)
    boxes = Boxes(
        shape=shape,
        chunks=((dim, mesh.size(model)),),
        inner=cut,
        inner_shards=info.shard_size,
    )
    ranks = table(_rows(mesh, [model, *inner]))
    return Dealt(shape=tuple(outer.shape), cut=boxes, ranks=ranks, order=order)


def _in_order(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int] | None:
    """Return the mesh dims that cut, the first to cut first; None if one does something else.

    Dims cut from left to right, but for a strided one: it cuts what those to its right have left.
    """
    cuts: list[int] = []
    strided: list[int] = []
    for index, each in enumerate(placements):
        factor = split_factor_of(each)
        if factor is not None:
            right = [
                mesh.size(i)
                for i in range(index + 1, mesh.ndim)
                if getattr(placements[i], "dim", None) == each.dim  # type: ignore[attr-defined]
            ]
            if factor != math.prod(right):
                return None
            strided.insert(0, index)
        elif type(each) is Shard:
            cuts.append(index)
        elif not isinstance(each, Replicate):
            return None
    return [*cuts, *strided]


def _rows(mesh: DeviceMesh, cuts: Sequence[int]) -> list[list[int]]:
    """Return a row of ranks for each replica; shards are counted with the first cut outermost."""
    table = mesh.mesh
    copies = [dim for dim in range(table.dim()) if dim not in cuts]
    width = math.prod(table.shape[dim] for dim in cuts)
    rows: list[list[int]] = table.permute(*copies, *cuts).reshape(-1, width).tolist()
    return rows
