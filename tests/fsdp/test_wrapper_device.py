"""The wrapper face on accelerators: hooks, the scaler, steps inside backward, whole parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.ranks import RankContext
from fsdp import CPUOffload, MixedPrecision, ShardedGradScaler, ShardingStrategy, comm_hooks
from fsdp.engine.mesh import default_device
from fsdp.wrap import CustomPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import Residual, batch, build, busy, loss_of, train_plain
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_wrapper import ORIGINAL, POLICY, train, wrapped

pytestmark = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two accelerators"
)
STRATEGIES = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
DIFFERENCE = 1e-3
"""Of parameters after three AdamW steps of 0.05 each, from other kernels and other reductions."""


def kind() -> str:
    return torch.accelerator.current_accelerator().type  # type: ignore[union-attr]


def on_device(**options: Any) -> FSDP:
    return wrapped(device_id=default_device(), **options)


def close(model: FSDP, plain: nn.Module) -> None:
    with FSDP.summon_full_params(model, writeback=False):
        got = {name: p.detach().cpu() for name, p in model.named_parameters()}
    for name, want in plain.named_parameters():
        torch.testing.assert_close(
            got[name], want.detach(), rtol=DIFFERENCE, atol=DIFFERENCE, msg=name
        )


def _hook(context: RankContext, name: str, strategy: str, *, original: bool) -> None:
    model = on_device(use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    if name == "default":
        hook: Any = comm_hooks.reduce_scatter_hook
        if strategy == "NO_SHARD":
            hook = comm_hooks.allreduce_hook
        model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), hook)
        train(model, context.rank, micro=2)
        plain = build()
        train_plain(plain, context.world_size, micro=2)
        close(model, plain)
        return
    state = comm_hooks.LowPrecisionState(dist.group.WORLD)
    model.register_comm_hook(state, getattr(comm_hooks, name))
    other = on_device(use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    for each in (model, other):
        loss_of(each, batch(0, context.rank)).backward()
    for param, wanted in zip(model.parameters(), other.parameters(), strict=True):
        if param.numel():
            assert param.grad.dtype == torch.float32
            torch.testing.assert_close(param.grad, wanted.grad, rtol=2e-2, atol=2e-3)


@ORIGINAL
@STRATEGIES
@pytest.mark.parametrize("name", ["default", "fp16_compress_hook", "bf16_compress_hook"])
def test_a_hook_reduces_like_none(name: str, strategy: str, *, original: bool) -> None:
    on_ranks(_hook, 2, device=kind(), name=name, strategy=strategy, original=original)


def _scaled(context: RankContext, strategy: str, *, original: bool, offload: bool) -> list[Any]:
    """One rank overflows in the second step: no rank steps, and the factor halves on all."""
    model = on_device(
        use_orig_params=original,
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(param_dtype=torch.float16),
        cpu_offload=CPUOffload(offload_params=offload),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(init_scale=2.0**10)
    found = []
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        inputs = batch(step, context.rank)
        if step == 1 and context.rank == 1:
            inputs[0, 0] = float("inf")
        scaler.scale(loss_of(model, inputs)).backward()
        busy(context.device)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        found.append([same, scaler.get_scale()])
    return found


@ORIGINAL
@STRATEGIES
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
def test_one_rank_that_overflows_stops_all(strategy: str, *, original: bool, offload: bool) -> None:
    found = agreed(_scaled, 2, device=kind(), strategy=strategy, original=original, offload=offload)
    assert found == [[False, 1024.0], [True, 512.0], [False, 512.0]]


def _steps_in_backward(context: RankContext) -> None:
    inner, plain = build(), build()
    for param in inner.parameters():
        param._in_backward_optimizers = [torch.optim.SGD([param], lr=0.1, weight_decay=0.1)]
    policy = CustomPolicy(lambda m: isinstance(m, Residual))
    model = FSDP(inner, auto_wrap_policy=policy, use_orig_params=True, device_id=default_device())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        loss_of(model, batch(step, context.rank)).backward()
        for rank in range(context.world_size):
            (loss_of(plain, batch(step, rank)) / context.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    close(model, plain)


def test_optimizers_may_step_inside_backward() -> None:
    on_ranks(_steps_in_backward, 2, device=kind())


def _whole(context: RankContext, *, offload: bool) -> None:
    """Whole parameters, and gradients, where they are asked for; changes come back."""
    model, plain = on_device(use_orig_params=True), build()
    loss_of(model, batch(0, context.rank)).backward()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    options = {"offload_to_cpu": True} if offload else {"with_grads": True}
    with FSDP.summon_full_params(model, writeback=True, **options), torch.no_grad():
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert got.device.type == ("cpu" if offload else kind())
            if not offload:
                torch.testing.assert_close(
                    got.grad.cpu(), want.grad, rtol=1e-3, atol=1e-5, msg=name
                )
            got.mul_(2.0)
            want.mul_(2.0)
    close(model, plain)


@pytest.mark.parametrize("offload", [False, True])
def test_whole_parameters_lie_where_they_are_asked_for(*, offload: bool) -> None:
    on_ranks(_whole, 2, device=kind(), offload=offload)


def _moved(context: RankContext, *, original: bool, before: bool) -> Any:
    """Hooks of all modules in the order in which they fire, the losses, and the end."""
    inner, fired = build(), list[str]()
    if before:
        inner.to(default_device())
    model = FSDP(inner, auto_wrap_policy=POLICY, use_orig_params=original)
    if not before:
        model.to(default_device())
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: fired.append(f"before {name}"))
        module.register_forward_hook(lambda *_, name=name: fired.append(f"after {name}"))
        module.register_full_backward_hook(lambda *_, name=name: fired.append(f"back {name}"))
    losses = train(model, context.rank)
    with FSDP.summon_full_params(model, writeback=False):
        places = {p.device.type for p in model.parameters()}
        end = [p.detach().cpu().tolist() for p in model.parameters()]
    return fired, losses, sorted(places), end


@ORIGINAL
def test_a_module_may_be_moved_before_or_after_it_is_wrapped(*, original: bool) -> None:
    before, after = (
        on_ranks(_moved, 2, device=kind(), original=original, before=before)
        for before in (True, False)
    )
    assert before == after
    fired, _, places, _ = before[0]
    assert places == [kind()]
    assert {line.split()[0] for line in fired} == {"before", "after", "back"}
