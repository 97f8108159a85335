"""How often a property is drawn: a few times in a quick run, else as often as one switch says.

`PROPERTY_DRAWS=500 pytest -m property` draws each property that often, and those that only count
with integers 200 times as often: in several tests of one law, which workers share.
"""

from __future__ import annotations

import os

SWITCH = "PROPERTY_DRAWS"
USUAL = 500
INTEGERS = 200


def draws(quick: int | None = None, *, integers: bool = False, parts: int = 1) -> int:
    """Return what the switch says; without it ``quick``, or what is usual in a long run.

    With ``parts``, how many of them one of so many tests draws.
    """
    if SWITCH not in os.environ and quick is not None:
        return quick
    return -(-int(os.environ.get(SWITCH, USUAL)) * (INTEGERS if integers else 1) // parts)


def sharing(number: int) -> list[int]:
    """Return the numbers of the tests that share the draws of a law; one without the switch."""
    return list(range(number if SWITCH in os.environ else 1))
