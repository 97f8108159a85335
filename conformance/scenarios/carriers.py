"""How states get from one job to the next: in a file, or in memory where both are one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.per_rank import PerRank


@dataclass(frozen=True, kw_only=True)
class InFile:
    """Rank 0 writes, every rank of the next job reads.

    Attributes:
        path: the file; its folder is there.
        rank: this rank.
    """

    path: Path
    rank: int

    def put(self, states: tuple[Any, Any]) -> None:
        """Write the states of model and optimizer. What other ranks hold is dropped."""
        if self.rank == 0:
            torch.save(states, self.path)

    def take(self) -> tuple[Any, Any]:
        """Read them, onto the CPU."""
        # states hold whatever the wrapper puts into them, and this run has written the file
        model, optimizer = torch.load(self.path, map_location="cpu", weights_only=False)
        return model, optimizer


@dataclass(kw_only=True)
class Held:
    """The oracle's: states of one job of virtual ranks, for each of the next job's.

    Attributes:
        world: virtual ranks of the job that takes.
        states: what was put.
    """

    world: int
    states: tuple[Any, Any] | None = None

    def put(self, states: tuple[Any, Any]) -> None:
        """Keep rank 0's."""
        model, optimizer = states
        self.states = (model.values[0], optimizer)

    def take(self) -> tuple[Any, Any]:
        """The same for every rank."""
        assert self.states is not None, "nothing was put"
        model, optimizer = self.states
        return PerRank((model,) * self.world), optimizer
