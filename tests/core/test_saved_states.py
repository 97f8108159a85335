"""What is read from saved states: pieces by place, and the two forms of an optimizer's state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.scenarios.states import (
    content,
    first_names,
    layout,
    named_pieces,
    numbering,
    optimizer_content,
    sharded_elements,
)

ROWS = torch.arange(12.0).reshape(4, 3)


class Tied(nn.Module):
    """Two names of one parameter, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.ones(2, 2))
        self.head = self.body
        self.bias = nn.Parameter(torch.ones(2))


class Cut:
    """What a sharded tensor offers: shards with their places."""

    def __init__(self, *shards: tuple[list[int], Tensor]) -> None:
        self._shards = [
            SimpleNamespace(metadata=SimpleNamespace(shard_offsets=offsets), tensor=tensor)
            for offsets, tensor in shards
        ]
        self.dtype = torch.float32

    def size(self) -> torch.Size:
        return ROWS.shape

    def local_shards(self) -> list[Any]:
        return self._shards


class Chunked:
    """What a distributed tensor offers: the chunk that this rank has, and its elements."""

    def __init__(self, offsets: list[int], part: Tensor) -> None:
        self.offsets, self.part = torch.Size(offsets), part

    def size(self) -> torch.Size:
        return ROWS.shape

    def to_local(self) -> Tensor:
        return self.part

    def __create_chunk_list__(self) -> list[Any]:
        return [SimpleNamespace(offsets=self.offsets)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (ROWS, {"w@0,0": ROWS}),
        (torch.tensor(2.0), {"w@": torch.tensor(2.0)}),
        (Chunked([2, 0], ROWS[2:]), {"w@2,0": ROWS[2:]}),
        (Chunked([4, 0], ROWS[4:]), {}),
        (Cut(([0, 0], ROWS[:1]), ([3, 0], ROWS[3:])), {"w@0,0": ROWS[:1], "w@3,0": ROWS[3:]}),
        (Cut(), {}),
    ],
)
def test_pieces_go_by_name_and_place(value: Any, expected: dict[str, Tensor]) -> None:
    found = content({"w": value, "extra": b"bytes"})
    assert found.keys() == expected.keys()
    for place, piece in expected.items():
        assert torch.equal(found[place], piece)


def test_a_piece_is_a_copy() -> None:
    rows = ROWS.clone()
    found = content({"w": rows})
    rows.zero_()
    assert torch.equal(found["w@0,0"], ROWS)


def test_names_and_places_are_read_back() -> None:
    recorded = content({"a.w": Chunked([2, 0], ROWS[2:]), "a.b/step": torch.tensor(3.0)})
    found = {(name, piece.offsets): piece.values for name, piece in named_pieces(recorded)}
    assert found.keys() == {("a.w", (2, 0)), ("a.b/step", ())}
    assert torch.equal(found["a.w", (2, 0)], ROWS[2:])


def test_elements_of_what_is_cut_are_counted() -> None:
    state = {"flat": Cut(([0, 0], ROWS[:3])), "chunk": Chunked([0, 0], ROWS[:1]), "buffer": ROWS}
    assert sharded_elements(state) == 12


def test_parameters_are_numbered_as_the_optimizer_has_them() -> None:
    module = Tied()
    groups: list[dict[str, Any]] = [{"params": [module.bias]}, {"params": [module.body]}]
    assert numbering(module, torch.optim.SGD(groups, lr=0.1)) == ["bias", "body"]
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert numbering(module, stranger) == [""]
    assert first_names(module) == {"body": "body", "head": "body", "bias": "bias"}


@pytest.mark.parametrize("named", [True, False])
def test_both_forms_of_an_optimizer_state_are_read(*, named: bool) -> None:
    module = Tied()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module.body.grad = torch.ones(2, 2)
    optimizer.step()
    state = optimizer.state_dict()
    if named:
        state["state"] = {"head": state["state"][0]}
        state["param_groups"][0]["params"] = ["head", "bias"]
    found = optimizer_content(state, ["body", "bias"])
    name = "head" if named else "body"
    assert found.known
    assert set(found.entries) == {f"{name}/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert [group["lr"] for group in found.options] == [0.1]
    assert "params" not in found.options[0]
    assert layout(found.entries)[f"{name}/exp_avg"]["shape"] == [2, 2]


def test_a_number_in_an_optimizer_state_is_a_tensor_without_dimension() -> None:
    state = {"state": {0: {"step": 3, "nothing": None}}, "param_groups": []}
    found = optimizer_content(state, ["w"])
    assert list(found.entries) == ["w/step"]
    assert found.entries["w/step"].item() == 3.0


@pytest.mark.parametrize(
    "state",
    [
        {"something": 1},
        {"state": [1, 2]},
        {"state": {(0, 1): {}}},
        {"state": {7: {"step": 1}}},
    ],
)
def test_another_form_is_said_to_be_unknown(state: dict[str, Any]) -> None:
    assert not optimizer_content(state, ["w"]).known


def test_no_state_is_nothing() -> None:
    found = optimizer_content({}, ["w"])
    assert found.known
    assert (dict(found.entries), list(found.options)) == ({}, [])
