"""From names of the plain model to a state dict that this rank's optimizer can load."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp.engine.agreement import Topic, agree
from fsdp.optim_state.flatten import Part, cut, examine
from fsdp.optim_state.names import Names, ParamKey
from fsdp.optim_state.profiler import SimpleProfiler
from fsdp.optim_state.rekey import keys_by_name, rekey_groups
from fsdp.optim_state.request import ASKED, Request
from fsdp.optim_state.sources import EveryRank, FirstRank, route_of

_GIVEN = Topic(
    what="optimizer state to load",
    parts="entries",
    remedy="Pass the same state on all ranks, or set rank0_only to pass it on the first.",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The optimizer that is to load the state.

    Attributes:
        keys: its keys, by parameter.
        groups: the keys in each of its parameter groups.
        existing: for optimizers with names for keys: the state that they have. They want an entry
            for every parameter, also where this rank holds no element of it.
    """

    keys: dict[nn.Parameter, ParamKey]
    groups: list[list[ParamKey]]
    existing: Mapping[Any, Any] | None = None

    @classmethod
    def of(cls, names: Names, optim: torch.optim.Optimizer, *, named: bool) -> Target:
        """Return what there is to know of ``optim``."""
        keys = {param: key for key, param in names.of_optimizer(optim, named=named).items()}
        groups = [[keys[param] for param in group["params"]] for group in optim.param_groups]
        return cls(keys=keys, groups=groups, existing=optim.state if named else None)

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[nn.Parameter]]) -> Target:
        """Return the same of an optimizer made with ``groups``, keyed by positions."""
        params = [param for group in groups for param in group]
        keys: dict[nn.Parameter, ParamKey] = {param: i for i, param in enumerate(params)}
        return cls(keys=keys, groups=[[keys[param] for param in group] for group in groups])


@dataclass(kw_only=True)
class _Work:
    """What there is to do once everything was looked at."""

    parts: list[Part] = field(default_factory=list)
    groups: list[dict[str, Any]] | None = None


@torch.no_grad()
def load(
    names: Names, given: Mapping[str, Any], look: Callable[[], Target], ask: Callable[[], Request]
) -> dict[str, Any]:
    """Return what an optimizer can load of ``given``, a state under the names of the plain model.

    Args:
        names: of the model.
        given: the state; it is not changed.
        look: gives the optimizer; what it raises, all ranks raise.
        ask: gives the form; what it raises, all ranks raise.

    *Collective*: two small all-gathers over the groups of the units; for chunks one all-gather per
    parameter and state, and if the first rank alone has the state some exchanges of each. *Memory*:
    one whole state of one parameter beside the result; nothing if runs come from the first rank,
    or if every rank has whole tensors. *Blocks* the host.

    Raises:
        ValueError: no "state", or one that does not fit the model, or differs between ranks; or
            they have asked for different things.
        RuntimeError: the entries of a flat parameter are empty.
        KeyError: a parameter group names what the optimizer does not hold.
    """
    SimpleProfiler.reset()
    with SimpleProfiler.profile(SimpleProfiler.Type.ALL):
        how = _asked(names, ask)
        source: EveryRank | FirstRank = EveryRank()
        if how.rank0_only:
            root = names.units[0]._state
            source = FirstRank(root.device, route_of(names, how.group))
            mine = given if how.is_source(names) else {}
            outline = source.structure(mine)
            given = mine if how.is_source(names) else outline
        found = _loaded(names, given, look, source)
    SimpleProfiler.dump_and_reset("optim_state_dict_to_load() took, in seconds:")
    return found


def _asked(names: Names, ask: Callable[[], Request]) -> Request:
    """Return the form, once all ranks have asked for the same source."""
    how, problem = Request(), None
    try:
        how = ask()
    except Exception as error:
        problem = error
    agree([how.source], problem, names.groups, names.device, ASKED)
    return how


def _loaded(
    names: Names,
    given: Mapping[str, Any],
    look: Callable[[], Target],
    source: EveryRank | FirstRank,
) -> dict[str, Any]:
    work, problem, target = _Work(), None, Target(keys={}, groups=[])
    try:
        target = look()
        work = _examined(names, given, target)
    except Exception as error:
        problem = error
    lines = [line for part in work.parts for line in part.lines()]
    agree(lines, problem, names.groups, names.device, _GIVEN)
    found: dict[Any, Any] = {}
    with SimpleProfiler.profile(SimpleProfiler.Type.RESHARDING):
        for part in work.parts:
            entry = cut(part, source)
            key = target.keys.get(part.member.param)
            if key is not None:
                found |= {key: entry} if entry else _existing(part, key, target)
    _add_unmanaged(found, names, given["state"], target, source)
    if work.groups is None:
        return {"state": found}
    return {"state": found, "param_groups": work.groups}


def _examined(names: Names, given: Mapping[str, Any], target: Target) -> _Work:
    if "state" not in given:
        raise ValueError(
            '`optim_state_dict` must have the keys "state" to be a valid optimizer state dict, but '
            f"has {list(given)}"
        )
    parts = [
        part
        for info, member in names.members.values()
        if (part := examine(info, member, given["state"])) is not None
    ]
    groups = None
    if "param_groups" in given:
        keys = keys_by_name(names, target.keys)
        groups = rekey_groups(given["param_groups"], keys, target.groups)
    return _Work(parts=parts, groups=groups)


def _existing(part: Part, key: ParamKey, target: Target) -> dict[Any, Any]:
    """Return the entry of a parameter of which this rank has nothing."""
    if target.existing is None:
        return {}
    if part.member.param in target.existing:
        return {key: copy.deepcopy(target.existing[part.member.param])}
    warnings.warn(
        f"optim_state[{part.member.key}] is not on rank{part.info.mesh.mesh.get_rank()}.",
        stacklevel=6,
    )
    return {}


def _add_unmanaged(
    found: dict[Any, Any],
    names: Names,
    state: Mapping[str, Any],
    target: Target,
    source: EveryRank | FirstRank,
) -> None:
    """Add the states of parameters that no unit manages, and what belongs to no parameter."""
    managed = {name for info in names.infos for name in info.names}
    unmanaged = {
        key.unflat_param_names[0]: param
        for param, key in names.keys.items()
        if not key.is_fsdp_managed
    }
    for name, entry in state.items():
        if name in managed:
            continue
        value = copy.deepcopy(source.other(entry))  # the optimizer takes it for its own
        if name not in unmanaged:
            found[name] = value
        elif unmanaged[name] in target.keys:
            found[target.keys[unmanaged[name]]] = value
