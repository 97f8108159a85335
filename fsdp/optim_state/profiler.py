"""Where the time of saving and loading optimizer states goes. Knows nothing of states."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import ClassVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

_logger = logging.getLogger(__name__)


class SimpleProfiler:
    """Seconds of host time by kind, for the process."""

    class Type(StrEnum):
        """The kinds."""

        ALL = "all"
        ALLGATHER = "all_gather"
        ALLGATHER_OBJ = "all_gather_object"
        RESHARDING = "resharding"
        H2D = "H2D"
        D2H = "D2H"

    results: ClassVar[defaultdict[str, float]] = defaultdict(float)
    profiling: ClassVar[set[str]] = set()

    @classmethod
    def reset(cls) -> None:
        """Forget everything."""
        cls.results.clear()
        cls.profiling.clear()

    @classmethod
    @contextmanager
    def profile(cls, kind: str) -> Iterator[None]:
        """Add the time of the body to ``kind``.

        Raises:
            AssertionError: inside a body of the same kind, whose time would count twice.
        """
        if kind in cls.profiling:
            raise AssertionError(
                f"{kind} is already being profiled: SimpleProfiler cannot nest one kind"
            )
        cls.profiling.add(kind)
        begin = time.monotonic()
        try:
            yield
        finally:
            cls.results[kind] += time.monotonic() - begin
            cls.profiling.discard(kind)

    @classmethod
    def dump_and_reset(cls, message: str) -> None:
        """Log the totals on rank 0, with ``TORCH_DISTRIBUTED_DEBUG=INFO``, and forget them."""
        if dist.get_rank() == 0 and get_debug_level() == DebugLevel.INFO:
            _logger.info("%s %s", message, dict(cls.results))
        cls.reset()
