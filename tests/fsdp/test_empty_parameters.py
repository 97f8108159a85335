"""A parameter without elements: it has a place, a gradient and an entry in every state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, fully_shard
from tests.fsdp.plain import whole
from tests.fsdp.ranks import agreed


class Hole(nn.Module):
    """A linear layer, and a parameter of no rows that takes part in its result."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.none.sum()


def _steps(context: RankContext, face: str) -> dict[str, list[int]]:
    torch.manual_seed(0)
    plain, model = Hole(), Hole()
    model.load_state_dict(plain.state_dict())
    if face == "composable":
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=face == "original")
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
    assert agreed(_steps, 2, face=face) == wanted
