"""What a shard holds, as boxes: every element once, in the order in which it lies."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from fsdp.reshard.boxes import boxes_of, cut_run
from tests.reshard.test_plan import MANY, PARTS, SLOW, Side, sides


def elements(both: tuple[Side, Side]) -> None:
    dealt, held = both[0]
    for name, each in dealt.items():
        labels = np.arange(np.prod(each.shape, dtype=int)).reshape(each.shape)
        for rank, tensors in held.items():
            found: list[int] = []
            for box in boxes_of(each, each.ranks.shard_of(rank)):
                inside = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                part = labels[inside]
                assert part.shape == box.sizes
                assert box.start == len(found)
                stored = part.transpose(box.order) if box.order is not None else part
                assert stored.shape == box.stored
                assert np.array_equal(stored.transpose(box.inverse), part)
                found += stored.ravel().tolist()
            assert found == tensors.get(name, [])


@pytest.mark.property
@pytest.mark.parametrize("part", PARTS)
@given(both=sides())
@settings(max_examples=MANY, deadline=None, suppress_health_check=SLOW)
def test_boxes_hold_what_the_shard_holds(part: int, both: tuple[Side, Side]) -> None:
    elements(both)


def test_a_run_is_at_most_two_boxes_per_dim() -> None:
    shape = (3, 4, 5)
    most = 0
    for start, stop in itertools.combinations(range(61), 2):
        boxes: list[Any] = list(cut_run(shape, start, stop))
        most = max(most, len(boxes))
    assert most == 2 * len(shape) - 1


def test_a_tensor_without_dims_is_one_box() -> None:
    assert list(cut_run((), 0, 1)) == [((), ())]
