"""From one sharded model into another inside a job: any form, any ranks, bit for bit."""

from __future__ import annotations

import pytest

from conformance.ranks import RankContext
from fsdp.reshard import reshard
from tests.fsdp.ranks import on_ranks
from tests.reshard.faces import ALL, QUICK, everything, fresh, made, marked, same


def _moves(
    context: RankContext, *, source: str, target: str, one: list[int], other: list[int], limit: int
) -> None:
    here, there = made(source, one), made(target, other, seed=8)
    before, after = marked(here), fresh(there, lr=0.5)
    untouched = everything(here, before) if here is not None else None
    reshard(here, there, before, after, limit=limit)
    wanted = made(target, other)
    expected = marked(wanted)
    if there is not None:
        same(everything(there, after), everything(wanted, expected))
    if untouched is not None:
        same(everything(here, before), untouched)


def check(source: str, target: str, one: list[int], other: list[int], limit: int = 1 << 20) -> None:
    world = max(*one, *other, 1) + 1
    on_ranks(
        _moves,
        world,
        source=source,
        target=target,
        one=one,
        other=other,
        limit=limit,
    )


PAIRS = [(one, other) for one in QUICK for other in QUICK if one != other]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_form_becomes_any_other(source: str, target: str) -> None:
    check(source, target, [0, 1], [0, 1])


@pytest.mark.long
@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
def test_every_form_becomes_every_other(source: str, target: str) -> None:
    check(source, target, [0, 1, 2], [0, 2])


@pytest.mark.parametrize(
    ("source", "target", "one", "other"),
    [
        ("flat", "fully", [0], [0, 1]),
        ("fully", "original_one", [0, 1], [1]),
        ("flat_norm", "flat_one", [0, 1], [2]),
        ("fully_last_dim", "flat", [0, 1], [1, 2]),
        ("flat", "fully", [0, 1, 2], [2, 0]),
        ("no_shard", "fully_root", [0, 1], [0, 1, 2]),
        ("ddp", "original_no_shard", [0, 1], [0, 1, 2]),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(map(str, value)),
)
def test_other_ranks(source: str, target: str, one: list[int], other: list[int]) -> None:
    check(source, target, one, other)


@pytest.mark.parametrize(
    ("source", "target"), [("hybrid", "fully"), ("flat", "fully_hybrid")], ids=lambda v: v
)
def test_replicas(source: str, target: str) -> None:
    check(source, target, [0, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize(("source", "target"), [("flat", "fully"), ("fully_root", "original")])
def test_small_rounds(source: str, target: str) -> None:
    check(source, target, [0, 1], [1, 0], limit=100)
