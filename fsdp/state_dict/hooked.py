"""Whether the modules of a unit change by themselves what they save or load.

Hooks and methods that torch's own modules have only rename, or see to buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp.engine.torch_private import load_hooks, save_hooks
from fsdp.wrapper_owned import owned_modules
from fsdp.wrapper_unit import WrappedUnit


def changes_saves(unit: WrappedUnit) -> bool:
    """Whether a module of ``unit`` has a hook, or a method, of its own for saving."""
    return any(
        _others(save_hooks(module))
        or _own_method(module, "_save_to_state_dict")
        or _own_method(module, "state_dict")
        for module in _modules(unit)
    )


def changes_loads(unit: WrappedUnit) -> bool:
    """Whether a module of ``unit`` has a hook, or a method, of its own for loading."""
    return any(
        _others(load_hooks(module)) or _own_method(module, "_load_from_state_dict")
        for module in (unit, *_modules(unit))
    )


def _modules(unit: WrappedUnit) -> list[nn.Module]:
    return owned_modules(unit._fsdp_wrapped_module, unit._ignored_modules)


def _others(hooks: Iterable[Any]) -> bool:
    return any(not _is_known(hook) for hook in hooks)


def _own_method(module: nn.Module, name: str) -> bool:
    return not _is_known(getattr(type(module), name))


def _is_known(function: Any) -> bool:
    """Whether ``function`` is torch's own, or of this package."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] in ("torch", "fsdp")
