"""What a name or pattern that leads to nothing may have meant.

Compares word by word, so that one misspelt part of a long name is found, and says nothing where
nothing is alike: a poor guess hides that the thing is not there. Pure: strings only.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable
from difflib import SequenceMatcher
from functools import cache

from conformance.globs import matches

ALIKE = 0.7
"""Of `SequenceMatcher`; a word of four letters may have one wrong."""
SLIP = 0.9
"""Of the same, for a letter too many or another one: of four letters, that is often a word."""
FEW = 3
"""How many names are shown instead of the pattern that takes them."""

_WORD = re.compile(r"\w+")


def near_matches(got: str, known: Iterable[str], *, patterns: bool = False) -> list[str]:
    """What to offer for `got`: up to `FEW` names, or one pattern that takes more; perhaps nothing.

    Args:
        got: what matches none of the names.
        known: the names.
        patterns: whether a pattern is an answer.
    """
    names = list(known)
    for attempt in _attempts(got, names):
        found = [name for name in names if matches(name, attempt)]
        if patterns and len(found) > FEW:
            return [attempt]
        if found := found or [name for name in names if matches(name.lower(), attempt.lower())]:
            return sorted(found, key=lambda name: -_likeness(got, name))[:FEW]
    # also as the beginning of a name
    scores = {n: max(_likeness(got, n), _likeness(got, n[: len(got) + 1])) for n in names}
    return sorted((n for n in names if scores[n] >= ALIKE), key=lambda n: (-scores[n], n))[:FEW]


def offer(near: Iterable[str]) -> str:
    """``did you mean a or 'b*'?``, as a shell would take them; empty for nothing."""
    shown = " or ".join(map(shlex.quote, near))
    return f"did you mean {shown}?" if shown else ""


@cache
def is_slip(got: str, meant: str) -> bool:
    """Whether `got` is `meant` as fingers err: letters swapped, left out or doubled, `_` lost.

    Another number or tense is another word: `weight` beside `weights`, `evaluates`, `configured`.
    """
    typed, right = (name.lower().replace("_", "") for name in (got, meant))
    if abs(len(typed) - len(right)) > 2:
        return False
    swapped = any(
        right[:at] + right[at : at + 2][::-1] + right[at + 2 :] == typed for at in range(len(right))
    )
    doubled = any(right[:at] + right[at - 1 :] == typed for at in range(1, len(right) + 1))
    if swapped or doubled:
        return True
    singular = right == f"{typed}s"
    inflected = "_" not in meant and typed in (f"{right}s", f"{right}d")
    if singular or inflected:
        return False
    if any(right[:at] + right[at + 1 :] == typed for at in range(len(right))):  # left out
        return True
    alike = SequenceMatcher(None, typed, right)
    return alike.quick_ratio() >= SLIP and alike.ratio() >= SLIP


def _attempts(got: str, names: Collection[str]) -> list[str]:
    """Patterns near to `got`, the nearest first: with its words mended, and as part of a name."""
    words = sorted({word for name in names for word in _WORD.findall(name)})
    mended = _WORD.sub(lambda found: _mended(found.group(), words), got)
    attempts = [mended]
    for pattern in (got, mended):
        core = pattern.strip("*")
        if len(core) > 1:  # one letter is part of everything
            attempts.append(f"*{core}*")
    return attempts


def _mended(word: str, words: Collection[str]) -> str:
    """`word`, or the one of `words` that it is a misspelling of."""
    score, best = max(((_likeness(word, known), known) for known in words), default=(0.0, word))
    return best if score >= ALIKE and word not in words else word


def _likeness(one: str, other: str) -> float:
    """Between 0 and 1; words of the same letters, as of a slip of the fingers, are alike enough."""
    first, second = one.lower(), other.lower()
    ratio = SequenceMatcher(None, first, second).ratio()
    return max(ratio, ALIKE) if sorted(first) == sorted(second) else ratio
