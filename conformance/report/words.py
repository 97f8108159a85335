"""Text for people: how wide, how long, and how many of what. Knows nothing of what is told."""

from __future__ import annotations

from textwrap import wrap

WIDTH = 100
LONGEST = 300
"""Characters of a sentence that are shown; the log has all of it."""


def shortened(text: str, longest: int = LONGEST) -> str:
    """`text`, cut between two words if it is long."""
    if len(text) <= longest:
        return text
    kept = text[:longest].rpartition(" ")[0] or text[: longest - 1]
    return f"{kept} …"


def number(count: int, noun: str) -> str:
    """``1 case``, ``2 cases``, ``2 batches``, ``2 entries``."""
    return f"{count} {noun if count == 1 else _several(noun)}"


def _several(noun: str) -> str:
    if noun.endswith(("ch", "sh", "s", "x")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def indented(text: str, indent: int, later: int | None = None) -> list[str]:
    """`text` as lines of at most `WIDTH` columns, indented; those after the first by `later`."""
    return wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if later is None else later),
        break_long_words=False,
        break_on_hyphens=False,
    )
