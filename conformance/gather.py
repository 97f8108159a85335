"""What this rank holds of distributed tensors, and the whole from what all ranks hold.

``DTensor.full_tensor`` costs milliseconds of host time a tensor; an observed step has hundreds.
Knows how a DTensor's pieces lie. Must not know wrappers, models or what the tensors mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:  # imported for real it takes a second, and ranks with DTensors have it already
    from torch.distributed.tensor import DTensor


class Cut(NamedTuple):
    """A rank's piece of a tensor that is cut along one of its dimensions, as `torch.chunk` cuts it.

    Attributes:
        piece: what this rank holds; empty on ranks beyond the end.
        shape: of the whole.
        dim: dimension that is cut.
        ranks: that hold a piece, in the order of the pieces.
    """

    piece: Tensor
    shape: tuple[int, ...]
    dim: int
    ranks: tuple[int, ...]

    def shape_at(self, index: int) -> tuple[int, ...]:
        """Shape of the piece at `index`."""
        total = self.shape[self.dim]
        step = -(-total // len(self.ranks))
        length = max(0, min(step, total - index * step))
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def joined(self, others: Sequence[Any]) -> Tensor:
        """The whole, from what each of `ranks` has in its place, pieces or not.

        Zeros where a rank has nothing: that rank's own observation shows the gap. NaN where it has
        no such piece.
        """
        return torch.cat([self._fitting(i, other) for i, other in enumerate(others)], dim=self.dim)

    def _fitting(self, index: int, other: Any) -> Tensor:
        due = self.shape_at(index)
        if other is None:
            return self.piece.new_zeros(due)
        fits = isinstance(other, Cut) and other[1:] == self[1:]
        if fits and other.piece.shape == due and other.piece.dtype == self.piece.dtype:
            piece: Tensor = other.piece
            return piece
        return torch.full(due, math.nan)


@torch.no_grad()  # else each `to_local` is a node of autograd
def held(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies on CPU of what this rank holds: of a DTensor cut on one mesh dimension, its `Cut`.

    Other DTensors in full, and what is no tensor as it is.

    Collective: none, but one per sharded dimension of each DTensor that is cut in another way.

    Raises:
        ValueError: a DTensor's local tensor is not the piece that its placements name.
    """
    known: _Ranks = {}
    return {key: _held(key, value, known) for key, value in values.items()}


def full_copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with full copies on CPU of all tensors, in the same order.

    Collective: one object all-gather on the default group, and what `held` needs.
    Memory: the pieces of all ranks once, and everything once in full.

    Raises:
        ValueError: as `held`.
    """
    own = held(values)
    every: list[dict[str, Cut]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, {key: one for key, one in own.items() if isinstance(one, Cut)})
    return {
        key: value.joined([every[rank].get(key) for rank in value.ranks])
        if isinstance(value, Cut)
        else value
        for key, value in own.items()
    }


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether `value` is a distributed tensor."""
    return hasattr(value, "full_tensor")


_Ranks = dict[tuple[int, int], tuple[tuple[int, ...], int]]
"""(id of a mesh, its dimension) to (ranks along it, this rank's index): a mesh looks them up."""


def _held(key: str, value: Any, known: _Ranks) -> Any:
    found = _only_cut(value) if is_dtensor(value) else None
    if found is None:
        whole = value.full_tensor() if is_dtensor(value) else value
        return to_cpu(whole) if isinstance(whole, Tensor) else whole
    mesh_dim, dim = found
    place = (id(value.device_mesh), mesh_dim)
    if place not in known:
        group = value.device_mesh.get_group(mesh_dim)
        known[place] = (tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))
    ranks, index = known[place]
    cut = Cut(to_cpu(value.to_local()), tuple(value.shape), dim, ranks)
    got, due = tuple(cut.piece.shape), cut.shape_at(index)
    if got == due:
        return cut
    if math.prod(got) or math.prod(due):
        raise ValueError(
            f"{key}: this rank's local tensor is {got}, but of a DTensor of shape {cut.shape} that"
            f" is cut on dimension {dim} among {len(ranks)} ranks, the piece at {index} is {due}"
        )
    return cut._replace(piece=cut.piece.reshape(due))  # nothing, in another shape


def to_cpu(tensor: Tensor) -> Tensor:
    """A detached copy on CPU that later in-place changes do not reach."""
    own = tensor.detach()
    return own.clone() if own.is_cpu else own.to("cpu")  # `to` takes twice as long to copy


def _only_cut(tensor: DTensor) -> tuple[int, int] | None:
    """The one mesh dimension on which `tensor` is cut in the plain way, and which of its own.

    ``None`` if there are none or several, or if it is cut in another way.
    """
    cut = [(d, p) for d, p in enumerate(tensor.placements) if not p.is_replicate()]
    # by the exact name: a strided shard says that it is a shard, but its pieces lie elsewhere
    if len(cut) != 1 or type(cut[0][1]).__name__ != "Shard":
        return None
    mesh_dim, placement = cut[0]
    shard: Any = placement
    return mesh_dim, shard.dim % tensor.dim()
