"""Batches as trees: mapped, moved and joined without losing structure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from conformance.models import concatenate, map_tensors, move


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclass(frozen=True)
class Sample:
    image: Tensor
    label: str


def tree(value: float) -> dict[str, Any]:
    one = torch.full((2, 3), value)
    return {
        "pair": Pair(one, None),
        "list": [one + 1, (one + 2, 7)],
        "sample": Sample(one + 3, "cat"),
        "ordered": OrderedDict(z=one + 4, a=one + 5),
    }


def test_map_keeps_containers_order_and_plain_values() -> None:
    mapped = map_tensors(lambda t: t[0, 0].item(), tree(1.0))
    assert mapped == {
        "pair": Pair(1.0, None),  # type: ignore[arg-type]
        "list": [2.0, (3.0, 7)],
        "sample": Sample(4.0, "cat"),  # type: ignore[arg-type]
        "ordered": OrderedDict(z=5.0, a=6.0),
    }
    assert [type(mapped[key]) for key in mapped] == [Pair, list, Sample, OrderedDict]


def test_map_pairs_tensors_of_the_same_place() -> None:
    differences = map_tensors(lambda a, b: (b - a).unique().item(), tree(1.0), tree(3.0))
    assert differences["pair"] == Pair(2.0, None)  # type: ignore[arg-type]
    assert differences["list"] == [2.0, (2.0, 7)]


def test_concatenate_joins_every_tensor_on_dim_0_in_order() -> None:
    joined = concatenate([tree(1.0), tree(2.0), tree(3.0)])
    assert joined["pair"].left[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert joined["ordered"]["a"][:, 0].tolist() == [6, 6, 7, 7, 8, 8]
    assert joined["sample"].image.shape == (6, 3)


def test_concatenate_keeps_the_memory_format() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert concatenate([image, image]).is_contiguous(memory_format=torch.channels_last)


def test_move_reaches_every_tensor_and_keeps_dtypes() -> None:
    moved = move({"a": [torch.zeros(2, dtype=torch.int64)], "b": Pair(torch.ones(1), None)}, "meta")
    assert moved["a"][0].device.type == moved["b"].left.device.type == "meta"
    assert moved["a"][0].dtype == torch.int64
    assert moved["b"].right is None


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        ({"a": 1}, {"b": 1}, r"keys \[\['a'\], \['b'\]\]"),
        ([1], [1, 2], r"lengths \[1, 2\]"),
        ([1], (1,), r"\['list', 'tuple'\]"),
        (torch.ones(1), None, r"\['Tensor', 'NoneType'\]"),
        (3, 4, r"values \[3, 4\]"),
    ],
)
def test_batches_of_different_structure_are_refused(left: Any, right: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"differ in structure: got {words}"):
        concatenate([left, right])


def test_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="got no batch, wanted at least one"):
        concatenate([])
