"""Every optimizer of torch over a wrapped model: it steps as on whole parameters, or is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.checkpoint import StateDictOptions, get_model_state_dict
from tests.fsdp.plain import build
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_optimizers import (
    OPTIMIZERS,
    closure_over,
    optimizer_called,
    plain_closure_over,
)

FORMS: dict[str, dict[str, Any]] = {
    "flat": {},
    "original": {"use_orig_params": True},
    "whole": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
}
WHOLE = r"it computes with whole tensors, and is given '\S+' as a part, .*NO_SHARD with use_orig_pa"
ON_PARTS = {
    "Adafactor": f"Adafactor .*{WHOLE}",
    "LBFGS": f"LBFGS .*{WHOLE}",
    "SparseAdam": r"SparseAdam takes sparse gradients only, .* are dense\. Use Adam\.$",
}
"""What those say that cannot step on parts of parameters."""
ON_WHOLE = {"SparseAdam": "SparseAdam does not support dense gradients"}  # torch's own words
CELLS = [(form, name) for form in FORMS for name in OPTIMIZERS if name != "Muon" or form == "whole"]
"""Of a part of a parameter, which is no matrix, Muon cannot be made: torch refuses it."""


def _whole(model: nn.Module) -> list[torch.Tensor]:
    options = StateDictOptions(full_state_dict=True)
    return [value.clone() for value in get_model_state_dict(model, options=options).values()]


def _trained(context: RankContext, form: str, name: str) -> str:
    """The refusal of a step, which changed nothing; or nothing: all is as in the plain model."""
    rank, world = context.rank, context.world_size
    plain, model = build(), FullyShardedDataParallel(build(), **FORMS[form])
    mine, theirs = optimizer_called(name, model), optimizer_called(name, plain)
    start = _whole(model)
    for step in range(2):
        closure = closure_over(model, mine, step, rank, world)
        closure()
        try:
            mine.step(closure)
        except (NotImplementedError, RuntimeError) as error:
            assert all(map(torch.equal, _whole(model), start))
            return str(error)
        theirs.step(plain_closure_over(plain, theirs, step, world))
    # Steps that divide by a gradient's size magnify its last bits; Muon computes in bfloat16.
    tolerance = 6e-4 if name == "Muon" else 2e-4
    wanted = list(plain.state_dict().values())
    torch.testing.assert_close(_whole(model), wanted, rtol=tolerance, atol=tolerance)
    return ""


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:The `NO_SHARD`")
@pytest.mark.parametrize(("form", "name"), CELLS)
def test_an_optimizer_of_torch_steps_as_on_whole_parameters_or_refuses(
    form: str, name: str
) -> None:
    refusing = ON_WHOLE if form == "whole" else ON_PARTS
    for said in on_ranks(_trained, 2, form=form, name=name):  # each names a part of its own
        assert re.match(refusing.get(name, "$"), said)
