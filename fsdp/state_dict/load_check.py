"""What is checked before anything is loaded, on all ranks together. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fsdp.engine.agreement import Topic, agree, without_names
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.torch_private import ShardedTensor
from fsdp.flat_parameter import FLAT_PARAM, FlatParam, flat_params
from fsdp.state_dict.form import form_told, is_sharded
from fsdp.state_dict.hooked import changes_loads
from fsdp.state_dict.local import problem_with
from fsdp.state_dict.members import is_own_chunk
from fsdp.state_dict.names import param_names, unit_prefixes
from fsdp.state_dict.unit_check import kind_of, problem_of, unit_line
from fsdp.wrapper_options import StateDictType
from fsdp.wrapper_unit import WrappedUnit, units_of

_TOPIC = Topic(
    what="state dict",
    parts="units and entries",
    remedy="Load the same state on all ranks, with the same state_dict_type.",
    compared=without_names,
)


def check_load(top: WrappedUnit, found: Mapping[str, Any], prefix: str) -> None:
    """Refuse a state that ``top`` or a unit below it cannot load, or that ranks do not share.

    *Collective* over every group of the units: one all-gather of 16 bytes per rank.

    Raises:
        AssertionError: a unit is in use, or an entry of the local or sharded form is none.
        RuntimeError: an entry of the sharded form has another shape, or see ``form_of``.
        ValueError: ranks have other forms, other hooks, or entries for different parameters or in
            different forms.
    """
    units = units_of(top)
    lines: list[str] = []
    problem = problem_of(units, units)
    for unit, start in unit_prefixes(top, prefix):
        lines.append(unit_line(unit, start, changes_loads))
        kind = kind_of(unit)
        for group in unit._state.groups:
            if kind is None:
                continue
            try:
                lines += _entries(unit, group, kind, found, start)
            except (RuntimeError, AssertionError) as error:
                problem = problem or error
    groups = dict.fromkeys(group for unit in units for group in unit._state.all_groups)
    agree(lines, problem, list(groups), top._state.device, _TOPIC)


def _entries(
    unit: WrappedUnit,
    group: FSDPParamGroup,
    kind: StateDictType,
    found: Mapping[str, Any],
    start: str,
) -> Iterator[str]:
    """Yield one line per entry that ``unit`` should have, and raise what is wrong with one."""
    if kind is StateDictType.LOCAL_STATE_DICT:
        problem = problem_with(group, found.get(f"{start}{FLAT_PARAM}"))
        if problem is not None:
            raise AssertionError(f"{problem} (entry '{start}{FLAT_PARAM}')")
        return
    strict = kind is StateDictType.SHARDED_STATE_DICT and not changes_loads(unit)
    for names, param in zip(param_names(unit), flat_params(group.shard.plain), strict=True):
        for name in names:
            value = found.get(f"{start}{name}")
            if strict and value is not None:
                _check_sharded(f"{start}{name}", value, param.outer_shape)
            as_saved = strict and _is_saved_form(param, value, group.mesh_info)
            yield f"'{start}{name}' {_told(value)}" + (" as it is saved" if as_saved else "")


def _check_sharded(key: str, value: Any, shape: torch.Size) -> None:
    if isinstance(value, ShardedTensor) and len(value.local_shards()) > 1:
        raise AssertionError(
            f"Expects 0 or 1 shard per rank but got {len(value.local_shards())} shards of '{key}'"
        )
    if isinstance(value, torch.Tensor) and value.shape != shape:
        raise RuntimeError(
            f"Error(s) in loading state_dict: size mismatch for {key}: copying a param with shape "
            f"{value.shape} from checkpoint, the shape in current model is {shape}."
        )


def _is_saved_form(param: FlatParam, value: Any, info: DataParallelMeshInfo) -> bool:
    return is_sharded(value) and is_own_chunk(param, value, info)


def _told(value: Any) -> str:
    """Return what decides whether, and how, a value is gathered."""
    if value is None:
        return "absent"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if not is_sharded(value):
        return f"{tuple(value.shape)}"
    return f"{tuple(value.shape)} {form_told(value)}"
