"""What a job function is handed on its rank, and the exception by which it skips.

Plain data. Must not know processes or sockets; imports torch for the annotations only.
"""

from __future__ import annotations

import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from conformance.ranks.collectives import CollectiveRecorder

__all__ = ["RankContext", "SkipRank", "is_skip"]


class SkipRank(Exception):
    """Raised by a job function that cannot run here; on all ranks alike, or the job fails."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where a job function runs.

    The default process group is initialised before the job and belongs to the pool.

    Attributes:
        rank: this rank.
        world_size: how many there are.
        device: the device that this rank owns; already the current one.
        backend: backend of the default process group.
        recorder: records the job's collectives; installed for the whole job.
        directory: scratch directory of this job, common to its ranks, emptied after it.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str
    recorder: CollectiveRecorder
    directory: Path


def is_skip(error: BaseException) -> bool:
    """Whether an exception means "skip": ours, unittest's, or pytest's without importing pytest."""
    if isinstance(error, (SkipRank, unittest.SkipTest)):
        return True
    names = [kind.__qualname__ for kind in type(error).__mro__]
    return names[0] == "Skipped" and "OutcomeException" in names
