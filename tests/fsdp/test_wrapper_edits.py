"""Users change parameters between passes: what they changed is what trains on, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import MixedPrecision, ShardingStrategy
from tests.fsdp.plain import batch, build, loss_of, optimizer_of, train_evaluating, train_plain
from tests.fsdp.ranks import agreed, error_of, on_ranks
from tests.fsdp.test_wrapper import ORIGINAL, agrees, train, wrapped

STRATEGIES = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


def in_place(module: nn.Module, name: str) -> None:
    with torch.no_grad():
        getattr(module, name).mul_(0.5)


def other_memory(module: nn.Module, name: str) -> None:
    param = getattr(module, name)
    param.data = param.data * 0.5


def other_parameter(module: nn.Module, name: str) -> None:
    setattr(module, name, nn.Parameter(getattr(module, name).detach() * 0.5))


CHANGES: dict[str, Callable[[nn.Module, str], None]] = {
    change.__name__: change for change in (in_place, other_memory, other_parameter)
}


def _seen(context: RankContext, change: str, strategy: str, *, when: str) -> None:
    """The change is seen by the next forward, also where the optimizer was made before it."""
    model = wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
    plain = build()
    if when != "start":
        train(model, context.rank)
        train_plain(plain, context.world_size)
    if when == "evaluation":
        with torch.no_grad():
            model(batch(0, 0))
    for path in ("inp", "blocks.0.up", "blocks.1.down", "out"):
        inner = model.module.get_submodule(path)
        other = plain.get_submodule(path)
        for name, _ in other.named_parameters():
            CHANGES[change](inner, name)
            CHANGES["in_place"](other, name)
    train(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)


@STRATEGIES
@pytest.mark.parametrize("when", ["start", "training", "evaluation"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_forward_sees_a_change(change: str, when: str, strategy: str) -> None:
    on_ranks(_seen, 2, change=change, strategy=strategy, when=when)


def _flat(context: RankContext) -> None:
    model = wrapped()
    plain = build()
    train(model, context.rank)
    train_plain(plain, context.world_size)
    for unit in FSDP.fsdp_modules(model):
        CHANGES["other_memory"](unit.module, "_flat_param")
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(0.5)
    train(model, context.rank)
    train_plain(plain, context.world_size)
    agrees(model, plain)


def test_other_memory_behind_a_flat_parameter_is_seen() -> None:
    on_ranks(_flat, 2)


def _average(context: RankContext, strategy: str) -> None:
    """A copy that averages the trained model is evaluated with what it holds now."""
    options: dict[str, Any] = {
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy[strategy],
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
    }
    model, average = wrapped(**options), wrapped(**options)
    optimizer = optimizer_of(model.parameters())
    outputs = []
    for step in range(3):
        loss_of(model, batch(step, context.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for mine, trained in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.5).add_(trained.data, alpha=0.5)
        average.eval()
        with torch.no_grad():
            outputs.append(average(batch(9, 0)))
    fresh = wrapped(**options)
    fresh.load_state_dict(average.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(batch(9, 0)), outputs[-1])
    assert not torch.equal(outputs[0], outputs[-1])


@STRATEGIES
def test_an_average_of_the_model_is_never_stale(strategy: str) -> None:
    on_ranks(_average, 2, strategy=strategy)


def _asked_before_the_step(
    context: RankContext, *, strategy: str, grad: bool, original: bool
) -> None:
    """What a forward leaves whole is not what the next one needs, once a step was made."""
    model = wrapped(
        use_orig_params=original,
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(param_dtype=torch.float64),  # so that NO_SHARD casts
    )
    train_evaluating(model, context.rank, grad=grad)
    plain = build()
    train_plain(plain, context.world_size)
    agrees(model, plain)


@ORIGINAL
@pytest.mark.parametrize("grad", [False, True])
@STRATEGIES
def test_a_forward_before_the_step_keeps_nothing_old(
    strategy: str, *, grad: bool, original: bool
) -> None:
    on_ranks(_asked_before_the_step, 2, strategy=strategy, grad=grad, original=original)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 10)
        self.out = nn.Linear(10, 10)
        self.out.weight = self.inp.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.inp(x)))


def whole_shape() -> None:
    model = wrapped(use_orig_params=True)
    model.module.inp.weight = nn.Parameter(torch.ones(10, 10))
    model(batch(0, 0))


def other_size_later() -> None:
    model = wrapped(use_orig_params=True)
    model(batch(0, 0)).sum().backward()
    model.module.inp.bias.data = torch.ones(100)
    model(batch(0, 0))


def one_of_two_places() -> None:
    model = wrapped(Tied, use_orig_params=True, auto_wrap_policy=None)
    model(batch(0, 0))
    weight = model.module.out.weight
    model.module.out.weight = nn.Parameter(torch.zeros_like(weight))
    model(batch(0, 0)).sum().backward()
    model(batch(0, 0))


def kept(change: str) -> Callable[[], None]:
    def between_forward_and_backward() -> None:
        model = wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        loss = loss_of(model, batch(0, 0))
        CHANGES[change](model.module.blocks[0].up, "weight")
        loss.backward()

    return between_forward_and_backward


CASES: dict[str, tuple[Callable[[], None], type[Exception], str]] = {
    "whole_shape": (whole_shape, RuntimeError, "Cannot writeback when the parameter shape changes"),
    "other_size_later": (other_size_later, RuntimeError, "'inp.bias' expects"),
    "one_of_two_places": (one_of_two_places, NotImplementedError, "Changing shared parameters"),
    "kept_memory": (
        kept("other_memory"),
        AssertionError,
        "FSDP does not support changing the parameters between forward and backward",
    ),
    "kept_parameter": (
        kept("other_parameter"),
        AssertionError,
        "FSDP does not support changing the parameters between forward and backward",
    ),
}


def _refused(context: RankContext, case: str) -> list[str]:
    return error_of(CASES[case][0])


@pytest.mark.parametrize("case", CASES)
def test_a_change_that_cannot_be_followed_is_refused_on_all_ranks(case: str) -> None:
    _, kind, fragment = CASES[case]
    for name, text in on_ranks(_refused, 2, case=case):
        assert (name, fragment in text) == (kind.__name__, True), text


def _unwatched(context: RankContext, *, environment: str) -> bool:
    """Whether a replaced parameter is found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SKIP_WRITEBACK_CHECK", environment)
        model = wrapped(use_orig_params=True)
    train(model, context.rank)
    with torch.no_grad():
        before = model(batch(0, 0))
        CHANGES["other_memory"](model.module.out, "weight")
        return not torch.equal(before, model(batch(0, 0)))


@pytest.mark.parametrize(("environment", "found"), [("1", False), ("0", True)])
def test_the_search_for_changes_can_be_switched_off(environment: str, *, found: bool) -> None:
    assert agreed(_unwatched, 2, environment=environment) is found


# Memory formats


class Strided(nn.Module):
    """Convolutions in channels-last, a transposed matrix and an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.outer = nn.Conv2d(3, 4, 1, bias=False)
        self.turned = nn.Parameter(torch.randn(4, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.inner.weight.is_contiguous(memory_format=torch.channels_last)
        x = self.outer(self.inner(x[:, None, None, :].expand(-1, 2, 3, -1)))
        return x.mean((2, 3)) @ self.turned.t()


def _strided(context: RankContext, strategy: str, *, original: bool) -> None:
    model = wrapped(
        Strided,
        use_orig_params=original,
        auto_wrap_policy=None,
        sharding_strategy=ShardingStrategy[strategy],
    )
    train(model, context.rank, micro=2)
    plain = build(Strided)
    train_plain(plain, context.world_size, micro=2)
    agrees(model, plain)
    strides = {name: param.stride() for name, param in plain.named_parameters()}
    assert {name: value.stride() for name, value in model.state_dict().items()} == strides
    with FSDP.summon_full_params(model), torch.no_grad():
        assert {name: p.stride() for name, p in model.named_parameters()} == strides
        model.turned.copy_(torch.arange(20.0).view(5, 4))
    with FSDP.summon_full_params(model, writeback=False):
        assert torch.equal(model.turned, torch.arange(20.0).view(5, 4))
    model.load_state_dict(plain.state_dict())
    agrees(model, plain, tolerance=0)


@ORIGINAL
@STRATEGIES
def test_memory_formats_are_kept(strategy: str, *, original: bool) -> None:
    on_ranks(_strided, 2, strategy=strategy, original=original)
