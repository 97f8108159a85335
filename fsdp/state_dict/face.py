"""``state_dict`` and ``load_state_dict`` of the wrapper face, and in which form they work.

They are the ordinary methods of modules: each unit surrounds the save and the load of what it
wraps, in the form that is set on it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from fsdp.plain_names import PREFIX, clean
from fsdp.state_dict import full, local, sharded
from fsdp.state_dict.load_check import check_load
from fsdp.state_dict.names import clean_all, replace_by_prefix
from fsdp.state_dict.save_check import check_save
from fsdp.state_dict.settings import checked_settings, form_of
from fsdp.state_dict.unit_form import UnitForm
from fsdp.wrapper_options import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp.wrapper_start import is_root
from fsdp.wrapper_unit import WrappedUnit, units_of

_FORMS: dict[StateDictType, UnitForm] = {
    StateDictType.FULL_STATE_DICT: full,
    StateDictType.LOCAL_STATE_DICT: local,
    StateDictType.SHARDED_STATE_DICT: sharded,
}


class Loading:
    """A load under way: its outermost unit, and what the others have opened."""

    def __init__(self, top: WrappedUnit) -> None:
        self.top = top
        self.opened: dict[WrappedUnit, ExitStack] = {}
        self._units = units_of(top)
        for unit in self._units:
            unit._loading = self

    def end(self) -> None:
        """Give up what is open, and forget the load.

        Only an exception leaves something open, of which a parent may tell nobody. Half of what
        was to be loaded must not reach the shards: the contexts always end as by an exception.
        """
        for unit in self._units:
            unit._loading = None
        error = sys.exc_info()[1] or RuntimeError("the load was given up")
        for stack in reversed(self.opened.values()):
            stack.__exit__(type(error), error, error.__traceback__)


class States(WrappedUnit):
    """The verbs about model states."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the parameters in the form that is set, and the buffers, under plain names.

        *Collective* over the shard groups: ranks first agree on what they are asked for, which
        blocks the host and is all that the local form exchanges; starts the tree as the first
        forward does. *Memory*: the result, and in the full form the whole parameters of the units
        from this one down to the one being saved, in the sharded form three times the chunks of
        one unit.

        Raises:
            AssertionError: in forward or backward, or with another form than the full one inside a
                summon.
            RuntimeError: the local form, and a device mesh.
            ValueError: ranks have other forms, or other hooks that change what is saved.
        """
        outermost = not self._saving
        if outermost:
            self._begin_save()
        try:
            kind, config = form_of(self)
            with _FORMS[kind].saving(self, config) as self._finish_save:
                found: dict[str, Any] = super().state_dict(*args, **kwargs)
                return found
        finally:
            self._finish_save = None
            if outermost:
                for unit in units_of(self):
                    unit._saving = False

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Load a state that has the form that is set on the units, saved here or elsewhere.

        What backward still needs of the old parameters is marked as changed, as it is in any
        module: a backward that uses it raises.

        *Collective* over the shard groups; starts the tree as the first forward does.

        Returns:
            The missing and the unexpected keys.

        Raises:
            AssertionError: a unit is in use, or an entry of the local or sharded form is none.
            RuntimeError: strict, and keys are missing or unexpected; or shapes differ.
            ValueError: ranks have other forms, hooks or entries.
        """
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        finally:
            if self._loading is not None:
                self._loading.end()

    def _begin_save(self) -> None:
        check_save(self)
        for unit in units_of(self):
            unit._saving = True

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the form of states on all units below ``module``; return what it was.

        Raises:
            TypeError: no form.
            RuntimeError: a config of another form.
            AssertionError: the units have different settings, so that there is none to return.
        """
        units = units_of(module)
        use_dtensor = any(unit._device_mesh is not None for unit in units)
        settings = checked_settings(
            state_dict_type, state_dict_config, optim_state_dict_config, use_dtensor=use_dtensor
        )
        before = States.get_state_dict_type(module)
        for unit in units:
            unit._state_dict_settings = settings
        return before if before is not None else StateDictSettings()

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the settings of the units below ``module``; None if there are none.

        Raises:
            AssertionError: they differ.
        """
        found = [unit._state_dict_settings for unit in units_of(module)]
        if any(settings != found[0] for settings in found):
            raise AssertionError(f"All FSDP modules must have the same settings, got {found}")
        return found[0] if found else None

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None, None, None]:
        """Set the form of states for the body; it is restored after an exception too."""
        before = States.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for unit in units_of(module):
                unit._state_dict_settings = before

    def _install_state_hooks(self) -> None:
        # The first hooks of the unit: those of users see finished entries.
        self.register_state_dict_post_hook(_after_save)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


def _after_save(unit: States, found: dict[str, Any], prefix: str, _: Any) -> None:
    replace_by_prefix(found, f"{prefix}{PREFIX}", prefix)
    _name_plainly(getattr(found, "_metadata", {}), prefix)
    unit._finish_save(found, prefix)


def _name_plainly(metadata: dict[str, Any], prefix: str) -> None:
    """Let plain modules find the versions of theirs as well."""
    for name in [name for name in metadata if name.startswith(prefix)]:
        metadata.setdefault(clean(name), metadata[name])


def _before_load(unit: States, found: dict[str, Any], prefix: str, *_: Any) -> None:
    loading = unit._loading
    if loading is not None and unit in loading.opened:
        loading.end()  # left by an exception in a module above
        loading = None
    if loading is None:
        is_root(unit)
        check_load(unit, found, prefix)
        loading = Loading(unit)
    replace_by_prefix(found, prefix, f"{prefix}{PREFIX}")
    kind, config = form_of(unit)
    stack = loading.opened[unit] = ExitStack()
    stack.enter_context(_FORMS[kind].loading(unit, found, prefix, config))


def _after_load(unit: States, incompatible: Any) -> None:
    loading = unit._loading
    loading.opened.pop(unit).close()
    for group in unit._state.groups:
        _mark_changed(param.unsharded for param in group.fsdp_params)
    if loading.top is unit:
        loading.end()
    clean_all(incompatible.missing_keys)
    clean_all(incompatible.unexpected_keys)


def _mark_changed(leaves: Iterable[torch.Tensor | None]) -> None:
    """Let autograd refuse what it has saved of parameters that have other values now."""
    for leaf in leaves:
        if leaf is not None and not leaf.is_inference():
            increment_version(leaf)
