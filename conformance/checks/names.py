"""What a sentence says about a key that is missing or one too many. Knows strings only."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from conformance.causes import MEANING, Cause

BARE = "let the adapter's bare() return a module whose names are without"
"""What is done about names that a wrapper has changed; the part that is too much follows."""


def key_text(cause: Cause, key: str, others: Collection[str], *, remedy: str = BARE) -> str:
    """The cause in words, with the nearest key of the other side.

    Args:
        cause: a key is missing, or one too many.
        key: the key.
        others: those that are there, for a missing key; those that are due, for one too many.
        remedy: said where the two differ by what a wrapper puts into names; empty for none.
    """
    other = nearest_key(key, others)
    text = MEANING[cause]
    if not other:
        return text
    missing = cause is Cause.MISSING_KEY
    told = f"{text}; {other} is {'there' if missing else 'due'}"
    added = inserted(key, other) if missing else inserted(other, key)
    return f"{told}: {remedy} {added!r}" if added and remedy else told


def one_sided(
    key: str, got: Collection[str], due: Collection[str], *, remedy: str = BARE
) -> tuple[Cause, str]:
    """Whether a key that only one side has is missing or one too many, and that in words."""
    cause = Cause.UNEXPECTED_KEY if key in got else Cause.MISSING_KEY
    return cause, key_text(cause, key, due if key in got else got, remedy=remedy)


def nearest_key(key: str, others: Collection[str]) -> str:
    """The key among `others` that is most likely meant; empty if none is like it."""
    related = sorted(o for o in others if inserted(key, o) or inserted(o, key))
    if related:
        return min(related, key=len)
    return next(iter(get_close_matches(key, sorted(others), n=1)), "")


def inserted(plain: str, wrapped: str) -> str:
    """What a wrapper put in front of `plain` or into it, such as ``module.``; empty if nothing.

    It is whole parts of the name, in one place.
    """
    short, long = plain.split("."), wrapped.split(".")
    added = len(long) - len(short)
    for at in range(len(short)):
        if added > 0 and short == long[:at] + long[at + added :]:
            return ".".join(long[at : at + added]) + "."
    return ""
