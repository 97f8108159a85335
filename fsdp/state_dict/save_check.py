"""What is checked before anything is saved, on all ranks together. Changes nothing."""

from __future__ import annotations

from fsdp.engine.agreement import agree
from fsdp.state_dict.hooked import changes_saves
from fsdp.state_dict.names import unit_prefixes
from fsdp.state_dict.unit_check import kind_of, problem_of, unit_line, without_names
from fsdp.wrapper_options import StateDictType
from fsdp.wrapper_start import is_root
from fsdp.wrapper_unit import WrappedUnit, units_of


def check_save(top: WrappedUnit) -> None:
    """Refuse a save that a unit cannot do, or for which ranks would exchange different things.

    Starts the tree as the first forward does.

    *Collective* over the shard groups of the units that exchange something: one all-gather of 16
    bytes per rank. None for the local form, and for units that are whole inside a summon.

    Raises:
        AssertionError: a unit is in use.
        RuntimeError: see ``form_of``.
        ValueError: ranks have other forms, or other hooks that change what is saved.
    """
    units = units_of(top)
    opened = top._is_open() and kind_of(top) is StateDictType.FULL_STATE_DICT
    problem = problem_of(units, [] if opened else units)
    if not opened:
        is_root(top)
    groups = dict.fromkeys(
        unit._state.mesh_info.shard_group
        for unit in units
        if unit._state.groups
        and kind_of(unit) is not StateDictType.LOCAL_STATE_DICT
        and not (opened and unit._is_open())
    )
    shards = [group for group in groups if group is not None]
    lines = [unit_line(unit, start, changes_saves) for unit, start in unit_prefixes(top, "")]
    agree(lines, problem, shards, top._state.device, without_names, what="model to save")
