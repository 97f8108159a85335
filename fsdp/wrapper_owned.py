"""Which modules and parameters a unit owns, and which are ignored. Changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp.engine.unit import state_of


def resolve_ignored(
    module: nn.Module, ignored_modules: Any, ignored_states: Any
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules and parameters that the user wants left alone.

    Raises:
        ValueError: both are given, elements of a wrong type, or units among them.
        TypeError: not iterable.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just "
            "pass ignored_states."
        )
    params: set[nn.Parameter] = set()
    modules = list(ignored_modules or ())
    if not all(isinstance(each, nn.Module) for each in modules):
        kinds = sorted({type(each).__name__ for each in modules})
        raise ValueError(f"ignored_modules expects nn.Module list elements but got types {kinds}")
    states = list(ignored_states or ())
    if states and all(isinstance(each, nn.Parameter) for each in states):
        params.update(states)
    elif all(isinstance(each, nn.Module) for each in states):
        modules += states
    else:
        kinds = sorted({type(each).__name__ for each in states})
        raise ValueError(
            "ignored_states expects all nn.Parameter or all nn.Module list elements but got "
            f"types {kinds}"
        )
    if any(state_of(each) is not None for each in modules):
        raise ValueError("`ignored_modules` should not include FSDP modules")
    if module in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            "result in all parameters being ignored and is not well-supported",
            stacklevel=3,
        )
    below = {inner for each in modules for inner in _outside_units(each)}
    params |= {
        param for inner in below for param in inner._parameters.values() if param is not None
    }
    return below, params


def _outside_units(module: nn.Module) -> Iterable[nn.Module]:
    """Yield ``module`` and those below it that no unit contains, each before its children."""
    if state_of(module) is not None:
        return
    yield module
    for child in module.children():
        yield from _outside_units(child)


def owned_modules(
    module: nn.Module, ignored: set[nn.Module], inner: Iterable[nn.Module] = ()
) -> list[nn.Module]:
    """Return the modules that a unit around ``module`` owns, in ``named_modules`` order.

    Not those that are ignored, nor those inside other units or inside ``inner``, which become some.
    """
    stop = set(inner) - {module}
    found: dict[nn.Module, None] = {}

    def visit(each: nn.Module) -> None:
        if each in found or each in stop or state_of(each) is not None:
            return
        if each not in ignored:
            found[each] = None
        for child in each.children():
            visit(child)

    visit(module)
    return list(found)


def owned_params(
    modules: Iterable[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, str]:
    """Return the parameters of ``modules`` with a name of each, every one once.

    Raises:
        ValueError: a parameter without dims.
    """
    found: dict[nn.Parameter, str] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is None or param in ignored or param in found:
                continue
            if param.dim() == 0:
                raise ValueError(
                    "FSDP doesn't support scalar parameters. "
                    f"Change {name} to a 1D tensor with numel equal to 1."
                )
            found[param] = f"{type(module).__name__}.{name}"
    return found
