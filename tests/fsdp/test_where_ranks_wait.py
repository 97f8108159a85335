"""A rank that has waited in vain for a collective says where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.ranks import RankContext
from fsdp.comms import GroupAllocatedAllGather, GroupAllocatedReduceScatter
from fsdp.engine.trace import say_where
from tests.fsdp.plain import batch, build, loss_of
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_training import shard_blocks


class Late:
    """The handle of a collective that other ranks have not entered in time."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        raise RuntimeError("timed out")


class LateGather(GroupAllocatedAllGather):
    """Comes too late after ``passes`` times."""

    def __init__(self, group: dist.ProcessGroup, passes: int) -> None:
        super().__init__(group)
        self.passes = passes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        work = super().__call__(*args, **kwargs)
        self.passes -= 1
        return Late(work) if self.passes < 0 else work


class LateScatter(GroupAllocatedReduceScatter):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Late(super().__call__(*args, **kwargs))


def _notes(context: RankContext, where: str) -> list[str]:
    model = shard_blocks(build())
    block = model.blocks[1]
    if where == "reduction":
        block.set_custom_reduce_scatter(LateScatter(dist.group.WORLD))
    else:
        block.set_custom_all_gather(LateGather(dist.group.WORLD, passes=int(where == "backward")))
    with pytest.raises(RuntimeError, match="timed out") as raised:
        loss_of(model, batch(0, context.rank)).backward()
    return raised.value.__notes__


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("forward", "was in forward, at the all-gather"),
        ("backward", "was gathering for backward, at the all-gather"),
        ("reduction", "was in backward, at the reduction"),
    ],
)
def test_a_rank_that_has_waited_in_vain_says_where(where: str, told: str) -> None:
    for rank, notes in enumerate(on_ranks(_notes, 2, where=where)):
        assert [note.partition(". If")[0] for note in notes] == [
            f"FSDP: rank {rank} {told} of the unit that begins with 'blocks.1.up.weight'"
        ]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("the group is gone"), ["FSDP: this rank was in forward, at the all-gather"]),
        (torch.OutOfMemoryError("not by waiting"), []),
    ],
)
def test_the_error_itself_is_never_hidden(error: RuntimeError, told: list[str]) -> None:
    assert not dist.is_initialized()
    say_where(error, "all-gather", "weight", "in forward")
    notes = getattr(error, "__notes__", [])
    assert [note.partition(" of the unit")[0] for note in notes] == told
