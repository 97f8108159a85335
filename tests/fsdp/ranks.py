"""Run a function on several ranks and insist that all of them came through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.ranks import Job, RankVerdict, shared_pool


def on_ranks(function: Callable[..., Any], world: int, **kwargs: Any) -> tuple[Any, ...]:
    """What ``function(context, **kwargs)`` returned on each rank of ``world`` CPU ranks."""
    outcome = shared_pool(world, preload=("tests.fsdp.preload",)).run(Job.of(function, **kwargs))
    details = [r.traceback for r in outcome.reports if r is not None and r.traceback]
    assert outcome.verdict is RankVerdict.OK, "\n".join([outcome.sentence, *details])
    return outcome.values


def agreed(function: Callable[..., Any], world: int, **kwargs: Any) -> Any:
    """What all ranks returned; they must have returned the same."""
    values = on_ranks(function, world, **kwargs)
    assert all(value == values[0] for value in values), f"ranks differ: {values}"
    return values[0]
