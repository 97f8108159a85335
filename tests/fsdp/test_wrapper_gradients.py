"""What users see of gradients, and do: while they wait, in a low dtype, whole, in a hook."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks

from conformance.ranks import RankContext
from fsdp import comm_hooks
from fsdp.wrap import CustomPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from tests.fsdp.plain import Residual, batch, build, loss_of, optimizer_of, train_plain
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL, agrees, train, wrapped

STRATEGIES = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


def plain_gradients(*parts: tuple[int, int], scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The sum of the gradients of these (step, rank) batches, times ``scale``."""
    plain = build()
    for step, rank in parts:
        (loss_of(plain, batch(step, rank)) * scale).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


def seen_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in named(model)}


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


# While they wait for a reduction


def _held(context: RankContext, strategy: str) -> None:
    model = wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
    parts = [(0, context.rank), (1, context.rank)]
    for number, (step, rank) in enumerate(parts):
        with model.no_sync():
            loss_of(model, batch(step, rank)).backward()
        want = plain_gradients(*parts[: number + 1])
        got = seen_gradients(model)
        assert list(got) == list(want)
        for name, gradient in got.items():
            close(gradient, want[name])


@STRATEGIES
def test_gradients_of_this_rank_are_whole_until_they_are_reduced(strategy: str) -> None:
    on_ranks(_held, 2, strategy=strategy)


class Partly(nn.Module):
    """Of two layers, the second one takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(10, 4), nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _unused(context: RankContext) -> None:
    model = wrapped(Partly, use_orig_params=True, auto_wrap_policy=None)
    with model.no_sync():
        loss_of(model, batch(0, context.rank)).backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]
    loss_of(model, batch(1, context.rank)).backward()
    assert not any(p.grad.any() for p in model.unused.parameters() if p.numel())


def test_what_took_no_part_has_no_gradient_until_its_unit_is_reduced() -> None:
    on_ranks(_unused, 2)


def _changed_while_held(context: RankContext, *, original: bool, change: str) -> None:
    """What the user makes of them is what is reduced, or dropped."""
    model = wrapped(use_orig_params=original)
    optimizer = optimizer_of(model.parameters(), "sgd")
    with model.no_sync():
        loss_of(model, batch(0, context.rank)).backward()
    factor = {"double": 2.0, "replace": 3.0}.get(change, 0.0)
    if change == "double":
        for param in model.parameters():
            param.grad.mul_(2)
    elif change == "replace":
        for param in model.parameters():
            fresh = param.grad * 3
            param.grad.data = fresh
    else:
        optimizer.zero_grad(set_to_none=change == "none")
    loss = loss_of(model, batch(1, context.rank))
    loss.backward()
    optimizer.step()
    plain = build()
    other = optimizer_of(plain.parameters(), "sgd")
    for rank in range(context.world_size):
        (factor * loss_of(plain, batch(0, rank)) / context.world_size).backward()
        (loss_of(plain, batch(1, rank)) / context.world_size).backward()
    other.step()
    agrees(model, plain)


@ORIGINAL
@pytest.mark.parametrize("change", ["double", "replace", "none", "zeros"])
def test_the_users_changes_to_waiting_gradients_count(change: str, *, original: bool) -> None:
    on_ranks(_changed_while_held, 2, original=original, change=change)


def _after_a_reduction(
    context: RankContext, *, original: bool, strategy: str, prefetch: str | None
) -> None:
    """Reduced gradients of before come back, and the waiting ones are added to them.

    Nothing but training comes between the steps: what was gathered ahead must not outlive one.
    """
    model = wrapped(
        use_orig_params=original,
        sharding_strategy=ShardingStrategy[strategy],
        backward_prefetch=prefetch and BackwardPrefetch[prefetch],
        forward_prefetch=prefetch is not None,
    )
    optimizer = optimizer_of(model.parameters())
    plain = build()
    other = optimizer_of(plain.parameters())
    for step, syncs in enumerate(((True, False, True), (False, True, True))):
        for part, sync in enumerate(syncs):
            with nullcontext() if sync else model.no_sync():
                loss_of(model, batch(step, context.rank, part)).backward()
            for rank in range(context.world_size):
                (loss_of(plain, batch(step, rank, part)) / context.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        other.zero_grad()
    agrees(model, plain)


@ORIGINAL
@STRATEGIES
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST", None])
def test_reduced_and_waiting_gradients_add_up_in_any_order(
    strategy: str, prefetch: str | None, *, original: bool
) -> None:
    given = {"original": original, "strategy": strategy, "prefetch": prefetch}
    on_ranks(_after_a_reduction, 2, **given)


def _as_soon_as_reduced(context: RankContext, *, original: bool, low: bool) -> None:
    """In backward, after the first block: the gradients of the second, which came before it."""
    dtype = torch.bfloat16 if low else torch.float32
    model = wrapped(
        use_orig_params=original,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=low),
    )
    second = list(model.blocks[1].parameters())
    own = [param for param in second if param.numel()]  # a rank may have nothing of a small one
    seen: list[list[torch.dtype | None]] = []

    def look(_gradient: torch.Tensor) -> None:
        seen.append([None if param.grad is None else param.grad.dtype for param in own])

    def watch(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        seen.clear()
        output.register_hook(look)

    model.module.inp.register_forward_hook(watch)
    for step in range(2):
        loss_of(model, batch(step, context.rank)).backward()
        assert seen == [[dtype] * len(own)], "not there before backward was over"
        assert all(param.grad.dtype is dtype for param in model.parameters() if param.numel())
        for param in model.parameters():
            param.grad = None


@ORIGINAL
@pytest.mark.parametrize("low", [False, True], ids=["full", "low"])
def test_a_gradient_is_set_as_soon_as_it_is_reduced(*, original: bool, low: bool) -> None:
    """In the dtype of the parameter, unless that of the computation is to be kept."""
    on_ranks(_as_soon_as_reduced, 2, original=original, low=low)


def _told(context: RankContext, *, original: bool) -> None:
    """A user's hook on a parameter is told of the reduced gradient, once it is there."""
    model = wrapped(use_orig_params=original)
    told: dict[str, list[torch.Tensor]] = {}
    for name, param in named(model):
        param.register_post_accumulate_grad_hook(
            lambda p, n=name: told.setdefault(n, []).append(p.grad.clone())
        )
    with model.no_sync():
        loss_of(model, batch(0, context.rank)).backward()
    assert not told
    loss_of(model, batch(1, context.rank)).backward()
    there = {name: param.grad for name, param in named(model) if param.numel()}
    assert told.keys() == there.keys()
    for name, (gradient,) in told.items():
        assert torch.equal(gradient, there[name])


@ORIGINAL
def test_hooks_of_parameters_are_told_of_reduced_gradients(*, original: bool) -> None:
    on_ranks(_told, 2, original=original)


def _raised_while_held(context: RankContext, *, original: bool) -> None:
    """A forward that raises ends an iteration: what waited is lost, what was reduced is not.

    With it ends no_sync: later gradients are reduced.
    """
    model = wrapped(use_orig_params=original)
    loss_of(model, batch(0, context.rank)).backward()

    def raises() -> None:
        with model.no_sync():
            loss_of(model, batch(1, context.rank)).backward()
            model(torch.ones(4, 3))

    with pytest.raises(RuntimeError, match="shapes"):
        raises()
    optimizer, plain = optimizer_of(model.parameters()), build()
    loss_of(model, batch(2, context.rank)).backward()
    optimizer.step()
    for step in (0, 2):
        for rank in range(context.world_size):
            (loss_of(plain, batch(step, rank)) / context.world_size).backward()
    optimizer_of(plain.parameters()).step()
    agrees(model, plain)


@ORIGINAL
def test_gradients_that_wait_are_lost_with_the_iteration_that_raised(*, original: bool) -> None:
    on_ranks(_raised_while_held, 2, original=original)


def _dropped_with_the_reduced(context: RankContext, *, original: bool) -> None:
    """zero_grad() while waiting gradients are shown drops the reduced ones behind them too."""
    model = wrapped(use_orig_params=original)
    loss_of(model, batch(0, context.rank)).backward()
    with model.no_sync():
        loss_of(model, batch(1, context.rank)).backward()
    model.zero_grad()
    loss_of(model, batch(2, context.rank)).backward()
    optimizer_of(model.parameters(), "sgd").step()
    plain = build()
    for rank in range(context.world_size):
        (loss_of(plain, batch(2, rank)) / context.world_size).backward()
    optimizer_of(plain.parameters(), "sgd").step()
    agrees(model, plain)


@ORIGINAL
def test_zeroed_gradients_do_not_come_back(*, original: bool) -> None:
    on_ranks(_dropped_with_the_reduced, 2, original=original)


def _offloaded(context: RankContext, *, original: bool) -> None:
    model = wrapped(use_orig_params=original, cpu_offload=CPUOffload(offload_params=True))
    train(model, context.rank, micro=3)
    plain = build()
    train_plain(plain, context.world_size, micro=3)
    agrees(model, plain)


@ORIGINAL
def test_offloaded_gradients_wait_as_well(*, original: bool) -> None:
    on_ranks(_offloaded, 2, original=original)


# In a low dtype


def _low(context: RankContext, *, original: bool, strategy: str) -> None:
    low = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep_low_precision_grads=True
    )
    model = wrapped(
        use_orig_params=original,
        mixed_precision=low,
        sharding_strategy=ShardingStrategy[strategy],
    )
    wanted = torch.float32 if strategy == "NO_SHARD" else torch.bfloat16
    for _ in range(2):
        loss_of(model, batch(0, context.rank)).backward()
        kinds = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        assert kinds == {wanted}
    assert all(p.dtype == torch.float32 for p in model.parameters())
    norm = model.clip_grad_norm_(1e9)
    assert norm.dtype == wanted
    twice = plain_gradients((0, 0), (0, 1))  # two backwards of half the sum
    whole = torch.stack([g.norm() for g in twice.values()]).norm()
    torch.testing.assert_close(norm.float(), whole, rtol=2e-2, atol=0)


@ORIGINAL
@STRATEGIES
def test_gradients_may_stay_in_the_low_dtype(strategy: str, *, original: bool) -> None:
    on_ranks(_low, 2, original=original, strategy=strategy)


# In float64


def _double(context: RankContext, *, original: bool, strategy: str) -> None:
    plain, model = (
        build().double(),
        wrapped(
            lambda: build().double(),
            use_orig_params=original,
            sharding_strategy=ShardingStrategy[strategy],
        ),
    )
    for each in (plain, model):
        each(batch(0, 0).double()).pow(2).mean().backward()
    whole = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    norm = model.clip_grad_norm_(0.5 * float(whole))
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, whole, rtol=1e-14, atol=0)
    after = model.clip_grad_norm_(1e9)
    torch.testing.assert_close(after, 0.5 * whole, rtol=1e-5, atol=0)  # an epsilon in the factor


@ORIGINAL
@STRATEGIES
def test_the_norm_of_gradients_in_float64_is_one(strategy: str, *, original: bool) -> None:
    on_ranks(_double, 2, original=original, strategy=strategy)


# Whole, beside whole parameters


def _whole(context: RankContext, strategy: str) -> None:
    model = wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
    loss_of(model, batch(0, context.rank)).backward()
    want = plain_gradients((0, 0), (0, 1), scale=0.5)
    with FSDP.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            close(param.grad, want[name])
            param.grad.mul_(2)
        model.inp.weight.grad = None
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        for name, param in model.named_parameters():
            if name == "inp.weight":
                assert param.grad is None
            else:
                close(param.grad, 2 * want[name])
            param.grad = torch.zeros_like(param)
    if strategy == "NO_SHARD":
        return  # nothing brings the old values back
    with FSDP.summon_full_params(
        model, with_grads=True, writeback=False, rank0_only=True, recurse=False
    ):
        weight = model.module.out.weight
        if context.rank == 0:
            close(weight.grad, 2 * want["out.weight"])
        else:
            assert weight.dim() == 1
        assert model.module.blocks[0].up.bias.dim() == 1
        assert model.module.blocks[0].down.weight.dim() == 1


@STRATEGIES
def test_whole_gradients_are_shown_and_written_back(strategy: str) -> None:
    on_ranks(_whole, 2, strategy=strategy)


def _waiting(context: RankContext) -> None:
    model = wrapped(use_orig_params=True)
    with model.no_sync():
        loss_of(model, batch(0, context.rank)).backward()
    with (
        pytest.raises(RuntimeError, match="wait for their reduction"),
        FSDP.summon_full_params(model, with_grads=True),
    ):
        pass
    with FSDP.summon_full_params(model):
        pass
    want = plain_gradients((0, context.rank))
    for name, gradient in seen_gradients(model).items():
        close(gradient, want[name])


def test_waiting_gradients_are_not_taken_for_reduced_ones() -> None:
    on_ranks(_waiting, 2)


def _partly(context: RankContext) -> None:
    """A gradient that one rank has lost counts as zero there, and is lost again afterwards."""
    model = wrapped(use_orig_params=True)
    loss_of(model, batch(0, context.rank)).backward()
    want = plain_gradients((0, 0), (0, 1), scale=0.5)
    held = {id(p): p.grad is not None for p in model.parameters()}
    if context.rank == 1:
        model.zero_grad()
    with FSDP.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            if param.grad is None:
                continue  # it lay on rank 1 alone
            mine = param.grad.flatten() != 0
            close(param.grad.flatten()[mine], want[name].flatten()[mine])
    for param in model.parameters():
        assert (param.grad is not None) == (held[id(param)] and context.rank == 0)
    model.zero_grad()
    with FSDP.summon_full_params(model, with_grads=True):
        assert all(param.grad is None for param in model.parameters())


def test_a_gradient_of_some_ranks_is_completed_by_zeros() -> None:
    on_ranks(_partly, 2)


# Reduced by the user's own hook

PAIRS = {
    "ours": (comm_hooks, comm_hooks.reduce_scatter_hook, comm_hooks.allreduce_hook),
    "torch": (torch_hooks, torch_hooks.reduce_scatter_hook, torch_hooks.allreduce_hook),
}


def _default_hooks(context: RankContext, source: str, strategy: str, *, original: bool) -> None:
    module, scatter, reduce = PAIRS[source]
    model = wrapped(use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    hook = reduce if strategy == "NO_SHARD" else scatter
    state = module.DefaultState(dist.group.WORLD)
    assert state.gradient_predivide_factor * state.gradient_postdivide_factor == state.world_size
    model.register_comm_hook(state, hook)
    train(model, context.rank, micro=2)
    plain = build()
    train_plain(plain, context.world_size, micro=2)
    agrees(model, plain)


@ORIGINAL
@STRATEGIES
@pytest.mark.parametrize("source", PAIRS)
def test_the_default_hooks_reduce_like_none(source: str, strategy: str, *, original: bool) -> None:
    on_ranks(_default_hooks, 2, source=source, strategy=strategy, original=original)


def _kept_by_the_hook(context: RankContext) -> list[bool]:
    """A hook that feeds back errors keeps what it was given until the next step, and longer."""
    model = wrapped()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hook(state: Any, gradient: torch.Tensor, output: torch.Tensor) -> None:
        kept.append((gradient, gradient.clone()))
        comm_hooks.reduce_scatter_hook(state, gradient, output)

    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), hook)
    for step in range(2):
        loss_of(model, batch(step, context.rank)).backward()
    return [given.untyped_storage().nbytes() == copy.numel() * 4 for given, copy in kept]


def test_a_hook_may_keep_the_gradients_it_is_given() -> None:
    for found in on_ranks(_kept_by_the_hook, 2):
        assert found == [True] * 6


def _compressed(context: RankContext, name: str, strategy: str) -> None:
    """The communication is in the low dtype, what is left in the parameters'."""
    model = wrapped(sharding_strategy=ShardingStrategy[strategy])
    dtypes: list[torch.dtype] = []
    hook = getattr(comm_hooks, name)

    @functools.wraps(hook)
    def watched(state: Any, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
        hook(state, gradient, output)
        if output is not None:
            dtypes.append(gradient.dtype)

    model.register_comm_hook(comm_hooks.LowPrecisionState(dist.group.WORLD), watched)
    loss_of(model, batch(0, context.rank)).backward()
    low = torch.float16 if name.startswith("fp16") else torch.bfloat16
    assert set(dtypes) == (set() if strategy == "NO_SHARD" else {low})
    other = wrapped(sharding_strategy=ShardingStrategy[strategy])
    loss_of(other, batch(0, context.rank)).backward()
    for param, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert param.grad.dtype == torch.float32
        assert not torch.equal(param.grad, wanted.grad)
        torch.testing.assert_close(param.grad, wanted.grad, rtol=2e-2, atol=2e-3)


@STRATEGIES
@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
def test_compressing_hooks_change_the_dtype_of_the_reduction_alone(
    name: str, strategy: str
) -> None:
    on_ranks(_compressed, 2, name=name, strategy=strategy)


def _dtypes_given(context: RankContext) -> None:
    """A compressing hook gets gradients as they are; any other gets them in the reduce dtype."""
    mixed = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    for name, wanted in (("mine", torch.bfloat16), ("fp16_compress_hook", torch.float32)):
        seen: list[torch.dtype] = []

        def hook(state: Any, gradient: torch.Tensor, output: torch.Tensor, seen=seen) -> None:
            seen.append(gradient.dtype)
            output.zero_()

        hook.__name__ = name
        model = wrapped(mixed_precision=mixed)
        model.register_comm_hook(None, hook)
        loss_of(model, batch(0, context.rank)).backward()
        assert seen == [wanted] * 3


def test_only_compressing_hooks_choose_their_dtype() -> None:
    on_ranks(_dtypes_given, 2)


def _alone(context: RankContext) -> None:
    """In float16 too, where sums are divided in two parts: the hook's are all that there are."""
    models = [
        wrapped(mixed_precision=MixedPrecision(reduce_dtype=dtype))
        for dtype in (torch.float16, torch.float32)
    ]
    state = comm_hooks.DefaultState(dist.group.WORLD)
    models[0].register_comm_hook(state, comm_hooks.reduce_scatter_hook)
    for model in models:
        loss_of(model, batch(0, context.rank)).backward()
    for got, wanted in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=2e-3, atol=2e-4)


def test_a_hook_divides_alone() -> None:
    on_ranks(_alone, 2)


def _mixed_tree(context: RankContext) -> None:
    """The hook has both signatures in a tree of both kinds of units."""
    policy = CustomPolicy(
        lambda m: isinstance(m, Residual) and {"sharding_strategy": ShardingStrategy.NO_SHARD}
    )
    model = wrapped(auto_wrap_policy=policy)
    calls: list[bool] = []

    def hook(state: Any, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
        calls.append(output is None)
        defaults = comm_hooks.DefaultState(dist.group.WORLD)
        if output is None:
            comm_hooks.allreduce_hook(defaults, gradient)
        else:
            comm_hooks.reduce_scatter_hook(defaults, gradient, output)

    state = object()
    model.register_comm_hook(state, hook)
    units = FSDP.fsdp_modules(model)
    assert {id(unit._comm_hook) for unit in units} == {id(hook)}
    assert {id(unit._comm_hook_state) for unit in units} == {id(state)}
    train(model, context.rank)
    assert sorted(calls) == [False] * 3 + [True] * 6
    plain = build()
    train_plain(plain, context.world_size)
    agrees(model, plain)


def test_one_hook_serves_sharded_and_replicated_units() -> None:
    on_ranks(_mixed_tree, 2)


def test_the_state_of_a_hook_needs_a_group() -> None:
    with pytest.raises(ValueError, match="explicit ProcessGroup"):
        comm_hooks.DefaultState(None)


# Optimizers that step inside backward


def _steps_in_backward(context: RankContext, *, micro: int) -> None:
    inner = build()
    for param in inner.parameters():
        param._in_backward_optimizers = [torch.optim.SGD([param], lr=0.1, weight_decay=0.1)]
    model = wrapped_module(inner)
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        for part in range(micro):
            if part < micro - 1:
                with model.no_sync():
                    loss_of(model, batch(step, context.rank, part)).backward()
            else:
                loss_of(model, batch(step, context.rank, part)).backward()
            for rank in range(context.world_size):
                (loss_of(plain, batch(step, rank, part)) / context.world_size).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    agrees(model, plain)


def wrapped_module(inner: nn.Module) -> FSDP:
    policy = CustomPolicy(lambda m: isinstance(m, Residual))
    return FSDP(inner, auto_wrap_policy=policy, use_orig_params=True)


@pytest.mark.parametrize("micro", [1, 2])
def test_optimizers_may_step_as_soon_as_a_gradient_is_reduced(micro: int) -> None:
    on_ranks(_steps_in_backward, 2, micro=micro)
