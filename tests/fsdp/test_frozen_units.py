"""When backward gives up a unit that is frozen as a whole: nobody waits for its gradients."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fsdp.engine.param_group import FSDPParamGroup
from tests.fsdp.plain import DIM, batch, build, loss_of
from tests.fsdp.ranks import agreed, count

FACES = pytest.mark.parametrize("face", ["composable", "flat", "original"])
UNITS = ("first", "middle", "between", "last")


class Chain(nn.Module):
    """Units in a row. The frozen one in the middle runs as often as asked for."""

    def __init__(self, *, twice: bool, frozen: tuple[str, ...]) -> None:
        super().__init__()
        self.first, self.middle, self.between, self.last = (nn.Linear(DIM, DIM) for _ in UNITS)
        self.twice = twice
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(torch.relu(self.first(x)))
        x = torch.relu(self.between(x))
        return self.last(self.middle(x) if self.twice else x)


def sharded(face: str, *, keep: bool, **model: Any) -> tuple[nn.Module, dict[str, FSDPParamGroup]]:
    """The model with each of its layers as a unit, and the groups of these."""
    chain = build(lambda: Chain(**model))
    if face == "composable":
        for name in UNITS:
            fully_shard(getattr(chain, name), reshard_after_forward=not keep)
        fully_shard(chain)
        return chain, {name: getattr(chain, name)._state().groups[0] for name in UNITS}
    strategy = ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
    options: dict[str, Any] = {
        "sharding_strategy": strategy,
        "use_orig_params": face == "original",
        "device_id": torch.device("cpu"),
    }
    for name in UNITS:
        setattr(chain, name, FullyShardedDataParallel(getattr(chain, name), **options))
    groups = {name: getattr(chain, name)._state.groups[0] for name in UNITS}
    return FullyShardedDataParallel(chain, **options), groups


def _through(
    context: RankContext, face: str, *, keep: bool, twice: bool, frozen: tuple[str, ...]
) -> list[Any]:
    """What happens in backward: units given up, reductions, and gradients that reach a unit."""
    model, groups = sharded(face, keep=keep, twice=twice, frozen=frozen)
    events: list[str] = []
    names = {group: name for name, group in groups.items()}
    to_sharded, reduce = FSDPParamGroup.to_sharded, FSDPParamGroup._reduce

    def given_up(group: FSDPParamGroup) -> None:
        if group.sharded_state.name != "SHARDED":
            events.append(f"{names[group]} given up")
        to_sharded(group)

    def reduced(group: FSDPParamGroup, **given: Any) -> None:
        reduce(group, **given)
        if group in names and names[group] not in frozen:
            events.append(f"{names[group]} reduced")

    def watched(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: events.append(f"at {name}"))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            clean = name.replace("_fsdp_wrapped_module", "").strip(".")
            module.register_forward_hook(watched(clean))
    loss = loss_of(model, batch(0, context.rank))
    with ExitStack() as stack:
        for name, method in (("to_sharded", given_up), ("_reduce", reduced)):
            stack.enter_context(patch.object(FSDPParamGroup, name, method))
        before = count(context, "reduce_scatter")
        loss.backward()
        scattered = count(context, "reduce_scatter") - before
    assert {group.sharded_state.name for group in groups.values()} == {"SHARDED"}
    return [scattered, events]


ONCE = [
    *("at last", "last given up", "last reduced"),
    *("at between", "between given up", "between reduced"),
    *("at middle", "middle given up"),
    *("at first", "first given up", "first reduced"),
]
TWICE = [*ONCE[:3], "at middle", "middle given up", *ONCE[3:]]


@FACES
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep"])
@pytest.mark.parametrize(("twice", "wanted"), [(False, ONCE), (True, TWICE)], ids=["once", "twice"])
def test_a_frozen_unit_is_given_up_right_after_each_of_its_uses(
    face: str, wanted: list[str], *, keep: bool, twice: bool
) -> None:
    given = {"face": face, "keep": keep, "twice": twice, "frozen": ("middle",)}
    scattered, events = agreed(_through, 2, **given)
    assert scattered == len(UNITS) - 1
    assert events == wanted


def _out_of_reach(context: RankContext, face: str) -> list[str]:
    """The states of a unit that no gradient reaches: after forward, inside backward, after it."""
    model, groups = sharded(face, keep=True, twice=False, frozen=("first",))
    states = []

    def look(*_: Any) -> None:
        states.append(groups["first"].sharded_state.name)

    plain = model.between if face == "composable" else model.module.between.module
    plain.register_forward_hook(lambda _module, _args, output: output.register_hook(look) and None)
    loss = loss_of(model, batch(0, context.rank))
    look()
    loss.backward()
    look()
    return states


@FACES
def test_a_unit_that_no_gradient_reaches_is_given_up_at_the_end_of_backward(face: str) -> None:
    after_forward, inside, after = agreed(_out_of_reach, 2, face=face)
    assert (after_forward, inside, after) == ("UNSHARDED", "UNSHARDED", "SHARDED")
