"""Where this process stands: the controller that runs tests, or a rank that runs one of them.

Knows the context that a rank was handed. Must not know test classes or pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from conformance.ranks.context import RankContext

__all__ = ["here", "on_rank", "standing"]

_context: RankContext | None = None


def on_rank() -> bool:
    """Whether this process is a rank that runs a test."""
    return _context is not None


def here() -> RankContext:
    """The context of this rank.

    Raises:
        RuntimeError: this process is the controller.
    """
    if _context is None:
        raise RuntimeError(
            "this was asked in the controlling process, where no rank exists; process groups, "
            "ranks and devices exist inside test methods, setUp and tearDown"
        )
    return _context


@contextmanager
def standing(context: RankContext) -> Iterator[None]:
    """Inside, this process is the rank of `context`."""
    global _context
    before, _context = _context, context
    try:
        yield
    finally:
        _context = before
