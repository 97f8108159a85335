"""What every form of state does with one unit: around its save, and around its load."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fsdp.wrapper_options import StateDictConfig
from fsdp.wrapper_unit import WrappedUnit


class Finish(Protocol):
    """Brings what the modules of a unit have saved into the form."""

    def __call__(self, found: MutableMapping[str, Any], prefix: str, /) -> None:
        """Change the entries below ``prefix`` in place; called before the unit is given back."""


class UnitForm(Protocol):
    """One form, as a module of functions."""

    def saving(
        self, unit: WrappedUnit, config: StateDictConfig, /
    ) -> AbstractContextManager[Finish]:
        """Surround the save of the modules of ``unit``."""

    def loading(
        self,
        unit: WrappedUnit,
        found: MutableMapping[str, Any],
        prefix: str,
        config: StateDictConfig,
        /,
    ) -> AbstractContextManager[None]:
        """Surround the load of the modules of ``unit``, with entries below ``prefix``.

        The entries are changed in place to what the modules are to copy.
        """
