"""Patterns over names that hold brackets: only ``*`` and ``?`` are special.

Ids and variants look like ``torch.fully_shard[reshard_after_forward=False]``, where `fnmatch`
would read the bracket as a set of characters.
"""

from __future__ import annotations

import re
from functools import lru_cache


def matches(name: str, pattern: str) -> bool:
    """Whether all of `name` is what `pattern` describes."""
    return _compiled(pattern).fullmatch(name) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = (".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern)
    return re.compile("".join(parts), re.DOTALL)
