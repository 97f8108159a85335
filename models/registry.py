"""The list of model cases, the plain one first."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from . import (
    adapted,
    batchnorm,
    drawn,
    frozen,
    mlp,
    nested_io,
    recomputed,
    reused,
    routed,
    scalar,
    strided,
    tiny,
    transformer,
    uneven,
    unused,
    varying,
    wide,
)
from .case import ModelCase

_MODULES = (
    mlp,
    transformer,
    uneven,
    tiny,
    unused,
    frozen,
    batchnorm,
    nested_io,
    reused,
    strided,
    recomputed,
    adapted,
    scalar,
    varying,
    routed,
    wide,
)

_CASES: Mapping[str, ModelCase] = MappingProxyType({m.CASE.name: m.CASE for m in _MODULES})


def cases() -> Mapping[str, ModelCase]:
    """Return all cases by name, read-only, in a fixed order."""
    return _CASES


def case(name: str) -> ModelCase:
    """Look up one case.

    Args:
        name: a key of `cases()`, or the description of a drawn model (`models/drawn.py`).

    Returns:
        The case.

    Raises:
        ValueError: if there is no such case; the message holds the nearest name.
    """
    if name.startswith(drawn.PREFIX):
        return drawn.model_case(name)
    if name in _CASES:
        return _CASES[name]
    near = difflib.get_close_matches(name, _CASES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"no model case is named {name!r}; {hint}known: {', '.join(_CASES)}")
