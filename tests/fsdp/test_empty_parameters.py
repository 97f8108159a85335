"""A parameter without elements: it has a place, a gradient and an entry in every state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.engine.layout import Extent, side_by_side
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import whole
from tests.fsdp.ranks import agreed


class Nothing(nn.Module):
    """Has parameters of no rows or no columns, and no other."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.none = nn.ParameterList(torch.empty(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(none.sum() for none in self.none)


class Apart(nn.Module):
    """Such in a unit of its own, of which nothing is sent and nobody holds anything."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.no_rows, self.no_columns = Nothing((0, 3)), Nothing((3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.no_columns(self.no_rows(x)))


class Hole(nn.Module):
    """A linear layer, and a parameter of no rows that takes part in its result."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.none.sum()


def _steps(
    context: RankContext, face: str, kind: type[nn.Module], **options: Any
) -> dict[str, list[int]]:
    torch.manual_seed(0)
    plain, model = kind(), kind()
    model.load_state_dict(plain.state_dict())
    if face == "composable":
        for unit in model.modules():
            if isinstance(unit, Nothing):
                fully_shard(unit, **options)
        fully_shard(model, **options)
    else:
        model = FullyShardedDataParallel(
            model,
            use_orig_params=face == "original",
            auto_wrap_policy=ModuleWrapPolicy({Nothing}),
        )
    pair = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(2):
        data = [torch.full((2, 4), 1.0 + step + rank) for rank in range(context.world_size)]
        model(data[context.rank]).square().sum().backward()
        for x in data:
            (plain(x).square().sum() / context.world_size).backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole(state[name]), value)
    return {name: list(whole(value).shape) for name, value in state.items()}


@pytest.mark.parametrize("face", ["composable", "flat", "original"])
def test_a_parameter_without_elements_trains_and_is_saved(face: str) -> None:
    wanted = {"none": [0, 3], "body.weight": [4, 4], "body.bias": [4]}
    assert agreed(_steps, 2, face=face, kind=Hole) == wanted


@pytest.mark.parametrize("face", ["flat", "composable", "original"])
def test_a_unit_of_nothing_else_trains_and_is_saved(face: str) -> None:
    wanted = {"body.weight": [4, 4], "body.bias": [4]}
    wanted |= {"no_rows.none.0": [0, 3], "no_columns.none.0": [3, 0]}
    assert agreed(_steps, 2, face=face, kind=Apart) == wanted


def test_a_unit_of_nothing_else_is_gathered_again_over_fewer_ranks() -> None:
    assert agreed(_steps, 4, face="composable", kind=Apart, reshard_after_forward=2)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
@pytest.mark.parametrize("world", [1, 2])
def test_beside_a_parameter_that_is_gathered_in_place_it_costs_nothing(
    shape: tuple[int, int], world: int
) -> None:
    none, weight = Extent.of(shape, 0), Extent.of((4, 2), 0)
    for both in ([none, weight], [weight, none]):
        layout = side_by_side(both, world)
        assert layout.total_numel == weight.numel
        assert layout.is_view
        assert layout.unsharded_offsets == (0, 0)
