"""Units inside checkpoints and checkpoints inside units train like the bare model.

The checkpoint wrappers are torch's; the model without any of ours and theirs is the oracle.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint

from conformance.ranks import RankContext
from fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import (
    Residual,
    Stack,
    batch,
    build,
    loss_of,
    optimizer_of,
    train_plain,
    train_sharded,
    whole,
)
from tests.fsdp.ranks import agreed, count, on_ranks

FACES = ("composable", "flat", "original")
IMPLEMENTATIONS = [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT]
IMPLEMENTATION = pytest.mark.parametrize("kind", IMPLEMENTATIONS, ids=["reentrant", "no_reentrant"])
FACE = pytest.mark.parametrize("face", FACES)
ORIGINAL = pytest.mark.parametrize("face", ["flat", "original"])

Wrap = Callable[[nn.Module], nn.Module]


def unit_of(face: str, **options: Any) -> Wrap:
    if face == "composable":
        return fully_shard
    return functools.partial(
        FullyShardedDataParallel, use_orig_params=face == "original", **options
    )


# How a block becomes a unit and a checkpoint.


def inside(block: nn.Module, unit: Wrap, again: Wrap) -> nn.Module:
    return unit(again(block))


def outside(block: nn.Module, unit: Wrap, again: Wrap) -> nn.Module:
    return again(unit(block))


def part(block: nn.Module, unit: Wrap, again: Wrap) -> nn.Module:
    """One layer of the unit runs again, the others do not."""
    block.down = again(block.down)
    return unit(block)


def all_parts(block: nn.Module, unit: Wrap, again: Wrap) -> nn.Module:
    for name in ("up", "norm", "down"):
        setattr(block, name, again(getattr(block, name)))
    return unit(block)


def both(block: nn.Module, unit: Wrap, again: Wrap) -> nn.Module:
    """A checkpoint inside of the unit inside of a checkpoint."""
    block.down = again(block.down)
    return again(unit(block))


PLACES = {f.__name__: f for f in (inside, outside, part, all_parts, both)}


def arranged(place: str, face: str, again: Wrap, **options: Any) -> nn.Module:
    model = build()
    unit = unit_of(face, **options)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = PLACES[place](block, unit, again)
    return unit(model)


def bare(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def gradients(model: nn.Module, rank: int) -> dict[str, list[float]]:
    """Of this rank's part, after one backward."""
    loss_of(model, batch(9, rank)).backward()
    found = {
        bare(n): [] if p.grad is None else whole(p.grad).flatten().tolist()
        for n, p in model.named_parameters()
    }
    model.zero_grad()
    return found


def checkpointing(kind: CheckpointImpl) -> Wrap:
    return functools.partial(checkpoint_wrapper, checkpoint_impl=kind)


def agrees(model: nn.Module, plain: nn.Module) -> None:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        got = {bare(n): whole(p.detach()).clone() for n, p in model.named_parameters()}
    assert list(got) == [name for name, _ in plain.named_parameters()]
    for name, param in plain.named_parameters():
        torch.testing.assert_close(
            got[name], param.detach(), rtol=2e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def _trains(
    context: RankContext,
    place: str,
    face: str,
    again: Wrap,
    options: dict[str, Any],
) -> None:
    """Losses and parameters of the bare model; gradients those of the units alone.

    They are the same bits, except that what comes back from the host is laid out anew, with which
    a product may be added up in another order.
    """
    model = arranged(place, face, again, **options)
    alone = arranged(place, face, lambda module: module, **options)
    got, wanted_gradients = gradients(model, context.rank), gradients(alone, context.rank)
    tolerance = 1e-6 if again is offload_wrapper else 0.0
    torch.testing.assert_close(got, wanted_gradients, rtol=tolerance, atol=tolerance)
    losses, plain = train_sharded(model, context.rank), build()
    wanted = train_plain(plain, context.world_size)
    agrees(model, plain)
    if context.rank == 0:
        torch.testing.assert_close(losses, wanted, rtol=2e-6, atol=2e-6)


@FACE
@IMPLEMENTATION
@pytest.mark.parametrize("place", PLACES)
def test_it_trains_like_the_bare_model(place: str, face: str, kind: CheckpointImpl) -> None:
    on_ranks(_trains, 2, place=place, face=face, again=checkpointing(kind), options={})


@FACE
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_activations_may_wait_on_the_host(place: str, face: str) -> None:
    on_ranks(_trains, 2, place=place, face=face, again=offload_wrapper, options={})


@ORIGINAL
@IMPLEMENTATION
@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True},
        {"backward_prefetch": None},
    ],
    ids=["keep", "offload", "post", "no_prefetch"],
)
@pytest.mark.long
def test_it_does_so_with_every_option(
    place: str, face: str, kind: CheckpointImpl, options: dict[str, Any]
) -> None:
    on_ranks(_trains, 2, place=place, face=face, again=checkpointing(kind), options=options)


# Names


def _names(context: RankContext, place: str, face: str, kind: CheckpointImpl) -> None:
    again = checkpointing(kind)
    model, plain = arranged(place, face, again), build()
    wanted = list(plain.state_dict())
    state = model.state_dict()
    assert list(state) == wanted
    assert {k: whole(v).tolist() for k, v in state.items()} == {
        k: v.tolist() for k, v in plain.state_dict().items()
    }
    if face != "flat":
        # An inner checkpoint cannot clean what the modules above it yield.
        assert [bare(n) for n, _ in model.named_parameters()] == [
            n for n, _ in plain.named_parameters()
        ]
    if face != "composable":
        train_plain(plain, context.world_size, steps=1)
        # A state of the bare model is loaded, and one of ours by the bare model.
        model.load_state_dict(plain.state_dict())
        agrees(model, plain)
        other = build()
        other.load_state_dict(model.state_dict())
        assert other.state_dict().keys() == plain.state_dict().keys()
        assert all(torch.equal(v, plain.state_dict()[k]) for k, v in other.state_dict().items())


@FACE
@IMPLEMENTATION
@pytest.mark.parametrize("place", PLACES)
def test_states_have_the_keys_of_the_bare_model(
    place: str, face: str, kind: CheckpointImpl
) -> None:
    on_ranks(_names, 2, place=place, face=face, kind=kind)


def _looks_through(context: RankContext, face: str) -> None:
    """``module`` is the user's; attributes and indices reach it."""
    del context
    unit = unit_of(face)(checkpoint_wrapper(nn.Sequential(nn.Linear(3, 3), nn.ReLU())))
    assert type(unit.module) is nn.Sequential
    assert isinstance(unit[1], nn.ReLU)
    assert len(unit.module) == 2
    inner = unit_of(face)(nn.Linear(3, 4))
    outer = checkpoint_wrapper(inner)
    assert outer.out_features == 4
    with pytest.raises(AttributeError, match="nothing"):
        _ = outer.nothing
    assert FullyShardedDataParallel.fsdp_modules(outer) == [inner]


@ORIGINAL
def test_wrappers_look_through_each_other(face: str) -> None:
    on_ranks(_looks_through, 1, face=face)


# On a tree that holds units


def _applied(context: RankContext, face: str, kind: CheckpointImpl, how: str) -> None:
    model = unit_of(face, auto_wrap_policy=ModuleWrapPolicy({Residual}))(build())
    again = checkpointing(kind)
    inner = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)][1:]
    if how == "modules":
        chosen: dict[str, Any] = {"check_fn": lambda module: isinstance(module, Residual)}
    elif how == "policy":
        chosen = {"auto_wrap_policy": ModuleWrapPolicy({Residual})}
    else:
        chosen = {"check_fn": lambda module: module in inner}
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=again, **chosen)
    assert sum(isinstance(m, CheckpointWrapper) for m in model.modules()) == 2
    plain = build()
    assert list(model.state_dict()) == list(plain.state_dict())
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)


@ORIGINAL
@IMPLEMENTATION
@pytest.mark.parametrize("how", ["modules", "units", "policy"])
def test_checkpoints_are_put_into_a_wrapped_tree(how: str, face: str, kind: CheckpointImpl) -> None:
    on_ranks(_applied, 2, how=how, face=face, kind=kind)


# When parameters are gathered


def _gathers(context: RankContext, place: str, kind: CheckpointImpl | None) -> list[int]:
    """All-gathers of forward and of backward, of two blocks and the root."""

    def again(module: nn.Module) -> nn.Module:
        return module if kind is None else checkpoint_wrapper(module, checkpoint_impl=kind)

    model = arranged(place, "flat", again)
    counts = []
    for step in range(2):
        before = count(context, "all_gather")
        loss = loss_of(model, batch(step, context.rank))
        middle = count(context, "all_gather")
        reduced = count(context, "reduce_scatter")
        loss.backward()
        counts = [
            middle - before,
            count(context, "all_gather") - middle,
            count(context, "reduce_scatter") - reduced,
        ]
    return counts


@pytest.mark.parametrize(
    "kind", [None, *IMPLEMENTATIONS], ids=["none", "reentrant", "no_reentrant"]
)
@pytest.mark.parametrize("place", PLACES)
def test_running_again_gathers_nothing_twice(place: str, kind: CheckpointImpl | None) -> None:
    assert agreed(_gathers, 2, place=place, kind=kind) == [3, 2, 3]


# What a unit is given


class Named(nn.Module):
    """Takes keywords and containers, and returns a container."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10)

    def forward(
        self, x: torch.Tensor, *, more: dict[str, torch.Tensor], scale: float = 1.0
    ) -> dict[str, Any]:
        y = self.lin(x) * scale + more["y"]
        return {"out": y, "kept": [x, scale]}


class UsesNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 10)
        self.named = Named()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        given = self.named(x, more={"y": x * 2}, scale=0.5)
        return given["out"] + given["kept"][0]


def _containers(context: RankContext, face: str, place: str, kind: CheckpointImpl) -> None:
    model, plain = build(UsesNamed), build(UsesNamed)
    again = checkpointing(kind)
    model.named = PLACES[place](model.named, unit_of(face), again)
    model = unit_of(face)(model)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)


@FACE
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_keywords_and_containers_pass_through(face: str, place: str) -> None:
    kind = CheckpointImpl.NO_REENTRANT
    on_ranks(_containers, 2, face=face, place=place, kind=kind)


class Checkpointing(Stack):
    """Calls ``checkpoint`` itself, around what may be units or parts of one."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x) * self.scale


class Reentrant(Checkpointing):
    reentrant = True


def _by_hand(context: RankContext, face: str, kind: type[Checkpointing], *, units: bool) -> None:
    model, plain = build(kind), build()
    unit = unit_of(face)
    if units:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = unit(block)
    model = unit(model)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)


@FACE
@pytest.mark.parametrize("kind", [Checkpointing, Reentrant])
@pytest.mark.parametrize("units", [False, True], ids=["one_unit", "blocks"])
def test_a_model_may_call_checkpoint_itself(
    face: str, kind: type[Checkpointing], *, units: bool
) -> None:
    on_ranks(_by_hand, 2, face=face, kind=kind, units=units)


def _kept_for_backward(context: RankContext, face: str, kind: CheckpointImpl | None) -> int:
    """Bytes that one forward keeps for backward, of which the parameters are a small part."""
    again: Wrap = (lambda block: block) if kind is None else checkpointing(kind)
    model = arranged("inside", face, again)
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    inputs = batch(0, context.rank).repeat(512, 1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model, inputs)
    return sum(kept.values())


@FACE
@IMPLEMENTATION
def test_a_checkpoint_keeps_less_for_backward(face: str, kind: CheckpointImpl) -> None:
    without = on_ranks(_kept_for_backward, 2, face=face, kind=None)
    found = on_ranks(_kept_for_backward, 2, face=face, kind=kind)
    assert max(found) < min(without) / 2, f"{found} bytes, {without} without a checkpoint"


class Sometimes(nn.Module):
    """Blocks that run again, one that never runs, and one that every second micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.second, self.last = (Residual() for _ in range(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x)
        if self.calls % 2:
            x = self.second(x)
        return self.last(x)


def _sometimes(context: RankContext, place: str, kind: CheckpointImpl) -> list[list[int]]:
    """Gathers of each micro-batch, of each step but the first, which compares ranks as well."""
    model, plain = build(Sometimes), build(Sometimes)
    for name, block in list(model.named_children()):
        setattr(model, name, PLACES[place](block, fully_shard, checkpointing(kind)))
    fully_shard(model)
    gathers = []

    def loss(each: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(each, x.clone().requires_grad_())

    def note(*_: Any) -> None:
        gathers.append(count(context, "all_gather"))

    train_sharded(model, context.rank, micro=2, loss=loss, before_micro=note)
    note()
    ranks = context.world_size
    optimizer = optimizer_of(plain.parameters())
    for step in range(3):
        for part in range(2):
            for rank in range(ranks):
                plain.calls = part
                (loss_of(plain, batch(step, rank, part)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    got = dict(model.named_parameters())
    for name, want in plain.named_parameters():
        owner, rest = name.split(".", 1)
        mine = got[f"{owner}._checkpoint_wrapped_module.{rest}"]
        torch.testing.assert_close(whole(mine.detach()), want.detach(), rtol=2e-6, atol=2e-6)
    each = [after - before for before, after in itertools.pairwise(gathers)]
    return [each[2:4], each[4:]]


@IMPLEMENTATION
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_the_order_stays_right_where_units_run_in_some_micro_batches(
    place: str, kind: CheckpointImpl
) -> None:
    # Forward and backward gather what runs, and nothing else.
    assert agreed(_sometimes, 2, place=place, kind=kind) == [[2 * 3, 2 * 2]] * 2
