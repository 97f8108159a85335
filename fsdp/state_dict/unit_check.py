"""What a save and a load check alike of the units they go through. No tensors, no entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fsdp.full_params import check_idle
from fsdp.state_dict.settings import check_forms, form_of
from fsdp.wrapper_options import StateDictType
from fsdp.wrapper_unit import WrappedUnit


def problem_of(units: Iterable[WrappedUnit], used: Iterable[WrappedUnit]) -> Exception | None:
    """Return what is wrong with the forms of ``units`` or the moment for those ``used``."""
    try:
        check_forms(units)
        check_idle([unit._state for unit in used])
    except (RuntimeError, AssertionError) as error:
        return error
    return None


def kind_of(unit: WrappedUnit) -> StateDictType | None:
    """Return the form of ``unit``; None if it cannot have the one that is set."""
    try:
        return form_of(unit)[0]
    except RuntimeError:
        return None


def unit_line(unit: WrappedUnit, start: str, changes: Callable[[WrappedUnit], bool]) -> str:
    """Return what decides which collectives ``unit`` takes part in.

    Args:
        unit: the unit.
        start: the prefix of its entries.
        changes: whether its modules change what they save, or load; only the sharded form asks.
    """
    kind = kind_of(unit)
    line = f"the unit '{start}' in the form {kind.name if kind else 'that it cannot have'}"
    if kind is StateDictType.SHARDED_STATE_DICT:
        line += " with hooks or methods" if changes(unit) else " without hooks or methods"
        line += " that change states"
    return line
