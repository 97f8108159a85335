"""Errors of the suite's caller: one line, with the near match."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

SHORT = 80
"""Characters; a list of names up to this length is shown whole."""
NEAREST = 5
"""How many names of a list that is not shown whole stand for it."""


class UsageError(ValueError):
    """A name or an argument that the suite does not know; exit status 64."""


def unknown(kind: str, got: str, known: Iterable[str], *, listed: str = "") -> UsageError:
    """The error for a misspelt name: what was asked for, and what there is.

    Args:
        kind: of thing, such as "check".
        got: the name.
        known: the names that there are. A short list is shown whole.
        listed: the name of the list that shows a long one, of which the nearest are shown here.
    """
    names = sorted(known)
    every = ", ".join(names)
    near = get_close_matches(got, names, n=3, cutoff=0.5)
    hints = [f"did you mean {' or '.join(near)}?"] if near else []
    if len(every) <= SHORT or not (near or listed):
        hints.append(f"known: {every}")
    elif listed:
        nearest = get_close_matches(got, names, n=NEAREST, cutoff=0.0)
        hints += [] if near else [f"nearest: {', '.join(nearest)};"]
        hints.append(f"all {len(names)}: fsdp-conformance list {listed}")
    return UsageError(f"no {kind} {got!r}; {' '.join(hints)}")
