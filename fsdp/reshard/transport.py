"""Carries out a plan inside a job: runs of elements from rank to rank, in rounds of bounded size.

Knows a plan, one-dimensional tensors and a process group; whose tensors they are is the business of
the two ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fsdp.reshard.moves import Moves
from fsdp.reshard.plan import Plan
from fsdp.reshard.rounds import Round, rounds_of
from fsdp.reshard.telling import ranks_of

LIMIT = 64 << 20  # bytes per round that a rank receives, and that it sends to each replica


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
    """Moves the tensors of a plan, as often as it is asked to.

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
        self._planned: tuple[tuple[int, ...], list[tuple[Round, Moves, Moves]]] | None = None

    @torch.no_grad()
    def run(self, ends: Ends) -> None:
        """Move everything.

        *Collective* over the group: in each round one all-to-all. *Memory*: the messages of one
        round, and what ``ends`` opens for the tensors of one round. *Blocks* the host until each
        round is over (the current stream, where there are streams).
        """
        plan, rank = self._plan, self._rank
        sizes = tuple(
            sum(dtype.itemsize for dtype in ends.riders(number))
            for number in range(len(plan.names))
        )
        opened: dict[int, Sequence[torch.Tensor]] = {}
        read: dict[int, Sequence[torch.Tensor]] = {}
        for each, out, into in self._steps(sizes):
            numbers = range(each.first, each.last)
            for number in numbers:
                if plan.source[number].ranks.shard_of(rank) is not None and number not in read:
                    read[number] = ends.read(number)
                if plan.target[number].ranks.shard_of(rank) is not None and number not in opened:
                    opened[number] = ends.open(number)
            self._one_round(out, into, read, opened)
            for number in numbers:
                if each.stop >= plan.target[number].runs.numel:
                    read.pop(number, None)
                    if number in opened:
                        ends.close(number, opened.pop(number))

    def _steps(self, sizes: tuple[int, ...]) -> list[tuple[Round, Moves, Moves]]:
        """Return the rounds, and what this rank sends and receives in each; computed once."""
        if self._planned is None or self._planned[0] != sizes:
            sends, receives = self._plan.sends(self._rank), self._plan.receives(self._rank)
            rounds = rounds_of(self._plan, limit=self._limit, sizes=sizes)
            self._planned = sizes, [(each, each.of(sends), each.of(receives)) for each in rounds]
        return self._planned[1]

    def _one_round(
        self,
        out: Moves,
        into: Moves,
        read: dict[int, Sequence[torch.Tensor]],
        opened: dict[int, Sequence[torch.Tensor]],
    ) -> None:
        """Send, receive and put in place what belongs to one round."""
        rank = self._rank
        sent = {
            peer: _slices(out.chosen(out.target_rank == peer), read, of_source=True)
            for peer in set(out.target_rank.tolist()) - {rank}
        }
        wanted = {
            peer: _slices(into.chosen(into.source_rank == peer), opened, of_source=False)
            for peer in set(into.source_rank.tolist()) - {rank}
        }
        arrive = _launch(sent, wanted, self._group, self._device)
        own = into.chosen(into.source_rank == rank)
        if len(own):
            _copy(
                _slices(own, opened, of_source=False),
                _slices(own, read, of_source=True),
            )
        arrive()


def _launch(
    sent: Mapping[int, list[torch.Tensor]],
    wanted: Mapping[int, list[torch.Tensor]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Callable[[], None]:
    """Start to send bytes to each rank; return what waits for those of others and copies them.

    *Collective* over ``group``: one all-to-all. *Memory*: what is sent, and what arrives.
    """
    ranks = ranks_of(group)
    if len(ranks) == 1:
        return lambda: None
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    # Blocking copies: on the host a run could be sent before it has arrived.
    parts = [part.to(device) for rank in ranks for part in sent.get(rank, ())]
    slices = [part for rank in ranks for part in wanted.get(rank, ())]
    from_ranks, to_ranks = (
        [sum(part.numel() for part in side.get(rank, ())) for rank in ranks]
        for side in (wanted, sent)
    )
    arrived = torch.empty(sum(from_ranks), dtype=torch.uint8, device=device)
    out = torch.cat([empty, *parts])
    work = dist.all_to_all_single(arrived, out, from_ranks, to_ranks, group=group, async_op=True)
    assert work is not None, "an asynchronous collective has a handle"

    def arrive() -> None:
        work.wait()
        _copy(slices, list(arrived.split([part.numel() for part in slices])))

    return arrive


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
