"""Whole states of one unit from the parts that ranks hold. One all-gather per state name.

The last states of a result are not gathered into memory of their own, which would be there beside
all the others: each rank's run is sent to where it stays.

Knows layouts and memory, not names of optimizers nor the form in which users get the result.

======================  ==================================================================
``own`` (S,)            one state of this rank's shard: each member's part where it lies
``everyone`` (W * S,)   the same of all ranks; parameters are cut from it as from the shards
======================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp.engine.torch_private import gather_now
from fsdp.optim_state.plan import state_names
from fsdp.optim_state.profiler import SimpleProfiler
from fsdp.optim_state.vocabulary import (
    ConsolidatedOptimState,
    Entry,
    FSDPParamInfo,
    Member,
    Opaque,
    StateInfo,
    _OptimStateKey,
)

Plan = Mapping[Member, StateInfo]
Planned = tuple[FSDPParamInfo, Plan]
Finish = Callable[[torch.Tensor, FSDPParamInfo, int], Any]


def gather_unit(
    info: FSDPParamInfo,
    plan: Plan,
    entries: Mapping[_OptimStateKey, Entry],
    finish: Finish | None,
    in_place: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Return the whole state of each parameter of a unit, by name.

    Args:
        info: the unit.
        plan: what its members have; the same on all ranks.
        entries: what this rank's optimizer has.
        finish: makes what users get of a value of a parameter, a view that does not outlive the
            call, whole but for what tensor parallelism has cut; None on a rank that only takes
            part.
        in_place: states that stay as they are, on every rank, and are sent to their place.

    *Collective*: over the shard group one all-gather per state name, or one broadcast for each
    rank and parameter. *Memory*: ``everyone``, for one state at a time, beside the result.
    """
    found = {
        index: _others(whole, entries.get(member.key, {}))
        for member, whole in plan.items()
        for index in member.indices
    }
    for state in state_names(plan):
        holders = [member for member, whole in plan.items() if state in whole.tensors]
        if state in in_place:
            for index, value in _sent(info, holders, entries, state, plan).items():
                found[index].tensor_state[state] = value
        elif not all(member.is_whole for member in holders):
            own = _own(info, holders, entries, state, plan)
            # In a function of its own: nothing of one state is there when the next is gathered.
            for index, value in _gathered(info, holders, own, finish).items():
                found[index].tensor_state[state] = value
        elif finish is not None:
            for member in holders:
                value = entries[member.key][state].detach()
                index = member.indices[0]
                found[index].tensor_state[state] = finish(value, info, index)
    if finish is None:
        return {}
    return {info.names[index]: state.entry() for index, state in found.items()}


def _gathered(
    info: FSDPParamInfo, holders: list[Member], own: torch.Tensor, finish: Finish | None
) -> dict[int, Any]:
    """Return one state of the parameters of ``holders``, by index; none without ``finish``."""
    with SimpleProfiler.profile(SimpleProfiler.Type.ALLGATHER):
        everyone = gather_now(own, info.mesh.shard_group)
    if finish is None:
        return {}
    return {
        index: finish(_cut(info, index, everyone), info, index)
        for member in holders
        for index in member.indices
    }


def late_states(units: Sequence[Planned]) -> list[set[str]]:
    """Return for each unit the states that are sent to their place rather than gathered.

    Those after which less is still to come than their gathering would take. Nothing that tensor
    parallelism has cut is among them, nor what a rank has whole.
    """
    steps = [
        (number, state, *_sizes(info, plan, state))
        for number, (info, plan) in enumerate(units)
        for state in state_names(plan)
    ]
    late: list[set[str]] = [set() for _ in units]
    to_come = 0
    for number, state, result, gathering in reversed(steps):
        if gathering > to_come:
            late[number].add(state)
        to_come += result
    return late


def _sizes(info: FSDPParamInfo, plan: Plan, state: str) -> tuple[int, int]:
    """Return the bytes of one state of a unit, and those that gathering it takes; 0: it is not."""
    holders = [member for member, whole in plan.items() if state in whole.tensors]
    size = plan[holders[0]].tensors[state].dtype.itemsize
    params = [info.params[index] for member in holders for index in member.indices]
    result = size * sum(param.outer_shape.numel() for param in params)
    apart = any(member.is_whole for member in holders) or info.mesh.shard_group is None
    if apart or any(param.outer is not None for param in params):
        return result, 0
    shard = size * info.group.shard.layout.shard_numel
    # Parts of several members are put side by side first.
    return result, shard * (info.mesh.shard_size + (len(info.members) > 1))


def _sent(
    info: FSDPParamInfo,
    holders: list[Member],
    entries: Mapping[_OptimStateKey, Entry],
    state: str,
    plan: Plan,
) -> dict[int, torch.Tensor]:
    """Return one state of the parameters of ``holders``, by index, each in memory of its own."""
    group, layout = info.mesh.shard_group, info.group.shard.layout
    assert group is not None, "what is not cut is not sent"
    device, ranks = info.group.options.device, info.ranks
    found: dict[int, torch.Tensor] = {}
    works: list[Any] = []
    with SimpleProfiler.profile(SimpleProfiler.Type.ALLGATHER):
        for member, index in ((each, index) for each in holders for index in each.indices):
            param, dtype = info.params[index], plan[member].tensors[state].dtype
            run = torch.empty(param.shape.numel(), dtype=dtype, device=device)
            for rank, source in enumerate(ranks):
                piece = layout.piece(index, rank)
                part = run.narrow(0, piece.start, piece.numel)
                if rank == group.rank():
                    own = entries.get(member.key, {}).get(state)
                    _put(part, own, piece.offset - member.offset)
                if piece.numel:
                    works.append(dist.broadcast(part, src=source, group=group, async_op=True))
            found[index] = param.restored(run)
        for work in works:
            work.wait()
    return found


def _put(part: torch.Tensor, own: torch.Tensor | None, offset: int) -> None:
    """Copy a part (n,) from ``offset`` of what this rank has of a member; zeros if nothing."""
    if own is None:
        part.zero_()
    elif part.numel():
        part.copy_(own.detach().view(-1).narrow(0, offset, part.numel()))


def _own(
    info: FSDPParamInfo,
    holders: list[Member],
    entries: Mapping[_OptimStateKey, Entry],
    state: str,
    plan: Plan,
) -> torch.Tensor:
    """Return this rank's part of one state (S,), on the compute device; zeros where it has none."""
    device, numel = info.group.options.device, info.group.shard.layout.shard_numel
    dtype = plan[holders[0]].tensors[state].dtype
    parts = [(m, entries[m.key][state]) for m in holders if state in entries.get(m.key, {})]
    if len(parts) == 1 and parts[0][0].numel == numel:
        alone: torch.Tensor = parts[0][1]
        return alone.detach().to(device).contiguous()
    own = torch.zeros(numel, dtype=dtype, device=device)
    for member, value in parts:
        if member.numel:
            own.narrow(0, member.offset, member.numel).copy_(value)
    return own


def _cut(info: FSDPParamInfo, index: int, everyone: torch.Tensor) -> torch.Tensor:
    """Return parameter ``index`` as a view of ``everyone``, in the user's shape and strides."""
    param, start = info.params[index], info.group.shard.layout.unsharded_offsets[index]
    return param.restored(everyone.narrow(0, start, param.shape.numel()))


def _others(whole: StateInfo, own: Entry) -> ConsolidatedOptimState:
    """Return what needs no gather; a value that could not be sent is this rank's own."""
    values = {
        name: own.get(name) if isinstance(value, Opaque) else value
        for name, value in whole.non_tensors.items()
    }
    scalars = {name: value.clone() for name, value in whole.scalar_tensors.items()}
    return ConsolidatedOptimState(zero_dim_tensor_state=scalars, non_tensor_state=values)
