"""Functions of ``torch.func`` over a sharded model, and gradients of gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import MixedPrecisionPolicy
from fsdp.wrapper_options import MixedPrecision
from tests.fsdp.plain import (
    batch,
    build,
    compare,
    loss_of,
    optimizer_of,
    train_plain,
    train_sharded,
    whole,
)
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_training import shard_blocks
from tests.fsdp.test_wrapper import agrees, train, wrapped

FACES = pytest.mark.parametrize("face", ["fully", "flat", "original"])


def _sharded(face: str) -> Any:
    return shard_blocks(build()) if face == "fully" else wrapped(use_orig_params=face == "original")


def _train_both(model: Any, plain: nn.Module, context: RankContext, face: str) -> None:
    (train_sharded if face == "fully" else train)(model, context.rank)
    train_plain(plain, context.world_size)
    (compare if face == "fully" else agrees)(model, plain)


def _transformed(context: RankContext, face: str, how: str, *, first: bool) -> None:
    model, plain, x = _sharded(face), build(), batch(0, context.rank)
    if not first:
        _train_both(model, plain, context, face)
    results = []
    for each in (model, plain):
        if how == "jvp":
            results.append(torch.func.jvp(each, (x,), (batch(1, 0),)))
        elif how == "vmap":
            results.append(torch.func.vmap(each)(x))
        else:
            results.append(torch.func.grad(partial(loss_of, each))(x))
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)
    if face == "fully":
        model.reshard()  # as after any forward that no backward has followed
    _train_both(model, plain, context, face)


@FACES
@pytest.mark.parametrize("how", ["grad", "jvp", "vmap"])
@pytest.mark.parametrize(("first", "world"), [(True, 2), (False, 2), (True, 1)])
def test_a_forward_may_be_transformed(face: str, how: str, *, first: bool, world: int) -> None:
    """What is made in a first one is not the transform's: it is trained with afterwards."""
    on_ranks(_transformed, world, face=face, how=how, first=first)


def _gathered_by_hand(context: RankContext, how: str) -> None:
    model, plain, x = shard_blocks(build()), build(), batch(0, context.rank)
    if how == "before its forward":
        model.set_modules_to_forward_prefetch(list(model.blocks))

    def loss(each: Any, x: torch.Tensor) -> torch.Tensor:
        if each is model and how != "before its forward":
            handles = [unit.unshard(async_op=how == "later") for unit in (each, *each.blocks)]
            assert [handle is not None for handle in handles] == [how == "later"] * len(handles)
            for handle in filter(None, handles):
                handle.wait()
        return loss_of(each, x)

    results = [torch.func.grad(partial(loss, each))(x) for each in (model, plain)]
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)
    for unit in (model, *model.blocks):
        unit.reshard()
    _train_both(model, plain, context, "fully")


@pytest.mark.parametrize("how", ["now", "later"])
def test_parameters_may_be_gathered_by_hand_in_a_transform(how: str) -> None:
    on_ranks(_gathered_by_hand, 2, how=how)


def test_parameters_may_be_gathered_ahead_in_a_transform() -> None:
    on_ranks(_gathered_by_hand, 2, how="before its forward")


def _buffer_after_a_first_forward(context: RankContext, how: str) -> tuple[str, int]:
    """Type and bytes of the model's buffer once a first forward is over that was a transform's."""
    model = wrapped(mixed_precision=MixedPrecision(buffer_dtype=torch.float64))
    x = batch(0, context.rank)
    if how == "jvp":
        torch.func.jvp(model, (x,), (x,))
    elif how == "vmap":
        torch.func.vmap(model)(x)
    else:
        torch.func.grad(partial(loss_of, model))(x)
    (buffer,) = model.buffers()
    return str(buffer.dtype), buffer.untyped_storage().nbytes()


@pytest.mark.parametrize("how", ["grad", "jvp", "vmap"])
def test_a_buffer_cast_in_a_transform_is_a_plain_tensor_that_outlives_it(how: str) -> None:
    found = agreed(_buffer_after_a_first_forward, 2, how=how)
    assert tuple(found) == ("torch.float64", 8), "wrappers of a transform have no storage"


def _penalised(context: RankContext, face: str) -> None:
    """The loss is the norm of a gradient: a backward through a backward."""

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(module, x), x, create_graph=True)
        return slope.pow(2).sum() + loss_of(module, x)

    model, plain = _sharded(face), build()
    optimizers = [optimizer_of(each.parameters()) for each in (model, plain)]
    for step in range(3):
        ours = loss(model, batch(step, context.rank))
        ours.backward()
        for rank in range(context.world_size):
            value = loss(plain, batch(step, rank))
            (value / context.world_size).backward()
            if rank == context.rank:
                torch.testing.assert_close(ours, value, rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    (compare if face == "fully" else agrees)(model, plain, 1e-5)


@FACES
def test_a_gradient_may_be_penalised(face: str) -> None:
    on_ranks(_penalised, 2, face=face)


def _kept(context: RankContext, *, low: bool) -> None:
    """Two models alike, of which one keeps the graph of its backward, step by step."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    # Blocks that two ranks divide are packed by another operator than the rest.
    pair = [shard_blocks(build(hidden=12), mp_policy=policy) for _ in range(2)]
    optimizers = [optimizer_of(each.parameters()) for each in pair]
    for step in range(2):
        for model, create_graph in zip(pair, (True, False), strict=True):
            loss_of(model, batch(step, context.rank)).backward(create_graph=create_graph)
        for mine, other in zip(*(model.parameters() for model in pair), strict=True):
            assert not mine.grad.requires_grad, "a sum over ranks is not differentiated"
            assert torch.equal(whole(mine.grad), whole(other.grad))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("low", [False, True])
def test_a_backward_that_keeps_its_graph_reduces_as_any_other(*, low: bool) -> None:
    on_ranks(_kept, 2, low=low)
