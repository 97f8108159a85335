"""Functions of ``torch.func`` over a sharded model, and gradients of gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from tests.fsdp.plain import (
    batch,
    build,
    compare,
    loss_of,
    optimizer_of,
    train_plain,
    train_sharded,
)
from tests.fsdp.ranks import on_ranks
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
