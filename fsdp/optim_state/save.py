"""An optimizer's state dict under the names of the plain model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp.engine.agreement import agree
from fsdp.optim_state.gather import Finish, gather_unit, late_states
from fsdp.optim_state.names import Names, ParamKey
from fsdp.optim_state.plan import common_keys, plan_unit
from fsdp.optim_state.profiler import SimpleProfiler
from fsdp.optim_state.refusal import check_entry
from fsdp.optim_state.reports import Report, peers_of, reports_of_all
from fsdp.optim_state.request import ASKED, Given, Request
from fsdp.optim_state.vocabulary import (
    Entry,
    FSDPParamInfo,
    Member,
    StateInfo,
    _OptimStateKey,
    info_of,
)
from fsdp.state_dict.members import cut, whole_of


class SavePlan:
    """What is to be saved, in which order: the same on all ranks.

    Attributes:
        order: the keys, in the order of the result.
        units: for each unit with state, what its members have.
        late: for each of them, the states that are sent to where they stay.
    """

    def __init__(
        self, names: Names, reports: Mapping[dist.ProcessGroup | None, list[Report]]
    ) -> None:
        keys = {
            group: common_keys([report.keys for report in told], merged=names.is_original)
            for group, told in reports.items()
        }
        self.order = list(dict.fromkeys(key for wanted in keys.values() for key in wanted))
        self.units: list[tuple[FSDPParamInfo, dict[Member, StateInfo]]] = []
        for info in names.infos:
            group = peers_of(info)
            told = reports[group]
            if not info.is_sharded and group is not None:
                told = [told[group.rank()]]
            planned = plan_unit(info, keys[group], [report.infos for report in told])
            if planned:
                self.units.append((info, planned))
        self.late: list[set[str]] = [set() for _ in self.units]
        # Of one group all ranks have heard the same.
        if len(reports) == 1 and all(report.stays for told in reports.values() for report in told):
            self.late = late_states(self.units)


@torch.no_grad()
def save(names: Names, look: Callable[[], Given], ask: Callable[[], Request]) -> dict[str, Any]:
    """Return the state dict of an optimizer under the names of the plain model.

    Args:
        names: of the model.
        look: gives what the optimizer has; what it raises, all ranks raise.
        ask: gives the form; what it raises, all ranks raise.

    *Collective*: over the groups of the units; one exchange of small objects, then one all-gather
    per unit and state name, or broadcasts of the last ones where whole tensors stay on the device
    of every rank. *Memory*: then the result; else one whole state of one unit beside it. *Blocks*
    the host.

    Raises:
        NotImplementedError: a state that is not element by element, of a sharded parameter.
        RuntimeError: states are missing.
        AssertionError: ranks differ in what they must have in common.
        KeyError: the optimizer holds a parameter that is not in the model.
        ValueError: ranks ask for different forms; entries and groups name parameters differently.
    """
    SimpleProfiler.reset()
    with SimpleProfiler.profile(SimpleProfiler.Type.ALL):
        found = _saved(names, look, ask)
    SimpleProfiler.dump_and_reset("optim_state_dict() took, in seconds:")
    return found


def _saved(names: Names, look: Callable[[], Given], ask: Callable[[], Request]) -> dict[str, Any]:
    how, given, entries = Request(), Given(), dict[_OptimStateKey, Entry]()
    plan, groups, problem = None, None, None
    mine = Report()
    try:
        how, given = ask(), look()
        entries = _entries(names, given)
        _check(names, entries)
        if "param_groups" in given.state:
            groups = [_named(names, g, given.params) for g in given.state["param_groups"]]
        managed = {key: info_of(entry) for key, entry in entries.items() if key.is_fsdp_managed}
        mine = Report(keys=list(entries), infos=managed, stays=how.stays)
    except Exception as error:
        problem, mine = error, Report(problem=True)
    reports = reports_of_all(names, mine)
    everyone = [report for told in reports.values() for report in told]
    if not any(report.problem for report in everyone):
        try:
            plan = SavePlan(names, reports)
        except Exception as error:
            problem = error
    agree([how.form], problem, names.groups, names.device, ASKED)
    assert plan is not None, "some rank had a problem, and every rank has raised it"
    saves = how.saves(names)
    # What tensor parallelism has cut is made whole by all ranks that have a part of it.
    finish = _finish(how) if saves or how.helps(names) else None
    state = _state(names, plan, entries, finish, how)
    if not saves:
        return {}
    _add_others(state, given)
    return {"state": state} if groups is None else {"state": state, "param_groups": groups}


def _entries(names: Names, given: Given) -> dict[_OptimStateKey, Entry]:
    if "state" not in given.state:
        raise ValueError(
            f'the state dict of an optimizer must have "state", but has {list(given.state)}'
        )
    state = given.state["state"]
    keys = {number: names.key_of(param) for number, param in given.params.items()}
    others = names.of_all() if all(isinstance(key, int) for key in keys) else range(len(keys))
    strange = [key for key in state if key not in keys and key in others]
    if strange:
        raise ValueError(
            f"the state dict of the optimizer has the entry {strange[0]!r}, and calls parameters "
            f"{list(keys)[:3]} in its groups: numbers on one side, names on the other. Pass what "
            "optim.state_dict() returns, or replace the keys on both sides."
        )
    return {key: state[number] for number, key in keys.items() if number in state}


def _check(names: Names, entries: Mapping[_OptimStateKey, Entry]) -> None:
    for _, member in names.members.values():
        entry = entries.get(member.key)
        if entry is not None:
            check_entry(member, entry)


def _finish(how: Request) -> Finish:
    def chunk(value: torch.Tensor, info: FSDPParamInfo, index: int) -> torch.Tensor:
        if not info.is_sharded:
            return whole(value, info, index)
        dtensor, offload = info.use_dtensor, how.offload
        param = info.params[index]
        return cut(param, value, info.mesh, use_dtensor=dtensor, offload_to_cpu=offload)

    def whole(value: torch.Tensor, info: FSDPParamInfo, index: int) -> torch.Tensor:
        # A state without dims, or of another shape, is the same for all parts.
        part = value
        if value.shape == info.params[index].shape:
            value = whole_of(info.params[index], part)
        if not how.offload:
            return value.clone() if value is part else value
        with SimpleProfiler.profile(SimpleProfiler.Type.D2H):
            return torch.empty_like(value, device="cpu").copy_(value)

    return chunk if how.sharded else whole


def _state(
    names: Names,
    plan: SavePlan,
    entries: Mapping[_OptimStateKey, Entry],
    finish: Finish | None,
    how: Request,
) -> dict[Any, Any]:
    """Return the states by name, in the order of the plan."""
    managed: dict[str, dict[str, Any]] = {}
    for (info, planned), in_place in zip(plan.units, plan.late, strict=True):
        managed |= gather_unit(info, planned, entries, finish, in_place)
    found: dict[Any, Any] = {}
    if finish is None:
        return found
    for key in plan.order:
        if key.is_fsdp_managed:
            found |= {n: managed[n] for n in key.unflat_param_names if n in managed}
        elif key in entries:
            found[key.unflat_param_names[0]] = _unmanaged(entries[key], how)
    return found


def _unmanaged(entry: Entry, how: Request) -> dict[str, Any]:
    """Return the state of a parameter that no unit manages: copies, of what is no tensor too."""
    return {
        name: value.detach().to("cpu" if how.offload else value.device, copy=True)
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for name, value in entry.items()
    }


def _add_others(found: dict[Any, Any], given: Given) -> None:
    """Copy what belongs to no parameter, as it is."""
    for key, value in given.state["state"].items():
        if key in given.params or key in found:
            continue
        warnings.warn(
            f"Found a optim state, {key}, that FSDP cannot process. It belongs to no parameter of "
            "the model, and is copied to the result as it is.",
            stacklevel=6,
        )
        found[key] = value


def _named(
    names: Names, group: Mapping[str, Any], params: Mapping[ParamKey, nn.Parameter]
) -> dict[str, Any]:
    """Return one parameter group with names for keys; everything else is copied deeply."""
    found = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    found["params"] = [
        name
        for number in group["params"]
        for name in names.key_of(params[number]).unflat_param_names
    ]
    if "param_names" in found:
        found["param_names"] = list(found["params"])
    return found
