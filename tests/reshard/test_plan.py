"""Laws of the reshard plan, with integers only, against labels that are moved one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp.reshard.dealt import Dealt, Ranks, by_dim, flat, whole
from fsdp.reshard.moves import Moves
from fsdp.reshard.nested import Boxes
from fsdp.reshard.plan import Plan
from fsdp.reshard.rounds import rounds_of
from tests.draws import draws, sharing
from tests.reshard import labels
from tests.reshard.labels import Labels

Side = tuple[dict[str, Dealt], Labels]
KINDS = ("flat", "aligned", "dim 0", "last dim", "whole")
NESTED = ("flat in boxes", "boxes")
SHARE = 10
PARTS = sharing(SHARE)  # tests of one law: a worker each
MANY = draws(75, integers=True, parts=SHARE)


def side(kind: str, shapes: dict[str, Any], ranks: Any, orders: dict[str, Any]) -> Side:
    """One group of tensors: what the package says, and what the labels say."""
    where = Ranks(ranks) if kind != "whole" else Ranks.whole(list(itertools.chain(*ranks)))
    if kind in ("flat", "aligned"):
        align = 4 if kind == "aligned" else 1
        dealt = flat(shapes, where, align=align)
        dealt = {name: replace(each, order=orders.get(name)) for name, each in dealt.items()}
        tensors = {n: labels.enumerated(s, orders.get(n)) for n, s in shapes.items()}
        return dealt, labels.end_to_end(tensors, ranks, align)
    if kind == "whole":
        dealt = {n: replace(whole(s, where), order=orders.get(n)) for n, s in shapes.items()}
        parts = [
            labels.whole(n, labels.enumerated(s, orders.get(n)), ranks) for n, s in shapes.items()
        ]
        return dealt, labels.merged(parts)
    if kind == "flat in boxes":
        return _flat_in_boxes(shapes, ranks, orders)
    if kind == "boxes":
        return _boxes(shapes, ranks)
    dims = {n: 0 if kind == "dim 0" else len(s) - 1 for n, s in shapes.items()}
    dealt = {n: by_dim(s, where, dims[n]) for n, s in shapes.items()}
    parts = [labels.chunked(n, s, ranks, dims[n]) for n, s in shapes.items()]
    return dealt, labels.merged(parts)


def _outer(ranks: Any) -> int:
    """Over how many ranks tensor parallelism cuts: the smallest that leaves a whole number."""
    shards = len(ranks[0])
    return next((n for n in range(2, shards + 1) if shards % n == 0), 1)


def _flat_in_boxes(shapes: dict[str, Any], ranks: Any, orders: dict[str, Any]) -> Side:
    """Boxes of what divides, and the rest whole, end to end in one flat parameter of each box."""
    outer = _outer(ranks)
    inner = len(ranks[0]) // outer
    dims = {n: len(s) - 1 for n, s in shapes.items() if s[-1] % outer == 0}
    local = {n: (*s[:-1], s[-1] // outer) if n in dims else s for n, s in shapes.items()}
    rows = [row[i * inner : (i + 1) * inner] for row in ranks for i in range(outer)]
    dealt = flat(local, Ranks(rows))
    for name, dim in dims.items():
        order = orders.get(name, tuple(range(len(shapes[name]))))
        boxes = Boxes(
            shape=tuple(shapes[name][d] for d in order),
            chunks=((order.index(dim), outer),),
            inner=dealt[name].cut,
            inner_shards=inner,
        )
        dealt[name] = replace(dealt[name], shape=shapes[name], cut=boxes, ranks=Ranks(ranks))
    dealt = {name: replace(each, order=orders.get(name)) for name, each in dealt.items()}
    parts = []
    for number, row in enumerate(rows):
        held = {n: labels.box(s, dims.get(n), outer, number % outer) for n, s in shapes.items()}
        kept = tuple(range(8))
        tensors = {
            n: list(box.transpose(orders.get(n, kept[: box.ndim])).ravel())
            for n, box in held.items()
        }
        parts.append(labels.end_to_end(tensors, [row], 1))
    return dealt, labels.merged(parts)


def _boxes(shapes: dict[str, Any], ranks: Any) -> Side:
    """Cut on the last dim, and what that leaves on dim 0."""
    outer = _outer(ranks)
    inner = len(ranks[0]) // outer
    dealt, parts = {}, []
    for name, shape in shapes.items():
        cut = Boxes(shape=shape, chunks=((len(shape) - 1, outer), (0, inner)))
        dealt[name] = Dealt(shape=shape, cut=cut, ranks=Ranks(ranks))
        for row in ranks:
            for index, rank in enumerate(row):
                first = labels.box(shape, len(shape) - 1, outer, index // inner)
                held = labels.part(first, 0, inner, index % inner)
                parts.append({rank: {name: list(held.ravel())}})
    return dealt, labels.merged(parts)


@st.composite
def sides(draw: st.DrawFn) -> tuple[Side, Side]:
    """Two ways to deal out the same tensors: groups, kinds, replicas, sub-groups, orders."""
    count = draw(st.integers(1, 4))
    shape = st.lists(st.integers(0, 5), min_size=1, max_size=3)
    shapes = {f"t{i}": tuple(draw(shape)) for i in range(count)}
    found = []
    for _ in range(2):
        names, groups = list(shapes), []
        while names:
            size = draw(st.integers(1, len(names)))
            groups.append({name: shapes[name] for name in names[:size]})
            names = names[size:]
        parts = []
        for group in groups:
            kind = draw(st.sampled_from((*KINDS, *NESTED)))
            world = draw(st.integers(1, 8))
            divisors = [n for n in range(1, world + 1) if world % n == 0]
            replicas = draw(st.sampled_from(divisors))
            ids = draw(st.permutations(range(world + 2)))[:world]
            ranks = np.array(ids).reshape(replicas, -1).tolist()
            orders = {
                name: tuple(draw(st.permutations(range(len(shape)))))
                for name, shape in group.items()
                if kind not in ("dim 0", "last dim", "boxes") and draw(st.integers(0, 3)) == 0
            }
            parts.append(side(kind, group, ranks, orders))
        dealt = {name: each for part, _ in parts for name, each in part.items()}
        found.append((dealt, labels.merged([held for _, held in parts])))
    return found[0], found[1]


def rows(moves: Moves) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in moves.columns()), strict=True))


def simulate(plan: Plan, source: Labels, target: Labels, moves: Moves) -> Labels:
    """Move labels one by one; every place is filled once."""
    found: Labels = {
        rank: {name: [-1] * len(held) for name, held in tensors.items()}
        for rank, tensors in target.items()
    }
    for tensor, _, numel, sender, at, receiver, to in rows(moves):
        name = plan.names[tensor]
        place = found[receiver][name]
        assert place[to : to + numel] == [-1] * numel, "filled twice, or past the end"
        taken = source[sender][name][at : at + numel]
        assert len(taken) == numel > 0, "past the end of what the source holds"
        place[to : to + numel] = taken
    return found


def check(source: Side, target: Side, host_size: int = 1) -> None:
    plan = Plan(source[0], target[0], host_size=host_size)
    world = range(plan.world)
    received = Moves.together([plan.receives(rank) for rank in world])
    assert simulate(plan, source[1], target[1], received) == target[1]
    sent = Moves.together([plan.sends(rank) for rank in world])
    every = Moves.together(list(plan.all_moves()))
    assert Counter(rows(sent)) == Counter(rows(received)) == Counter(rows(every))
    for one, other in itertools.product(world, world):
        pair = (sent.source_rank == one) & (sent.target_rank == other)
        same = (received.source_rank == one) & (received.target_rank == other)
        assert rows(sent.chosen(pair)) == rows(received.chosen(same)), "in another order"
    # Who has a run itself takes it from nobody else.
    for tensor, _, _, sender, _, receiver, _ in rows(received):
        shard = plan.source[tensor].ranks.shard_of(receiver)
        if shard is not None and shard == plan.source[tensor].ranks.shard_of(sender):
            assert sender == receiver


def check_rounds(source: Side, target: Side, limit: int) -> None:
    plan = Plan(source[0], target[0])
    sizes = [1] * len(plan.names)
    rounds = rounds_of(plan, limit=limit, sizes=sizes)
    every = Moves.together(list(plan.all_moves()))
    parts = [each.of(every) for each in rounds]
    assert simulate(plan, source[1], target[1], Moves.together(parts)) == target[1]
    for part in parts:
        for rank in range(plan.world):
            assert int(part.numel[part.target_rank == rank].sum()) <= limit


def test_a_round_may_lie_on_one_rank() -> None:
    shapes = {"t": (3,)}
    source, target = side("flat", shapes, [[0, 1, 2]], {}), side("flat", shapes, [[0, 1]], {})
    check_rounds(source, target, limit=1)


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.property
@pytest.mark.parametrize("part", PARTS)
@given(both=sides(), host_size=st.integers(1, 4))
@settings(max_examples=MANY, deadline=None, suppress_health_check=SLOW)
def test_every_element_arrives_once(part: int, both: tuple[Side, Side], host_size: int) -> None:
    check(*both, host_size)


@pytest.mark.property
@pytest.mark.parametrize("part", PARTS)
@given(both=sides(), limit=st.integers(1, 40))
@settings(max_examples=MANY, deadline=None, suppress_health_check=SLOW)
def test_rounds_move_everything_and_stay_small(
    part: int, both: tuple[Side, Side], limit: int
) -> None:
    check_rounds(*both, limit)


SHAPES = {"a": (7, 3), "b": (5,), "c": (2, 3, 4), "d": (1,), "e": (0, 3)}
WORLDS = range(1, 9)


@pytest.mark.parametrize("other", WORLDS, ids=lambda n: f"to{n}")
@pytest.mark.parametrize("one", WORLDS, ids=lambda n: f"from{n}")
def test_all_pairs_of_worlds(one: int, other: int) -> None:
    check(
        side("flat", SHAPES, [list(range(one))], {}),
        side("dim 0", SHAPES, [list(range(other))], {}),
    )


@pytest.mark.long
@pytest.mark.parametrize("other", WORLDS, ids=lambda n: f"to{n}")
@pytest.mark.parametrize("one", WORLDS, ids=lambda n: f"from{n}")
@pytest.mark.parametrize("second", [*KINDS, *NESTED])
@pytest.mark.parametrize("first", [*KINDS, *NESTED])
def test_all_pairs_of_worlds_and_kinds(first: str, second: str, one: int, other: int) -> None:
    source = side(first, SHAPES, [list(range(one))], {})
    target = side(second, SHAPES, [list(range(other))], {})
    check(source, target)


@pytest.mark.property
@pytest.mark.parametrize("part", PARTS)
@given(both=sides())
@settings(max_examples=MANY, deadline=None, suppress_health_check=SLOW)
def test_there_and_back_is_the_identity(part: int, both: tuple[Side, Side]) -> None:
    (one, held), (other, _) = both
    there, back = Plan(one, other), Plan(other, one)
    zeros = {r: {n: [-1] * len(v) for n, v in t.items()} for r, t in both[1][1].items()}
    middle = simulate(there, held, zeros, Moves.together(list(there.all_moves())))
    again = simulate(back, middle, held, Moves.together(list(back.all_moves())))
    assert again == held


def test_replicas_share_the_work() -> None:
    source = {"w": by_dim((64, 4), Ranks([list(range(r, r + 4)) for r in (0, 4, 8, 12)]))}
    target = {"w": whole((64, 4), Ranks.whole(list(range(16, 32))))}
    moves = Moves.together(list(Plan(source, target).all_moves()))
    sent = np.bincount(moves.source_rank, moves.numel, 32)
    assert sent[:16].tolist() == [64 * 4 * 16 / 16] * 16


def test_a_replica_on_the_own_host_is_preferred() -> None:
    source = {"w": whole((6,), Ranks.whole([0, 1, 8]))}
    target = {"w": whole((6,), Ranks.whole([9]))}
    assert Plan(source, target, host_size=8).receives(9).source_rank.tolist() == [8]
    assert Plan(source, target, host_size=1).receives(9).source_rank.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"b": None}, "'b' is in the source and not in the target"),
        ({"z": (3,)}, "'z' is in the target and not in the source"),
        ({"a": (3, 7)}, r"'a' has shape \(7, 3\) in the source and \(3, 7\)"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_other_tensors_are_refused_by_name(change: dict[str, Any], fragment: str) -> None:
    ranks = Ranks([[0, 1]])
    source = flat(SHAPES, ranks)
    shapes = {name: shape for name, shape in (SHAPES | change).items() if shape is not None}
    with pytest.raises(ValueError, match=fragment):
        Plan(source, flat(shapes, ranks))


def test_ranks_must_be_a_table() -> None:
    with pytest.raises(ValueError, match="rows of equal length"):
        Ranks([[]])
    with pytest.raises(ValueError, match="one shard of a tensor"):
        Ranks([[0, 1], [1, 2]])
