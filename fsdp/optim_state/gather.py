"""Whole states of one unit from the parts that ranks hold. One all-gather per state name.

Knows layouts and memory, not names of optimizers nor the form in which users get the result.

======================  ==================================================================
``own`` (S,)            one state of this rank's shard: each member's part where it lies
``everyone`` (W * S,)   the same of all ranks; parameters are cut from it as from the shards
======================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

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

Finish = Callable[[torch.Tensor, FSDPParamInfo, int], Any]


def gather_unit(
    info: FSDPParamInfo,
    plan: Mapping[Member, StateInfo],
    entries: Mapping[_OptimStateKey, Entry],
    finish: Finish | None,
) -> dict[str, dict[str, Any]]:
    """Return the whole state of each parameter of a unit, by name.

    Args:
        info: the unit.
        plan: what its members have; the same on all ranks.
        entries: what this rank's optimizer has.
        finish: makes what users get of a value of a parameter, a view that does not outlive the
            call, whole but for what tensor parallelism has cut; None on a rank that only takes
            part.

    *Collective*: one all-gather per state name over the shard group. *Memory*: ``everyone``, for
    one state at a time, beside the result.
    """
    found = {
        index: _others(whole, entries.get(member.key, {}))
        for member, whole in plan.items()
        for index in member.indices
    }
    for state in state_names(plan):
        holders = [member for member, whole in plan.items() if state in whole.tensors]
        if not all(member.is_whole for member in holders):
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


def _own(
    info: FSDPParamInfo,
    holders: list[Member],
    entries: Mapping[_OptimStateKey, Entry],
    state: str,
    plan: Mapping[Member, StateInfo],
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
