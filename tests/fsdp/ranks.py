"""Run a function on several ranks and insist that all of them came through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.ranks import Job, RankVerdict, shared_pool


def on_ranks(
    function: Callable[..., Any],
    world: int,
    *,
    fresh: bool = False,
    device: str = "cpu",
    **kwargs: Any,
) -> tuple[Any, ...]:
    """What ``function(context, **kwargs)`` returned on each rank of ``world`` ranks.

    Jobs that make meshes of several dims need ``fresh`` ranks: DTensor's caches remember an equal
    mesh of an earlier job, whose groups are gone.
    """
    pool = shared_pool(world, device, preload=("tests.fsdp.preload",))
    outcome = pool.run(Job.of(function, **kwargs), fresh=fresh)
    details = [r.traceback[-1500:] for r in outcome.reports[:1] if r is not None]
    assert outcome.verdict is RankVerdict.OK, "\n".join([outcome.sentence, *details])
    return outcome.values


def agreed(function: Callable[..., Any], world: int, **kwargs: Any) -> Any:
    """What all ranks returned; they must have returned the same."""
    values = on_ranks(function, world, **kwargs)
    assert all(value == values[0] for value in values), f"ranks differ: {values}"
    return values[0]
