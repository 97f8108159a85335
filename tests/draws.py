"""How often a property is drawn: a few times in a quick run, else as often as one switch says.

`PROPERTY_DRAWS=500 pytest -m property` draws each property that often, and those that only count
with integers 200 times as often.
"""

from __future__ import annotations

import os

SWITCH = "PROPERTY_DRAWS"
USUAL = 500
INTEGERS = 200


def draws(quick: int | None = None, *, integers: bool = False) -> int:
    """Return what the switch says; without it ``quick``, or what is usual in a long run."""
    if SWITCH not in os.environ and quick is not None:
        return quick
    return int(os.environ.get(SWITCH, USUAL)) * (INTEGERS if integers else 1)
