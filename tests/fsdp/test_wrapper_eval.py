"""Full precision in eval mode, gathers by hand, and what a wrapper shows of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp.engine.unshard_handle import UnshardHandle
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import MixedPrecision, ShardingStrategy
from tests.fsdp.plain import Residual, batch, build, loss_of, optimizer_of, train_plain
from tests.fsdp.ranks import agreed, count, error_of, on_ranks
from tests.fsdp.test_wrapper import ORIGINAL, agrees, wrapped

LOW = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Watcher(nn.Module):
    """Notes the dtypes that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("steps", torch.ones(1, dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, self.inner.weight.dtype, self.scale.dtype, self.steps.dtype]
        return self.inner(x) * self.scale


def precise(*, original: bool, on: str = "1", **options: Any) -> FSDP:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", on)
        return wrapped(
            Watcher,
            use_orig_params=original,
            auto_wrap_policy=None,
            mixed_precision=LOW,
            **options,
        )


def _modes(context: RankContext, *, original: bool, on: str) -> list[Any]:
    model = precise(original=original, on=on)
    found = []
    for training in (True, False, True):
        model.train(training)
        output = model(batch(0, context.rank))
        found.append([str(dtype).removeprefix("torch.") for dtype in model.module.seen])
        output.sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    return found


@ORIGINAL
def test_eval_mode_computes_in_full_precision_where_asked_for(*, original: bool) -> None:
    low, full = ["bfloat16"] * 3 + ["int64"], ["float32"] * 3 + ["int64"]
    assert agreed(_modes, 2, original=original, on="1") == [low, full, low]
    assert agreed(_modes, 2, original=original, on="") == [low, low, low]


def _precise_values(context: RankContext, *, original: bool, strategy: str) -> None:
    """The output in eval mode is that of the plain model, bit for bit, between training steps."""
    model = precise(original=original, sharding_strategy=ShardingStrategy[strategy])
    optimizer = optimizer_of(model.parameters())
    for step in range(2):
        model.train()
        with model.no_sync():
            loss_of(model, batch(step, context.rank, 0)).backward()
        model.eval()
        with torch.no_grad():
            model(batch(5, 0))
        model.train()
        loss_of(model, batch(step, context.rank, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = build(Watcher)
    plain.load_state_dict(model.state_dict())
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(batch(6, 0)), plain(batch(6, 0)))
    other = wrapped(
        Watcher,
        use_orig_params=original,
        auto_wrap_policy=None,
        mixed_precision=LOW,
        sharding_strategy=ShardingStrategy[strategy],
    )
    steps = optimizer_of(other.parameters())
    for step in range(2):
        with other.no_sync():
            loss_of(other, batch(step, context.rank, 0)).backward()
        loss_of(other, batch(step, context.rank, 1)).backward()
        steps.step()
        steps.zero_grad()
    agrees(other, plain, tolerance=0)


@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_an_evaluation_in_between_changes_no_training(strategy: str, *, original: bool) -> None:
    on_ranks(_precise_values, 2, original=original, strategy=strategy)


# Gathers by hand


def _by_hand(context: RankContext, *, async_op: bool, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    plain = build()
    optimizer = optimizer_of(model.parameters())
    assert model.check_is_root()
    for step in range(3):
        model._wait_unshard_streams_on_current_stream()
        handles = [unit._unshard(async_op=async_op) for unit in FSDP.fsdp_modules(model)]
        assert all(isinstance(handle, UnshardHandle) == async_op for handle in handles)
        if async_op:
            handles[0].wait()
        shapes = [tuple(p.shape) for p in (model.module.inp.weight,)]
        assert shapes == [(10, 10)]
        before = count(context, "all_gather")
        loss = loss_of(model, batch(step, context.rank))
        assert count(context, "all_gather") == before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    train_plain(plain, context.world_size)
    agrees(model, plain)


@ORIGINAL
@pytest.mark.parametrize("async_op", [False, True])
def test_a_gather_by_hand_serves_the_next_forward(*, async_op: bool, original: bool) -> None:
    on_ranks(_by_hand, 2, async_op=async_op, original=original)


# How it looks


def _names_in_messages(context: RankContext) -> list[str]:
    model = wrapped(use_orig_params=True)
    model(batch(0, 0))
    state = model.module.blocks[0]._state
    names = [p.fqn for p in state.groups[0].fsdp_params]
    return [state.name, *names, *error_of(lambda: _shared_by_hand(context))]


def _shared_by_hand(context: RankContext) -> None:
    inner = build()
    model = wrapped(lambda: inner, use_orig_params=True)
    other = wrapped(use_orig_params=True)
    for mine, theirs in zip(
        model.module.blocks[1]._state.groups[0].fsdp_params,
        other.module.blocks[0]._state.groups[0].fsdp_params,
        strict=True,
    ):
        mine.uid = theirs.uid
    FSDP(nn.Sequential(model, other), use_orig_params=True)(batch(0, 0))


def test_names_in_messages_are_those_of_the_plain_model() -> None:
    name, *params, kind, text = agreed(_names_in_messages, 2)
    assert name == "blocks.0"
    assert params == [
        f"blocks.0.{rest}"
        for rest in ("up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight")
    ]
    assert kind == "ValueError"
    assert text.startswith("Parameter '1.blocks.0.up.weight' is shared with a parameter already")
    assert "fully_shard" not in text
    assert "_fsdp_wrapped_module" not in text


def _inside(context: RankContext, *, original: bool) -> None:
    """Prefixes that the user asks for are kept; the wrapper's part goes."""
    model = wrapped(use_orig_params=original)
    plain = build()
    with FSDP.summon_full_params(model):
        for recurse in (True, False):
            got = [name for name, _ in model.named_parameters("net", recurse=recurse)]
            assert (got == [name for name, _ in plain.named_parameters("net")]) == recurse
        assert [name for name, _ in model.named_buffers("net")] == ["net.scale"]
    assert [name for name, _ in model.named_buffers()] == ["_fsdp_wrapped_module.scale"]


@ORIGINAL
def test_prefixes_are_honoured_inside_a_summon(*, original: bool) -> None:
    on_ranks(_inside, 2, original=original)


def _in_forward(context: RankContext) -> None:
    """Inside a unit's forward its parameters are whole, and named as in the plain model."""
    model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({Residual}), use_orig_params=True)
    plain = {name: tuple(p.shape) for name, p in build().named_parameters()}
    seen: list[dict[str, tuple[int, ...]]] = []

    def look(module: nn.Module, *_: Any) -> None:
        names = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
        seen.append({name: tuple(p.shape) for name, p in names.items()})

    model.module.blocks[0].module.register_forward_hook(look)
    model(batch(0, 0))
    assert list(seen[0]) == list(plain)
    for name, shape in seen[0].items():
        running = not name.startswith("blocks.1")
        assert (shape == plain[name]) == running or len(plain[name]) == 1


def test_parameters_are_whole_inside_forward() -> None:
    on_ranks(_in_forward, 2)
