"""A step while parameters are in use: by a forward that goes on, or one that was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp.wrapper_options import ShardingStrategy
from tests.fsdp.plain import batch, build, loss_of, optimizer_of, whole
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_training import shard_blocks
from tests.fsdp.test_wrapper import wrapped


@contextmanager
def _hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _interrupt(*_args: Any) -> None:
    raise KeyboardInterrupt


def _step_in_use(context: RankContext, where: str) -> None:
    """The forward after the step has the new parameters, whole or not before."""
    model, plain = shard_blocks(build()), build()
    optimizer, plain_optimizer = optimizer_of(model.parameters()), optimizer_of(plain.parameters())
    loss_of(model, batch(0, context.rank)).backward()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    plain_optimizer.step()  # now: units give up what is whole after a step of it, too
    plain_optimizer.zero_grad()
    if where == "inside":
        with _hooked(model.blocks[1], lambda *_: (optimizer.step(), None)[-1]):
            model(batch(1, context.rank))
    else:
        module = model.blocks[1].norm if where == "in a unit" else model.blocks[1]
        with _hooked(module, _interrupt), pytest.raises(KeyboardInterrupt):
            model(batch(1, context.rank))
        optimizer.step()
    optimizer.zero_grad()

    loss, wanted = (loss_of(each, batch(2, context.rank)) for each in (model, plain))
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    loss.backward()
    for rank in range(context.world_size):
        (loss_of(plain, batch(2, rank)) / context.world_size).backward()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            whole(got.grad), want.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("where", ["inside", "in a unit", "between units"])
def test_the_forward_after_a_step_has_the_new_parameters(where: str) -> None:
    on_ranks(_step_in_use, 2, where=where)


def _keeps(face: str) -> nn.Module:
    """A model whose units keep something of what was gathered: all of it, or a part."""
    if face == "fully":
        return shard_blocks(build(), reshard_after_forward=2)
    return wrapped(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=face == "original"
    )


def _step_in_what_is_kept(context: RankContext, face: str) -> None:
    model, plain = _keeps(face), build()
    optimizer, plain_optimizer = optimizer_of(model.parameters()), optimizer_of(plain.parameters())
    loss_of(model, batch(0, context.rank)).backward()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    plain_optimizer.step()  # now: units give up what is whole after a step of it, too
    with _hooked(model.blocks[1].norm, lambda *_: (optimizer.step(), None)[-1]):
        model(batch(1, context.rank))
    loss, wanted = (loss_of(each, batch(2, context.rank)) for each in (model, plain))
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("face", "world"), [("fully", 4), ("flat", 2), ("original", 2)])
def test_what_forward_keeps_for_backward_is_not_kept_for_the_next_forward(
    face: str, world: int
) -> None:
    on_ranks(_step_in_what_is_kept, world, face=face)
