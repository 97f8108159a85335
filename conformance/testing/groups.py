"""A process group without processes, for code that only asks for rank and size."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DummyProcessGroup"]


class DummyProcessGroup:
    """Stands for a process group where wrappers are only built.

    Its `allreduce` changes nothing and is complete at once.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Make a group of `size` ranks in which this one is `rank`."""
        if not 0 <= rank < size:
            raise ValueError(f"DummyProcessGroup: rank {rank} is not in a group of {size}")
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def allreduce(self, *args: Any, **kwargs: Any) -> _Completed:
        """A work handle that is complete."""
        return _Completed()


class _Completed:
    """The work of a collective that has nothing to do."""

    def get_future(self) -> torch.futures.Future[int]:
        """A future that is done."""
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(1)
        return future

    def wait(self) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Whether it is done: always."""
        return True
