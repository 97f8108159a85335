"""Every optimizer of torch over a wrapped model: it steps as on whole parameters, or is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.checkpoint import StateDictOptions, get_model_state_dict
from tests.fsdp.plain import batch, build, loss_of
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_optimizers import OPTIMIZERS

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
    kind = getattr(torch.optim, name)
    plain, model = build(), FullyShardedDataParallel(build(), **FORMS[form])

    def made(each: nn.Module) -> torch.optim.Optimizer:
        params = [p for p in each.parameters() if p.ndim == 2 or name != "Muon"]
        return kind(params, lr=0.01, **OPTIMIZERS[name])

    mine = made(model)
    theirs = made(plain)
    start = _whole(model)
    for step in range(2):

        def sharded(step: int = step) -> float:
            mine.zero_grad()
            loss = loss_of(model, batch(step, context.rank))
            loss.backward()
            dist.all_reduce(loss.detach().div_(context.world_size))
            return loss.item()

        def unsharded(step: int = step) -> float:
            theirs.zero_grad()
            losses = [loss_of(plain, batch(step, r)) for r in range(context.world_size)]
            mean = torch.stack(losses).mean()
            mean.backward()
            return mean.item()

        sharded()
        try:
            mine.step(sharded)
        except (NotImplementedError, RuntimeError) as error:
            assert all(map(torch.equal, _whole(model), start))
            return str(error)
        theirs.step(unsharded)
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
