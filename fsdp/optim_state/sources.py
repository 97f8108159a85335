"""Where whole values come from when a state is loaded: this rank, all ranks, or the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp.optim_state.names import Names
from fsdp.optim_state.scatter import can_scatter, scattered
from fsdp.optim_state.vocabulary import (
    FSDPParamInfo,
    Member,
    PackedScalar,
    _PosDimTensorInfo,
    packed,
    unpacked,
)
from fsdp.state_dict.form import gathered

Route = Sequence[tuple[dist.ProcessGroup | None, int]]


class EveryRank:
    """Each rank has the whole state, or its chunks of it."""

    def tensor(self, value: Any, info: FSDPParamInfo) -> torch.Tensor:
        """Return a whole value.

        *Collective* over the shard group if it is in chunks. *Memory*: then, the whole value.
        """
        return gathered(value, info.group.options.device, group=info.mesh.shard_group)

    def run(
        self, info: FSDPParamInfo, member: Member, values: Sequence[Any]
    ) -> torch.Tensor | None:
        """Return None: a run is cut from whole values."""
        return None

    def other(self, value: Any) -> Any:
        """Return a value that belongs to no unit."""
        return value


class FirstRank:
    """The first rank has the whole state, and sends one tensor at a time.

    Args:
        device: of the ranks' backend.
        route: the groups over which to send, one after another, each with its first rank.
    """

    def __init__(self, device: torch.device, route: Route) -> None:
        self._device, self._route = device, route

    def tensor(self, value: Any, info: FSDPParamInfo) -> torch.Tensor:
        """Return a whole value, of which other ranks have shape and dtype.

        *Collective*: a broadcast. *Memory*: the whole value.
        """
        return self._sent(value)

    def run(
        self, info: FSDPParamInfo, member: Member, values: Sequence[Any]
    ) -> torch.Tensor | None:
        """Return this rank's run of the values of a member; None if it is not one run.

        *Collective*: all-to-alls over the shard group, and a broadcast over each other group.
        """
        groups = [group for group, _ in self._route if group is not None]
        if not can_scatter(info, member, groups, self._device):
            return None
        return scattered(info, member, values, groups)

    def other(self, value: Any) -> Any:
        """Return a value that belongs to no unit; tensors with dims are sent as those of units."""
        if isinstance(value, Mapping):
            return {name: self.other(each) for name, each in value.items()}
        if isinstance(value, _PosDimTensorInfo) or _has_dims(value):
            return self._sent(value).cpu()
        return value

    def _sent(self, value: Any) -> torch.Tensor:
        shape, dtype = torch.Size(value.shape), value.dtype
        if isinstance(value, torch.Tensor):
            tensor = value.detach().to(self._device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        for group, first in self._route:
            dist.broadcast(tensor, src=first, group=group)
        return tensor

    def structure(self, state: Any) -> Any:
        """Return everything but the elements of large tensors, from the first rank.

        *Collective*: broadcasts of objects. *Blocks* the host.
        """
        box = [_outline(state)]
        for group, first in self._route:
            dist.broadcast_object_list(box, src=first, group=group)
        return _unpacked(box[0])


def route_of(names: Names, group: dist.ProcessGroup | None) -> Route:
    """Return how something gets from the first rank to all: over ``group``, or those of a model."""
    root = names.units[0]._state
    groups = (group,) if group is not None else (*root.mesh_info.groups, *names.model_groups)
    return [(each, dist.get_process_group_ranks(each)[0]) for each in groups if each.size() > 1]


def _outline(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _outline(each) for name, each in value.items()}
    if _has_dims(value):
        return _PosDimTensorInfo(value.shape, value.dtype)
    return packed(value.detach().cpu()) if isinstance(value, torch.Tensor) else value


def _unpacked(outline: Any) -> Any:
    if isinstance(outline, Mapping):
        return {name: _unpacked(each) for name, each in outline.items()}
    return unpacked(outline) if isinstance(outline, PackedScalar) else outline


def _has_dims(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
