"""Carries out a plan inside a job: runs of elements from rank to rank, in rounds of bounded size.

Knows a plan, one-dimensional tensors and a process group; whose tensors they are is the business of
the two ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp.engine.mesh import default_device
from fsdp.reshard.moves import Moves
from fsdp.reshard.plan import Plan
from fsdp.reshard.rounds import Round, rounds_of

LIMIT = 64 << 20  # bytes per round that a rank receives, and that it sends to each replica


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where messages lie: on the host if the group knows nothing but the host."""
    if not dist.is_initialized() or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return default_device()


class Ends(Protocol):
    """Where elements come from and go to on this rank.

    With each element of a tensor travel the elements of others that are dealt out like it (the
    entries of an optimizer's state): they are its riders, the same on all ranks.
    """

    def riders(self, number: int) -> Sequence[torch.dtype]:
        """Return the dtypes of tensor ``number`` and of what is dealt out like it."""

    def read(self, number: int) -> Sequence[torch.Tensor]:
        """Return what this rank holds of them, each (n,) and contiguous."""

    def open(self, number: int) -> Sequence[torch.Tensor]:
        """Return memory for what this rank will hold of them, each (m,) and contiguous."""

    def close(self, number: int, filled: Sequence[torch.Tensor]) -> None:
        """Take over what ``open`` returned, now that it is filled."""


class Transport:
    """Moves the tensors of a plan.

    Args:
        plan: what has to move; ranks are those of the default group.
        group: contains all ranks of the plan; None: the default one.
        device: where messages lie: one that the group can send from.
        limit: bytes per round.
    """

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        limit: int = LIMIT,
    ) -> None:
        self._plan = plan
        self._group = group
        self._device = device
        self._limit = limit
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    @torch.no_grad()
    def run(self, ends: Ends) -> None:
        """Move everything.

        *Collective* over the ranks of the plan: in each round one message per pair of ranks that
        have something to tell each other. *Memory*: the messages of one round, and what ``ends``
        opens for the tensors of one round. *Blocks* the host until each round is over.
        """
        plan, rank = self._plan, self._rank
        sizes = [
            sum(dtype.itemsize for dtype in ends.riders(number))
            for number in range(len(plan.names))
        ]
        sends, receives = plan.sends(rank), plan.receives(rank)
        opened: dict[int, Sequence[torch.Tensor]] = {}
        read: dict[int, Sequence[torch.Tensor]] = {}
        for each in rounds_of(plan, limit=self._limit, sizes=sizes):
            numbers = range(each.first, each.last)
            for number in numbers:
                if plan.source[number].ranks.shard_of(rank) is not None and number not in read:
                    read[number] = ends.read(number)
                if plan.target[number].ranks.shard_of(rank) is not None and number not in opened:
                    opened[number] = ends.open(number)
            self._one_round(each, sends, receives, read, opened)
            for number in numbers:
                if each.stop >= plan.target[number].runs.numel:
                    read.pop(number, None)
                    if number in opened:
                        ends.close(number, opened.pop(number))

    def _one_round(
        self,
        each: Round,
        sends: Moves,
        receives: Moves,
        read: dict[int, Sequence[torch.Tensor]],
        opened: dict[int, Sequence[torch.Tensor]],
    ) -> None:
        """Send, receive and put in place what belongs to one round."""
        rank = self._rank
        out, into = each.of(sends), each.of(receives)
        operations, arriving = [], []
        for peer in sorted(set(out.target_rank.tolist()) - {rank}):
            slices = _slices(out.chosen(out.target_rank == peer), read, of_source=True)
            message = torch.cat([part.to(self._device) for part in slices])
            operations.append(dist.P2POp(dist.isend, message, peer, self._group))
        for peer in sorted(set(into.source_rank.tolist()) - {rank}):
            slices = _slices(into.chosen(into.source_rank == peer), opened, of_source=False)
            size = sum(part.numel() for part in slices)
            message = torch.empty(size, dtype=torch.uint8, device=self._device)
            arriving.append((message, slices))
            operations.append(dist.P2POp(dist.irecv, message, peer, self._group))
        works = dist.batch_isend_irecv(operations) if operations else []
        own = into.chosen(into.source_rank == rank)
        if len(own):
            _copy(
                _slices(own, opened, of_source=False),
                _slices(own, read, of_source=True),
            )
        for work in works:
            work.wait()
        for message, slices in arriving:
            _copy(slices, list(message.split([part.numel() for part in slices])))


def _slices(
    moves: Moves, tensors: dict[int, Sequence[torch.Tensor]], *, of_source: bool
) -> list[torch.Tensor]:
    """Return the bytes of each move and each rider, in the order of the message."""
    offsets = moves.source_offset if of_source else moves.target_offset
    found = []
    for number, offset, numel in zip(
        moves.tensor.tolist(), offsets.tolist(), moves.numel.tolist(), strict=True
    ):
        found += [tensor.narrow(0, offset, numel).view(torch.uint8) for tensor in tensors[number]]
    return found


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
