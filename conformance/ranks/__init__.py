"""Run code on several ranks of one machine, and say what came of it, whatever the ranks do.

    with RankPool(world=2) as pool:
        outcome = pool.run(Job.of(function, steps=3))

`function` gets a `RankContext` and the keyword arguments; what it returns must be JSON-able.
"""

from __future__ import annotations

from conformance.ranks.collectives import CollectiveRecorder
from conformance.ranks.context import RankContext, SkipRank
from conformance.ranks.job import Job
from conformance.ranks.outcome import Outcome, RankReport, RankStatus, RankVerdict
from conformance.ranks.pool import RankPool, shared_pool
from conformance.ranks.records import CollectiveRecord

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
