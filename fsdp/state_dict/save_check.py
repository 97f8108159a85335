"""What is checked before anything is saved, on all ranks together. Changes nothing."""

from __future__ import annotations

from fsdp.engine.agreement import Topic, agree, without_names
from fsdp.state_dict.hooked import changes_saves
from fsdp.state_dict.names import unit_prefixes
from fsdp.state_dict.unit_check import kind_of, problem_of, unit_line
from fsdp.wrapper_options import StateDictType
from fsdp.wrapper_start import is_root
from fsdp.wrapper_unit import WrappedUnit, units_of

_TOPIC = Topic(
    what="model to save",
    parts="units",
    remedy="Set the same state_dict_type on all ranks, and build the same model.",
    compared=without_names,
)


def check_save(top: WrappedUnit) -> None:
    """Refuse a save that a unit cannot do, or for which ranks would exchange different things.

    Starts the tree as the first forward does.

    *Collective* over the shard groups of the units with parameters, and over the groups of tensor
    parallelism: one all-gather of 16 bytes per
    rank, whatever the form, or a rank would wait for one that asks for another form. None for
    units that are whole inside a summon, which one rank alone may save.

    Raises:
        AssertionError: a unit is in use.
        RuntimeError: see ``form_of``.
        ValueError: ranks have other forms, or other hooks that change what is saved.
    """
    units = units_of(top)
    opened = {unit for unit in units if top._is_open() and unit._is_open()}
    whole = {unit for unit in opened if kind_of(unit) is StateDictType.FULL_STATE_DICT}
    problem = problem_of(units, [unit for unit in units if unit not in whole])
    if not opened:
        is_root(top)
    groups = dict.fromkeys(
        group
        for unit in units
        if unit._state.groups and unit not in opened
        for group in (unit._state.mesh_info.shard_group, *unit._state.model_groups)
    )
    shards = [group for group in groups if group is not None]
    lines = [unit_line(unit, start, changes_saves) for unit, start in unit_prefixes(top, "")]
    agree(lines, problem, shards, top._state.device, _TOPIC)
