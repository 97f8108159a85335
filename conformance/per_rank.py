"""One value per virtual rank, as the oracle handles what differs between ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PerRank:
    """Values by rank; losses of all ranks divide and detach together."""

    values: tuple[Any, ...]

    def detach(self) -> PerRank:
        """Each value detached."""
        return PerRank(tuple(value.detach() for value in self.values))

    def __truediv__(self, divisor: float) -> PerRank:
        return PerRank(tuple(value / divisor for value in self.values))


def each(value: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of `value`, or of each rank's value."""
    if isinstance(value, PerRank):
        return PerRank(tuple(function(item) for item in value.values))
    return function(value)
