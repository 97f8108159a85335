"""Errors of the suite's caller: one line, with the near match."""

from __future__ import annotations

from collections.abc import Iterable

from conformance.near import near_matches, offer

SHORT = 80
"""Characters; a list of names up to this length is shown whole."""


class UsageError(ValueError):
    """A name or an argument that the suite does not know; exit status 64."""


def unknown(
    kind: str,
    got: str,
    known: Iterable[str],
    *,
    where: str = "",
    listed: str = "",
    patterns: bool = False,
) -> UsageError:
    """The error for a misspelt name: what was asked for, and what there is.

    Args:
        kind: of thing, such as "check".
        got: the name.
        known: the names that there are. A short list is shown whole.
        where: it was looked for, such as "of this adapter".
        listed: the name of the list that shows a long one.
        patterns: whether a pattern could have been given.
    """
    names = sorted(known)
    every = ("; " if any("," in name for name in names) else ", ").join(names)
    near = near_matches(got, names, patterns=patterns)
    hints = [offer(near)] if near else []
    if len(every) <= SHORT or not (near or listed):
        hints.append(f"known: {every}")
    elif listed:
        hints.append(f"all {len(names)}: fsdp-conformance list {listed}")
    place = f" {where}" if where else ""
    return UsageError(f"no {kind} {got!r}{place}; {' '.join(hints)}")
