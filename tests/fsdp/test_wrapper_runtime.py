"""How often the wrapper communicates, and what it keeps in memory, in every strategy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import MixedPrecision, ShardingStrategy
from tests.fsdp.plain import Residual, Stack, batch, build, loss_of, train_plain
from tests.fsdp.ranks import agreed, count, error_of, on_ranks
from tests.fsdp.test_wrapper import ORIGINAL, agrees, train, wrapped

UNITS = 3  # the root, which has parameters of its own, and two blocks


def since(context: RankContext, before: list[int]) -> list[int]:
    return [now - then for now, then in zip(counts(context), before, strict=True)]


def counts(context: RankContext) -> list[int]:
    """Gathers, scattered reductions and all-reduces of this rank so far."""
    return [count(context, op) for op in ("all_gather", "reduce_scatter", "all_reduce")]


def _counts(context: RankContext, strategy: str, *, original: bool, root: bool) -> list[list[int]]:
    """(gathers of forward, of backward, reductions), of a syncing and two other iterations."""
    model = wrapped(use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    if not root:
        inner = nn.Sequential(*(Residual() for _ in range(UNITS)))
        model = FSDP(
            inner,
            auto_wrap_policy=ModuleWrapPolicy({Residual}),
            use_orig_params=original,
            sharding_strategy=ShardingStrategy[strategy],
        )
    train(model, context.rank)
    found = []
    for sync in (True, False, False, True):
        start = counts(context)
        loss = loss_of(model, batch(0, context.rank))
        gathers, *reductions = since(context, start)
        assert reductions == [0, 0]
        middle = counts(context)
        with nullcontext() if sync else model.no_sync():
            loss.backward()
        found.append([gathers, *since(context, middle)[:2]])
    return found


@ORIGINAL
@pytest.mark.parametrize(
    ("strategy", "root", "wanted"),
    [
        # with a root that owns parameters, backward finds those still whole
        (
            "FULL_SHARD",
            True,
            [[UNITS, UNITS - 1, reductions] for reductions in (UNITS, 0, 0, UNITS)],
        ),
        (
            "FULL_SHARD",
            False,
            [[UNITS, UNITS, reductions] for reductions in (UNITS, 0, 0, UNITS)],
        ),
        # what a backward that reduces nothing has left whole is not gathered again
        ("SHARD_GRAD_OP", True, [[UNITS, 0, UNITS], [UNITS, 0, 0], [0, 0, 0], [0, 0, UNITS]]),
        ("NO_SHARD", True, [[0, 0, 0]] * 4),
    ],
)
def test_an_iteration_communicates_as_often_as_its_strategy_says(
    strategy: str, wanted: Any, *, root: bool, original: bool
) -> None:
    found = agreed(_counts, 2, strategy=strategy, original=original, root=root)
    assert found == wanted


def _hybrid(context: RankContext, strategy: str, *, original: bool) -> list[list[int]]:
    """As the strategy that it is built on, and one all-reduce over the replicas per unit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {
        "use_orig_params": original,
        "sharding_strategy": ShardingStrategy[strategy],
        "device_mesh": mesh,
    }
    model, plain = wrapped(**options), build()
    train(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    other = wrapped(**options)
    other.load_state_dict(state)
    agrees(other, plain)
    start = counts(context)
    loss = loss_of(model, batch(0, context.rank))
    middle = counts(context)
    loss.backward()
    return [middle[0] - start[0], *since(context, middle)]


@ORIGINAL
@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        ("HYBRID_SHARD", [UNITS, UNITS - 1, UNITS, UNITS]),
        ("_HYBRID_SHARD_ZERO2", [UNITS, 0, UNITS, UNITS]),
    ],
)
def test_hybrid_strategies_reduce_once_more(
    strategy: str, wanted: list[int], *, original: bool
) -> None:
    assert agreed(_hybrid, 4, strategy=strategy, original=original) == wanted


def _storages(context: RankContext, strategy: str, *, low: bool) -> list[list[bool]]:
    """Whether the root and the blocks are whole after forward, backward and evaluation."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16 if low else None)
    model = wrapped(sharding_strategy=ShardingStrategy[strategy], mixed_precision=mixed)
    units = FSDP.fsdp_modules(model)
    loss = loss_of(model, batch(0, context.rank))

    def whole() -> list[bool]:
        return [unit._state.groups[0].sharded_state.name != "SHARDED" for unit in units]

    found = [whole()]
    loss.backward()
    found.append(whole())
    with torch.no_grad():
        model(batch(0, 0))
    return [*found, whole()]


@pytest.mark.parametrize(
    ("strategy", "low", "after_forward"),
    [
        ("FULL_SHARD", False, [True, False, False]),
        ("SHARD_GRAD_OP", False, [True, True, True]),
        ("SHARD_GRAD_OP", True, [True, True, True]),
        ("NO_SHARD", True, [False, False, False]),  # copies in the low dtype, which are memory
    ],
)
def test_what_stays_whole_after_forward_is_the_strategys(
    strategy: str,
    after_forward: list[bool],
    *,
    low: bool,
) -> None:
    found = agreed(_storages, 2, strategy=strategy, low=low)
    assert found == [after_forward, [False] * UNITS, [False] * UNITS]


def _root(context: RankContext) -> list[Any]:
    """The unit that runs first is the root; asking for it starts the tree as well."""
    model = wrapped()
    found: list[Any] = [unit._is_root for unit in FSDP.fsdp_modules(model)]
    found.append(model.blocks[0].check_is_root())
    found.append(model.check_is_root())
    found += [unit._is_root for unit in FSDP.fsdp_modules(model)]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert [type(unit.module) for unit in FSDP.fsdp_modules(model)] == [Stack, Residual, Residual]
    alone = wrapped(Residual, auto_wrap_policy=None)
    alone(batch(0, 0))
    return [*found, alone._is_root]


def test_the_outermost_unit_becomes_the_root() -> None:
    found = agreed(_root, 2)
    assert found == [None] * UNITS + [False, True] + [True, False, False] + [True]


def _wrapped_again(context: RankContext) -> None:
    """A trained unit under a new wrapper gives the same outputs, and trains on."""
    inner = wrapped(Residual, auto_wrap_policy=None)
    outer = FSDP(nn.Sequential(inner))
    with torch.no_grad():
        before = outer(batch(0, 0))
    again = FSDP(nn.Sequential(wrapped(Residual, auto_wrap_policy=None), nn.Linear(10, 3)))
    plain = nn.Sequential(build(Residual), nn.Linear(10, 3))
    plain.load_state_dict(again.state_dict())
    train(again, context.rank)
    train_plain(plain, context.world_size)
    agrees(again, plain)
    with torch.no_grad():
        assert torch.equal(outer(batch(0, 0)), before)
        assert torch.equal(build(Residual)(batch(0, 0)), before)


def test_a_unit_may_be_wrapped_again() -> None:
    on_ranks(_wrapped_again, 2)


def _half_used(context: RankContext, *, original: bool) -> None:
    """A unit that the loss does not need ends sharded, without a gradient, and trains later."""
    model = wrapped(Half, use_orig_params=original, auto_wrap_policy=ModuleWrapPolicy({Residual}))
    plain = build(Half)
    for _ in range(2):
        model(batch(0, context.rank))[0].pow(2).mean().backward()
        states = [g.sharded_state.name for u in FSDP.fsdp_modules(model) for g in u._state.groups]
        assert set(states) == {"SHARDED"}
        assert all(p.grad is None for p in model.module.second.parameters())
        model.zero_grad()
    train(Both(model), context.rank)
    train_plain(Both(plain), context.world_size)
    agrees(model, plain)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Residual(), Residual()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


class Both(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.inner(x)
        return first + second


@ORIGINAL
def test_a_unit_without_gradients_is_sharded_again(*, original: bool) -> None:
    on_ranks(_half_used, 2, original=original)


def _parts(context: RankContext, *, original: bool) -> list[list[str]]:
    """What a layer says when it runs alone: before, in and after an iteration; then all is well."""
    model, plain = wrapped(use_orig_params=original), build()

    def alone() -> list[str]:
        return error_of(lambda: model.blocks[0].module.up(batch(0, context.rank)))

    model.check_is_root()
    found = [alone()]
    loss = loss_of(model, batch(0, context.rank))
    found.append(alone())
    loss.backward()
    found.append(alone())
    with FSDP.summon_full_params(model):
        found.append(alone())
    model.zero_grad()
    train(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)
    return found


@ORIGINAL
def test_a_part_of_a_sharded_unit_raises_when_it_runs_alone(*, original: bool) -> None:
    for *sharded, whole in on_ranks(_parts, 2, original=original):
        assert [error for error, _ in sharded] == ["RuntimeError"] * 3
        assert whole == ["", ""]
