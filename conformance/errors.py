"""Errors of the suite's caller: one line, with the near match."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """A name or an argument that the suite does not know; exit status 64."""


def unknown(kind: str, got: str, known: Iterable[str]) -> UsageError:
    """The error for a misspelt name: what was asked for, and the nearest or all known names."""
    names = sorted(known)
    near = get_close_matches(got, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return UsageError(f"no {kind} {got!r}; {hint}")
