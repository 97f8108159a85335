"""What one more parameter group costs the host in every step: calls, counted and not timed.

An accelerator's host pays microseconds for each operator, event and Python call, and a small model
waits for it. Counted is the way that an accelerator takes, on streams that remember.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from conformance.ranks import RankContext
from fsdp import MixedPrecisionPolicy, fully_shard
from fsdp.dtensor import DTensorExposure
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_gradients import _registered
from fsdp.wrapper_options import MixedPrecision, ShardingStrategy
from tests.fsdp.plain import Stack, batch, build, loss_of
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.streams import OrderedStreams
from tests.fsdp.test_training import shard_blocks
from tests.fsdp.test_wrapper import ORIGINAL, wrapped

PARAMS = 5  # of a block
ONCE_A_STEP = {
    "c10d::_allgather_base_": 2,
    "c10d::_reduce_scatter_base_": 1,
    "aten::alias": 1,  # the stand-in for the input
    "aten::copy_": 2,  # both gathers cast the shard
    "aten::_to_copy": 1,  # the reduced shard is cast back
}
WANTED: dict[str, dict[str, int]] = {
    "composable": ONCE_A_STEP
    | {
        "aten::_foreach_copy_": 2,  # both gathers are copied out
        "aten::view": PARAMS,  # gradients by rank
        "aten::cat": 1,
        "aten::as_strided": PARAMS,  # gradients in the reduced shard
    },
    "flat": ONCE_A_STEP | {"aten::_foreach_copy_": 1},  # gradients are packed
    "original": ONCE_A_STEP | {"aten::_foreach_copy_": 1, "aten::as_strided": PARAMS},
}
# Ends of both gathers, of what reads the whole parameters or the gathered ones in forward and in
# backward, of packing, and of the reduction. None of them is made anew ("made").
EVENTS = {"recorded": 6}
PYTHON_CALLS = {"composable": 153, "flat": 145, "original": 169}


class Operators(TorchDispatchMode):
    """Counts operators, and waits for collectives: gloo's do not run on the streams."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            out[-1].wait()
        return out


def _wrapped(face: str, blocks: int) -> tuple[nn.Module, Any]:
    """A model of mixed precision whose parameters any two ranks can halve."""
    kind = partial(Stack, blocks=blocks, hidden=16)
    plain = build(kind)
    if face == "plain":
        return plain, None
    if face == "composable":
        model = shard_blocks(plain, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        return model, fully_shard.state(model)
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    model = wrapped(kind, mixed_precision=mixed, use_orig_params=face == "original")
    return model, model._state


def _step(model: nn.Module, rank: int) -> None:
    model(batch(0, rank)).float().pow(2).mean().backward()
    for param in model.parameters():
        param.grad = None


def _cost(face: str, blocks: int, rank: int) -> dict[str, Counter[str]]:
    """Operators, events and Python calls of one step, once everything is made."""
    model, state = _wrapped(face, blocks)
    streams = OrderedStreams()
    if state is not None:
        state.comm().streams = streams
    with Operators():
        for _ in range(3):
            _step(model, rank)
    streams.events.clear()
    streams.made = 0
    with Operators() as operators:
        _step(model, rank)
    events = Counter(recorded=len(streams.events), made=streams.made)
    python: Counter[str] = Counter()
    home = fsdp.__file__.removesuffix("__init__.py")

    def seen(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            python["calls"] += 1

    with Operators():
        sys.setprofile(seen)
        try:
            _step(model, rank)
        finally:
            sys.setprofile(None)
    return {"operators": operators.calls, "events": events, "python": python}


def _one_more(context: RankContext, face: str) -> dict[str, dict[str, int]]:
    """What a third block adds to a step of two, beyond what it adds to one without a wrapper."""
    rank = context.rank
    three, two = _cost(face, 3, rank), _cost(face, 2, rank)
    bare = _cost("plain", 3, rank)["operators"].copy()
    bare.subtract(_cost("plain", 2, rank)["operators"])
    found = {}
    for kind, calls in three.items():
        calls.subtract(two[kind])
        if kind == "operators":
            calls.subtract(bare)
        found[kind] = {name: number for name, number in calls.items() if number}
    return found


@pytest.mark.parametrize("face", WANTED)
def test_one_more_group_costs_as_many_calls_as_are_named_here(face: str) -> None:
    found = agreed(_one_more, 2, face=face)
    assert found["operators"] == WANTED[face]
    assert found["events"] == EVENTS
    assert found["python"]["calls"] <= PYTHON_CALLS[face]


def _opens(context: RankContext, *, original: bool) -> None:
    model = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=original)
    shards = [group.shard.data for state in _states(model) for group in state.groups]
    with Operators() as operators, FSDP.summon_full_params(model, writeback=False):
        whole = list(model.parameters())
    assert not {"aten::copy_", "aten::clone", "aten::empty"} & operators.calls.keys()
    memory = {shard.untyped_storage().data_ptr() for shard in shards}
    assert {param.untyped_storage().data_ptr() for param in whole} == memory
    with FSDP.summon_full_params(model), torch.no_grad():
        first, second, *_ = model.parameters()
        first.fill_(3.0)
        second.data = torch.full_like(second, 4.0)
    with FSDP.summon_full_params(model):
        first, second, *_ = model.parameters()
        assert torch.equal(first, torch.full_like(first, 3.0))
        assert torch.equal(second, torch.full_like(second, 4.0))
    moved = next(model.parameters())
    moved.data = torch.full_like(moved, 5.0)
    with FSDP.summon_full_params(model):
        first = next(model.parameters())
        assert torch.equal(first, torch.full_like(first, 5.0))


def _states(model: FSDP) -> list[Any]:
    return [unit._state for unit in FSDP.fsdp_modules(model)]


@ORIGINAL
def test_a_summon_of_what_nobody_shards_copies_nothing(*, original: bool) -> None:
    on_ranks(_opens, 2, original=original)


def _clips(context: RankContext, *, original: bool) -> None:
    model = wrapped(use_orig_params=original)
    model.tied = model.module  # a second way to the same modules
    registered = list(map(id, model.parameters()))
    assert list(map(id, _registered(model))) == registered
    loss_of(model, batch(0, context.rank)).backward()
    calls: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _argument: Any) -> None:
        calls[frame.f_code.co_name] += event == "call"

    with Operators() as operators:
        sys.setprofile(seen)
        try:
            model.clip_grad_norm_(1.0)
        finally:
            sys.setprofile(None)
    assert not {"named_modules", "named_parameters", "modules"} & calls.keys()
    assert operators.calls["c10d::allreduce_"] == 1
    assert operators.calls["aten::_foreach_norm"] == operators.calls["aten::_foreach_mul_"] == 1
    assert sum(operators.calls.values()) <= 16  # however many units there are


@ORIGINAL
def test_a_clip_takes_one_kernel_for_all_gradients_and_no_walk_by_name(*, original: bool) -> None:
    on_ranks(_clips, 2, original=original)


class Looked(DTensorExposure):
    """Counts the parameters that are looked at."""

    def __init__(self) -> None:
        self.count = 0

    def changed(self, params: Any) -> bool:
        self.count += len(params)
        return super().changed(params)

    def reread(self, params: Any) -> None:
        self.count += len(params)
        super().reread(params)


def _looks(context: RankContext) -> dict[str, list[float]]:
    """How often a save and a load look at each parameter of a group of 4, and of 16, modules."""
    found: dict[str, list[float]] = {"save": [], "load": [], "assign": []}
    for modules in (4, 16):
        model = fully_shard(nn.Sequential(*(nn.Linear(2, 2) for _ in range(modules))))
        (group,) = fully_shard.state(model).groups
        group._exposure = group.shard._exposure = looked = Looked()

        def once(kind: str, call: Any, looked: Looked = looked, params: int = 2 * modules) -> Any:
            looked.count = 0
            result = call()
            found[kind].append(looked.count / params)
            return result

        state = once("save", model.state_dict)
        once("load", partial(model.load_state_dict, state))
        copies = {key: value.clone() for key, value in state.items()}
        once("assign", partial(model.load_state_dict, copies, assign=True))
    return found


def test_a_save_or_a_load_looks_at_each_parameter_as_often_in_a_large_group() -> None:
    for kind, (small, large) in agreed(_looks, 2).items():
        assert small == large > 0, f"{kind}: {small} times of 8 parameters, {large} of 32"


def _asks_in_backward(context: RankContext) -> list[int]:
    """How many parameters steps look at in a backward in which each has its own, and after it."""
    model = fully_shard(build(Stack))
    (group,) = fully_shard.state(model).groups
    group.options = dataclasses.replace(group.options, exposure=Optimized())
    looked = group.options.exposure
    for param in model.parameters():
        own = torch.optim.SGD([param], 0.1)
        param.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    loss_of(model, batch(0, context.rank)).backward()
    inside = looked.count
    own.step()
    return [inside, looked.count]


class Optimized(DTensorExposure):
    """Counts the parameters that are asked for."""

    def __init__(self) -> None:
        self.count = 0

    def optimized(self, params: Any) -> Any:
        self.count += len(params)
        return super().optimized(params)


def test_optimizers_that_step_inside_backward_ask_no_tree() -> None:
    inside, after = agreed(_asks_in_backward, 2)
    assert inside == 0 < after


def _zeroes(context: RankContext) -> list[float]:
    """How many zeros are written for each element of a gradient, while sharded and while whole."""
    model = fully_shard(build(Stack))
    elements = sum(param.numel() for param in model.parameters())
    counts = []
    for whole in (False, True):
        model(batch(0, context.rank)).sum().backward()
        if whole:
            model.unshard()
        with Zeros() as zeros:
            model.zero_grad(set_to_none=False)
        counts.append(zeros.elements / elements)
        model.reshard()
        for param in model.parameters():
            assert not param.grad.to_local().any()
    return counts


class Zeros(TorchDispatchMode):
    """Counts the elements of tensors that are set to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zero_.default:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_a_gradient_is_set_to_zero_once() -> None:
    for counts in on_ranks(_zeroes, 2):
        assert counts == [1, 1]
