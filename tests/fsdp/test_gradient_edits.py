"""What users do to gradients on their way, and what they are told about them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.ranks import RankContext
from fsdp import MixedPrecisionPolicy, comm_hooks, fully_shard
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import Stack, batch, build, loss_of
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_streams import watched
from tests.fsdp.test_training import shard_blocks
from tests.fsdp.test_wrapper import wrapped


def _zeroed(context: RankContext) -> list[bool]:
    model = wrapped(use_orig_params=True)
    loss_of(model, batch(0, context.rank)).backward()
    there = any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)
    with FSDP.summon_full_params(model, with_grads=True):
        for param in model.parameters():
            param.grad.zero_()
    left = any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)
    return [there, left]


def test_gradients_zeroed_while_they_are_whole_are_zero_afterwards() -> None:
    assert agreed(_zeroed, 2) == [True, False]


def _halved(leaf: torch.Tensor) -> None:
    leaf.grad = leaf.grad / 2  # in other memory


def _accumulated(context: RankContext) -> None:
    """A user's hook gives the leaf another gradient in every pass."""
    model, plain = wrapped(auto_wrap_policy=None), build()
    hooked: set[int] = set()

    def before(module: nn.Module, _: Any) -> None:
        if id(module.weight) not in hooked:
            hooked.add(id(module.weight))
            module.weight.register_post_accumulate_grad_hook(_halved)

    model.module.inp.register_forward_pre_hook(before)
    plain.inp.weight.register_post_accumulate_grad_hook(_halved)
    for step in range(3):
        with model.no_sync():
            loss_of(model, batch(step, context.rank)).backward()
        loss_of(plain, batch(step, context.rank)).backward()
        want = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
        got = model.module._flat_param.grad[: want.numel()]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_gradients_that_wait_are_what_a_hook_has_made_of_them() -> None:
    on_ranks(_accumulated, 2)


class Skips(Stack):
    """Leaves its last block out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks[0](self.inp(x)))


def _waiting(context: RankContext) -> list[list[bool]]:
    """Of each unit, whether gradients wait, before and after they were dropped."""
    flat = wrapped(Skips)
    with flat.no_sync():
        loss_of(flat, batch(0, context.rank)).backward()
    model = shard_blocks(build(Skips))
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(0, context.rank)).backward()
    units = [model, *model.blocks]
    found = [[unit._state.groups[0].reducer.holds_back for unit in FSDP.fsdp_modules(flat)]]
    found.append([fully_shard.state(unit).groups[0].reducer.holds_back for unit in units])
    model.reset_iter_state()
    found.append([fully_shard.state(unit).groups[0].reducer.holds_back for unit in units])
    return found


def test_only_units_with_gradients_say_that_some_wait() -> None:
    used = [True, True, False]
    assert agreed(_waiting, 2) == [used, used, [False] * 3]


def _kept(context: RankContext) -> list[bool]:
    """With streams, a reduction may take the memory of what it has packed."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model, races = watched(shard_blocks(build(), mp_policy=policy))
    kept: list[torch.Tensor] = []
    for unit in (model, *model.blocks):
        unit.set_all_reduce_hook(kept.append, stream="the user's")
    with races:
        loss_of(model, batch(0, context.rank)).backward()
    usual, races = watched(shard_blocks(build()))
    with races:
        loss_of(usual, batch(0, context.rank)).backward()
    grads = [p.grad.to_local() for p in usual.parameters() if p.grad.to_local().numel()]
    return [len(kept) == 3, *(bool(t.untyped_storage().nbytes()) for t in (*kept, *grads))]


def test_what_users_get_of_a_reduction_keeps_its_memory() -> None:
    for found in on_ranks(_kept, 2):
        assert all(found)


def _factor(context: RankContext) -> list[float]:
    state = comm_hooks.DefaultState(dist.group.WORLD)
    state.gradient_predivide_factor, state.gradient_postdivide_factor = 0.5, 1.0
    gradient = torch.full((2,), 3.0)
    comm_hooks.allreduce_hook(state, gradient)
    return gradient.tolist()


def test_a_hook_divides_by_any_factor() -> None:
    assert agreed(_factor, 2) == [12.0, 12.0]


def _clipped(context: RankContext) -> list[str]:
    model = wrapped(auto_wrap_policy=None)
    model(batch(0, context.rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.clip_grad_norm_(1.0)
    return [w.filename.rpartition("/")[2] for w in caught if "no gradients" in str(w.message)]


def test_the_warning_about_no_gradients_points_at_the_callers_line() -> None:
    assert agreed(_clipped, 2) == ["test_gradient_edits.py"]
