"""What one rank cannot go on with, all ranks raise: in one wording, whoever asks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.ranks import RankContext
from fsdp.checkpoint import CheckpointError, sharded
from fsdp.engine.agreement import Topic, agree, exchanged, together, without_names
from tests.fsdp.ranks import error_of, on_ranks

CPU = torch.device("cpu")


class _Own(PermissionError):
    """A kind that other processes need not know."""


class _Base(Exception):
    """Of no usual kind."""


ERRORS: dict[str, tuple[Exception, str]] = {
    "value": (ValueError("too much"), "ValueError"),
    "key": (KeyError("no 'a'"), "KeyError"),
    "missing": (FileNotFoundError(2, "gone", "x"), "FileNotFoundError"),
    "own": (_Own("not yours"), "PermissionError"),
    "checkpoint": (CheckpointError("torn"), "CheckpointError"),
    "odd": (_Base("odd"), "RuntimeError"),
}


def _fails(context: RankContext, *, way: str, case: str, ranks: list[int]) -> list[str]:
    error = ERRORS[case][0] if context.rank in ranks else None

    def call() -> str:
        if error is not None:
            raise error
        return "done"

    if way == "together":
        return error_of(lambda: together(call, None))
    group: Any = dist.group.WORLD
    return error_of(lambda: agree([], error, [group], CPU))


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("way", ["together", "agree"])
def test_the_first_rank_with_an_error_is_named_with_it(way: str, case: str) -> None:
    error, kind = ERRORS[case]
    here, other, there = on_ranks(_fails, 3, way=way, case=case, ranks=[1])
    assert other == [type(error).__name__, str(error)]
    text = str(error) if case != "key" else "no 'a'"
    assert here[0] == there[0] == kind
    assert here[1].strip('"') == there[1].strip('"') == f"on rank 1: {text}"


@pytest.mark.parametrize("way", ["together", "agree"])
def test_how_many_more_have_an_error_is_told_last(way: str) -> None:
    first, second, third = on_ranks(_fails, 3, way=way, case="value", ranks=[1, 2])
    assert first == ["ValueError", "on rank 1: too much (and 1 more told by other ranks)"]
    assert second == third == ["ValueError", "too much"]


def test_what_torch_makes_of_a_checkpoint_is_told_as_one_kind() -> None:
    text = "it cannot be read: OSError: [Errno 5] torn"
    with (
        pytest.raises(CheckpointError, match=re.escape(text)),
        sharded._one_kind_of_error("it cannot be read"),
    ):
        raise OSError(5, "torn")


def test_without_an_error_all_go_on() -> None:
    assert on_ranks(_fails, 2, way="together", case="value", ranks=[]) == (["", ""],) * 2


def _numbers(context: RankContext) -> list[Any]:
    return [*exchanged(lambda: ("own", (context.rank, 2**62 + context.rank)), None, 2)]


def test_numbers_of_all_ranks_come_in_their_order() -> None:
    told = [[rank, 2**62 + rank] for rank in range(3)]
    assert on_ranks(_numbers, 3) == (["own", told],) * 3


def _on_a_grid(context: RankContext, *, failing: list[int], lines: dict[str, str]) -> list[str]:
    """Rows first, then columns, as a mesh of shards and replicas is."""
    rows = [dist.new_group(each) for each in ([0, 1], [2, 3])]
    columns = [dist.new_group(each) for each in ([0, 2], [1, 3])]
    groups: Any = [rows[context.rank // 2], columns[context.rank % 2]]
    problem = RuntimeError(f"{context.rank} is stuck") if context.rank in failing else None
    mine = ["'a' (3,)", lines.get(str(context.rank), "'b' (4,)")]
    topic = Topic(what="list", parts="things", remedy="Say the same.", compared=without_names)
    return error_of(lambda: agree(mine, problem, groups, CPU, topic))


def test_what_is_heard_in_one_group_is_told_in_the_next() -> None:
    found = on_ranks(_on_a_grid, 4, failing=[3], lines={})
    assert found == (["RuntimeError", "on rank 3: 3 is stuck"],) * 3 + (
        ["RuntimeError", "3 is stuck"],
    )


def test_errors_of_several_groups_are_counted_once() -> None:
    found = on_ranks(_on_a_grid, 4, failing=[1, 2], lines={})
    text = "on rank 1: 1 is stuck (and 1 more told by other ranks)"
    assert found[0] == found[3] == ["RuntimeError", text]


def test_a_difference_is_heard_beyond_its_group() -> None:
    found = on_ranks(_on_a_grid, 4, failing=[], lines={"3": "'b' (5,)", "1": "'c' (4,)"})
    text = (
        "the list of rank 2 differs from that of rank 3 at number 1 of its things: rank 2 has "
        "'b' (4,), rank 3 has 'b' (5,). Say the same."
    )
    assert found == (["ValueError", text],) * 4


def test_an_error_counts_more_than_a_difference() -> None:
    found = on_ranks(_on_a_grid, 4, failing=[2], lines={"3": "'b' (5,)"})
    assert [text for _, text in found] == [
        "on rank 2: 2 is stuck",
        "on rank 2: 2 is stuck",
        "2 is stuck",
        "on rank 2: 2 is stuck",
    ]
