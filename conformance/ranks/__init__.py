"""Run code on several ranks of one machine, and say what came of it, whatever the ranks do.

    with RankPool(world=2) as pool:
        outcome = pool.run(Job.of(function, steps=3))

`function` gets a `RankContext` and the keyword arguments; what it returns must be JSON-able.

The controlling side needs no torch, so importing this package does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conformance.ranks.context import RankContext, SkipRank
from conformance.ranks.job import Job
from conformance.ranks.outcome import Outcome, RankReport, RankStatus, RankVerdict
from conformance.ranks.pool import RankPool, shared_pool
from conformance.ranks.records import CollectiveRecord

if TYPE_CHECKING:
    from conformance.ranks.collectives import CollectiveRecorder

__all__ = [
    "CollectiveRecord",
    "CollectiveRecorder",
    "Job",
    "Outcome",
    "RankContext",
    "RankPool",
    "RankReport",
    "RankStatus",
    "RankVerdict",
    "SkipRank",
    "shared_pool",
]


def __getattr__(name: str) -> Any:
    if name == "CollectiveRecorder":
        from conformance.ranks.collectives import CollectiveRecorder

        return CollectiveRecorder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
