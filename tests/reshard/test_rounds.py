"""How a plan is cut into rounds, by hand: what fits into one, and what is too large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from fsdp.reshard.dealt import Ranks, by_dim, flat
from fsdp.reshard.moves import Moves
from fsdp.reshard.plan import Plan
from fsdp.reshard.rounds import Round, rounds_of

END = 1 << 62
ONE, TWO = Ranks([[0]]), Ranks([[0, 1]])


def plan(shapes: Mapping[str, Sequence[int]], source: Ranks = TWO, target: Ranks = ONE) -> Plan:
    return Plan(
        {name: by_dim(shape, source) for name, shape in shapes.items()},
        {name: by_dim(shape, target) for name, shape in shapes.items()},
    )


def spans(rounds: Sequence[Round]) -> list[tuple[int, int, int, int]]:
    return [(each.first, each.last, each.start, each.stop) for each in rounds]


def test_tensors_that_fit_together_are_one_round() -> None:
    both = plan({"a": (4,), "b": (6,)})
    assert spans(rounds_of(both, limit=10, sizes=[1, 1])) == [(0, 2, 0, END)]
    assert spans(rounds_of(both, limit=9, sizes=[1, 1])) == [(0, 1, 0, END), (1, 2, 0, END)]


def test_what_travels_with_an_element_counts_in_bytes() -> None:
    both = plan({"a": (4,), "b": (6,)})
    assert spans(rounds_of(both, limit=32, sizes=[2, 4])) == [(0, 2, 0, END)]
    assert spans(rounds_of(both, limit=31, sizes=[2, 4])) == [(0, 1, 0, END), (1, 2, 0, END)]


def test_the_rank_with_the_most_decides() -> None:
    """The source has three elements on the first rank and one on the second, of each tensor."""
    shapes = {"a": (3, 1), "b": (3, 1), "c": (3, 1)}
    found = rounds_of(plan(shapes, TWO, Ranks([[0, 1, 2]])), limit=4, sizes=[1, 1, 1])
    assert spans(found) == [(0, 2, 0, END), (2, 3, 0, END)]


def test_what_the_target_gets_counts_as_what_the_source_gives() -> None:
    shapes = {"a": (4,), "b": (4,)}
    for source, target in ((TWO, ONE), (ONE, TWO)):
        found = rounds_of(plan(shapes, source, target), limit=7, sizes=[1, 1])
        assert spans(found) == [(0, 1, 0, END), (1, 2, 0, END)]


@pytest.mark.parametrize(
    ("limit", "size", "widths"),
    [(4, 1, [(0, 4), (4, 8), (8, 12)]), (9, 2, [(0, 4), (4, 8), (8, 12)]), (10, 1, None)],
    ids=["exact", "rounded down", "it fits"],
)
def test_a_tensor_that_is_too_large_is_cut_by_elements(
    limit: int, size: int, widths: list[tuple[int, int]] | None
) -> None:
    found = rounds_of(plan({"a": (10,)}), limit=limit, sizes=[size])
    assert spans(found) == [(0, 1, *each) for each in widths or [(0, END)]]


def test_an_element_that_is_too_large_travels_alone() -> None:
    found = rounds_of(plan({"a": (3,)}), limit=1, sizes=[8])
    assert spans(found) == [(0, 1, 0, 1), (0, 1, 1, 2), (0, 1, 2, 3)]


def test_a_large_tensor_stands_between_those_before_and_after() -> None:
    shapes = {"a": (1,), "b": (6,), "c": (1,), "d": (1,)}
    found = rounds_of(plan(shapes), limit=4, sizes=[1] * 4)
    cut = [(1, 2, 0, 4), (1, 2, 4, 8)]
    assert spans(found) == [(0, 1, 0, END), *cut, (2, 4, 0, END)]


def test_a_large_tensor_at_the_end_leaves_no_round_behind_it() -> None:
    assert spans(rounds_of(plan({"a": (6,)}), limit=4, sizes=[1])) == [(0, 1, 0, 4), (0, 1, 4, 8)]


def test_no_tensors_need_no_round() -> None:
    assert rounds_of(Plan({}, {}), limit=1, sizes=[]) == []


def test_a_round_takes_whole_tensors_unless_it_is_told_otherwise() -> None:
    moves = Moves.together(list(plan({"a": (4,), "b": (4,), "c": (4,)}).all_moves()))
    inside = Round(first=1, last=2).of(moves)
    assert inside.tensor.tolist() == [1, 1]
    assert (inside.start.tolist(), inside.numel.tolist()) == ([0, 2], [2, 2])


def test_all_of_a_rank_counts_that_lies_flat() -> None:
    """End to end over two ranks the first has all of ``a`` and one element of ``b``."""
    shapes = {"a": (4,), "b": (6,)}
    both = Plan(flat(shapes, TWO), flat(shapes, TWO))
    assert spans(rounds_of(both, limit=5, sizes=[1, 1])) == [(0, 2, 0, END)]
    assert spans(rounds_of(both, limit=4, sizes=[1, 1])) == [
        *((0, 1, 0, END),),
        *((1, 2, 0, 4), (1, 2, 4, 8)),
    ]
