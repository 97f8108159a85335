"""Which stream waits for whom: no kernel runs beside one that it conflicts with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.ranks import RankContext
from fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp.engine.buffer import Buffer
from fsdp.engine.group_options import GroupOptions
from fsdp.engine.streams import AcceleratorStreams
from tests.fsdp.plain import (
    Stack,
    batch,
    build,
    compare,
    loss_of,
    train_plain,
    train_sharded,
    whole,
)
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.streams import COMPUTE, OrderedStreams, Races
from tests.fsdp.test_extension import doubled
from tests.fsdp.test_training import shard_blocks


class Singles(nn.Module):
    """Units of one matrix each: what is gathered is the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :8]
        for block in (*self.blocks, self.blocks[-1]):
            x = torch.tanh(block(x))
        return x


class Twice(Stack):
    """Runs its last block twice: it is gathered again while the first gather may be read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in (*self.blocks, self.blocks[-1]):
            x = block(x)
        return self.out(x) * self.scale


def watched(model: nn.Module) -> tuple[nn.Module, Races]:
    """``model`` on streams whose order is remembered."""
    streams = OrderedStreams()
    fully_shard.state(model).comm().streams = streams
    return model, Races(streams)


VARIANTS: dict[str, Callable[[type], nn.Module]] = {
    "default": lambda kind: shard_blocks(build(kind)),
    "keep": lambda kind: shard_blocks(build(kind), reshard_after_forward=False),
    "reshard": lambda kind: shard_blocks(build(kind), reshard_after_forward=True),
    "reduce_in_float64": lambda kind: shard_blocks(
        build(kind), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)
    ),
    "offload": lambda kind: shard_blocks(
        build(kind), offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
}


def _trains(context: RankContext, variant: str, kind: type) -> list[str]:
    (model, races), plain = watched(VARIANTS[variant](kind)), build(kind)
    for unit, following in zip(model.blocks, model.blocks[1:], strict=False):
        unit.set_modules_to_forward_prefetch([following])
    with races:
        train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    used = {stream for _, stream in races.kernels}
    assert {COMPUTE, "gather", "reduce"} <= used, used
    return races.found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [Stack, Singles, Twice])
def test_no_kernel_runs_beside_one_that_it_conflicts_with(variant: str, kind: type) -> None:
    for found in on_ranks(_trains, 2, variant=variant, kind=kind):
        assert found == []


def _copied_in(context: RankContext) -> list[str]:
    """On which streams shards are cast on their way into the gathers of a forward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model, races = watched(shard_blocks(build(), mp_policy=policy))
    x = batch(0, context.rank).bfloat16()
    with races, torch.no_grad():
        model(x)
    return sorted({stream for name, stream in races.kernels if name == "aten::copy_"})


def test_shards_are_copied_into_a_gather_on_its_own_stream() -> None:
    assert agreed(_copied_in, 2) == ["gather"]


def _alone(context: RankContext, variant: str) -> list[str]:
    """On one rank nothing is scattered: what was packed is itself handed over."""
    (model, races), plain = watched(VARIANTS[variant](Stack)), build()
    with races:
        train_sharded(model, 0)
    train_plain(plain, 1)
    compare(model, plain)
    return races.found


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_waits_for_its_streams_as_well(variant: str) -> None:
    assert on_ranks(_alone, 1, variant=variant) == ([],)


def _extended(context: RankContext) -> list[str]:
    """A weight that chooses what travels shares the gather with a plain bias."""
    (model, races), plain = watched(shard_blocks(doubled(build()))), build()
    with races:
        loss_of(model, batch(0, context.rank)).backward()
        loss_of(model, batch(1, context.rank)).backward()
    for step, rank in itertools.product(range(2), range(context.world_size)):
        (loss_of(plain, batch(step, rank)) / context.world_size).backward()
    got, want = whole(model.inp.bias.grad), plain.inp.bias.grad
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    return races.found


def test_parameters_with_extensions_are_gathered_in_order() -> None:
    for found in on_ranks(_extended, 2):
        assert found == []


def _hybrid(context: RankContext, shape: tuple[int, int], *, always: bool) -> list[Any]:
    """Replicas are reduced on a stream of their own, always or in every second backward."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    # Cast when it is handed over, the reduced shard is nobody's but the streams'.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    (model, races), plain = watched(shard_blocks(build(), mesh=mesh, mp_policy=policy)), build()

    def before(module: nn.Module, part: int) -> None:
        module.set_requires_all_reduce(always or part == 1)

    with races:
        train_sharded(model, context.rank, steps=2, micro=2, before_micro=before)
    train_plain(plain, context.world_size, steps=2, micro=2)
    compare(model, plain)
    return [races.found, sorted({s for op, s in races.kernels if op == "c10d::allreduce_"})]


@pytest.mark.parametrize(
    ("shape", "always"),
    [((2, 1), False), ((2, 2), False), ((2, 1), True)],
)
def test_replicas_are_reduced_behind_the_shards(shape: tuple[int, int], *, always: bool) -> None:
    world = shape[0] * shape[1]
    for found, streams in on_ranks(_hybrid, world, shape=shape, always=always):
        assert found == []
        assert streams == ["all-reduce"]


def _memory(context: RankContext, kind: type) -> list[int]:
    """Bytes behind the buffers of the engine after a step, and after an evaluation."""
    buffers: list[Buffer] = []
    usual = Buffer.__init__

    def remembered(buffer: Buffer, *args: Any) -> None:
        usual(buffer, *args)
        buffers.append(buffer)

    def held() -> int:
        return sum(buffer.data.untyped_storage().nbytes() for buffer in buffers)

    model, races = watched(shard_blocks(build(kind), reshard_after_forward=True))
    found = []
    Buffer.__init__ = remembered  # type: ignore[method-assign]
    try:
        with races:
            loss_of(model, batch(0, context.rank)).backward()
            found.append(held())
            with torch.no_grad():
                model(batch(1, context.rank))
            found.append(held())
    finally:
        Buffer.__init__ = usual  # type: ignore[method-assign]
    return [len(buffers), *found]


# Of every group whole parameters and packed gradients; what is gathered elsewhere; not of views.
@pytest.mark.parametrize(("kind", "buffers"), [(Stack, 9), (Twice, 9), (Singles, 8)])
def test_buffers_have_memory_only_while_it_is_needed(kind: type, buffers: int) -> None:
    for found in on_ranks(_memory, 2, kind=kind):
        assert found == [buffers, 0, 0]


def _hook(context: RankContext) -> list[Any]:
    model, races = watched(shard_blocks(build()))
    ran_on = []

    def hook(shard: torch.Tensor) -> None:
        ran_on.append(races.streams.current())
        shard.mul_(2)

    for unit in (model, *model.blocks):
        unit.set_all_reduce_hook(hook, stream="the user's")
    with races:
        loss_of(model, batch(0, context.rank)).backward()
        grads = [p.grad.to_local().clone() for p in model.parameters()]
    plain = build()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    for grad, param, want in zip(grads, model.parameters(), plain.parameters(), strict=True):
        start = context.rank * -(-param.shape[0] // context.world_size)
        part = want.grad[start : start + grad.shape[0]]
        torch.testing.assert_close(grad, 2 * part, rtol=1e-5, atol=1e-6)
    return [races.found, ran_on]


def test_a_hook_runs_on_the_stream_that_the_user_named() -> None:
    for found, ran_on in on_ranks(_hook, 2):
        assert found == []
        assert ran_on == ["the user's"] * 3


def _offloaded(context: RankContext) -> list[int]:
    """What the host reads after backward, it has waited for."""
    model, races = watched(VARIANTS["offload"](Stack))
    waited = []
    for step in range(2):
        with races:
            loss_of(model, batch(step, context.rank)).backward()
        waited.append(sum(event.seen_by_host for event in races.streams.events))
    return waited


def test_the_host_waits_for_offloaded_gradients() -> None:
    # Three groups in each of two iterations.
    assert on_ranks(_offloaded, 2) == ([3, 6], [3, 6])


EMPTY = torch.empty


class Copies(TorchDispatchMode):
    """Whether each copy to what is asked for as page-locked memory lets the host go on."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[bool] = []
        self._pinned: list[torch.Tensor] = []

    def empty(self, *size: Any, pin_memory: bool | None = None, **given: Any) -> torch.Tensor:
        """Without an accelerator no memory is page-locked: it is only asked for."""
        made = EMPTY(*size, **given)
        if pin_memory is not None:
            self._pinned.append(made)
        return made

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and any(args[0] is own for own in self._pinned):
            self.late.append(
                args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
            )
        return func(*args, **(kwargs or {}))


def _copied_to_the_host(context: RankContext, *, pinned: bool) -> list[list[bool]]:
    """In three backwards: with nothing there, with gradients there, and beside a user's hook."""
    model = VARIANTS["offload"](Stack)
    found = []

    def backward() -> None:
        loss = loss_of(model, batch(0, context.rank))
        with (
            Copies() as copies,
            mock.patch.object(torch, "empty", copies.empty),
            mock.patch.object(GroupOptions, "pin_memory", pinned),
        ):
            loss.backward()
        found.append(copies.late)

    backward()
    backward()
    model.zero_grad()
    model.out.weight.register_post_accumulate_grad_hook(lambda _: None)
    backward()
    return found


@pytest.mark.parametrize(
    ("pinned", "wanted"),
    [
        (True, [[True] * 3, [False] * 3, [True, True, False]]),
        (False, [[False] * 3] * 3),
    ],
)
def test_gradients_are_copied_late_where_nothing_reads_them_at_once(
    wanted: list[list[bool]], *, pinned: bool
) -> None:
    assert agreed(_copied_to_the_host, 2, pinned=pinned) == wanted


def _recovers(context: RankContext) -> list[Any]:
    """An exception in backward, where reductions and gathers are in flight."""
    (model, races), plain = watched(shard_blocks(build(Singles))), build(Singles)

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    handle = model.blocks[1].register_forward_pre_hook(lambda m, args: Breaks.apply(*args))
    with races:
        with pytest.raises(ValueError, match="on purpose"):
            loss_of(model, batch(0, context.rank)).backward()
        handle.remove()
        model.reset_iter_state()
        after = races.streams.clocks[COMPUTE]["reduce"] == races.streams.clocks["reduce"]["reduce"]
        model.zero_grad()
        train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return [races.found, after]


def test_recovery_waits_for_what_is_in_flight() -> None:
    for found, after in on_ranks(_recovers, 2):
        assert found == []
        assert after


def _overlap(context: RankContext) -> list[bool]:
    """Whether each gather of the forward may run beside the computation before it."""
    model, races = watched(shard_blocks(build(Singles)))
    with races:
        loss_of(model, batch(0, context.rank)).backward()
    for unit, following in zip(model.blocks, model.blocks[1:], strict=False):
        unit.set_modules_to_forward_prefetch([following])
    beside: list[bool] = []
    usual = OrderedStreams.tick

    def tick(self: OrderedStreams) -> int:
        if self.current() == "gather":
            known = self.clocks["gather"].get(COMPUTE, 0)
            beside.append(known < self.clocks[COMPUTE][COMPUTE])
        return usual(self)

    OrderedStreams.tick = tick
    try:
        with races:
            model(batch(1, context.rank))
    finally:
        OrderedStreams.tick = usual
    return beside


def test_a_prefetched_gather_may_run_beside_the_computation() -> None:
    for beside in on_ranks(_overlap, 2):
        assert any(beside)


class FakeAccelerator:
    """The part of an accelerator that knows its current stream; it remembers what is asked."""

    def __init__(self) -> None:
        self.current = ["first"]
        self.log: list[tuple[Any, ...]] = []

    def stream(self, device: torch.device, priority: int = 0) -> Any:
        @contextmanager
        def body() -> Iterator[None]:
            self.current.append(f"side of {priority}")
            yield
            self.current.pop()

        return body()

    def event(self, device: torch.device) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.log.append(("record", device.index, stream)),
            wait=lambda stream: self.log.append(("wait", stream)),
        )


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    fake = FakeAccelerator()
    module = SimpleNamespace(Stream=fake.stream)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    monkeypatch.setattr(torch, "Event", fake.event)
    both = SimpleNamespace(wait_stream=lambda *pair: fake.log.append(("wait for stream", *pair)))
    monkeypatch.setattr(torch, "Stream", both)
    monkeypatch.setattr("fsdp.engine.streams.current_stream", lambda _index: fake.current[-1])
    return fake


def test_a_stream_is_current_in_its_body_only(accelerator: FakeAccelerator) -> None:
    streams = AcceleratorStreams(torch.device("meta", 1))
    with streams.on(streams.gather), streams.on(streams.all_reduce):
        assert streams.current() == "side of 0"
        assert accelerator.current == ["first", "side of -1", "side of 0"]
    assert streams.current() == "first"


def test_events_are_recorded_and_waited_for(accelerator: FakeAccelerator) -> None:
    streams = AcceleratorStreams(torch.device("meta", 1))
    event = streams.record()
    streams.wait("mine", event)
    streams.wait("mine", None)
    streams.wait_stream("mine", "other")
    assert accelerator.log == [
        ("record", 1, "first"),
        ("wait", "mine"),
        ("wait for stream", "mine", "other"),
    ]


def test_an_event_that_is_given_is_moved(accelerator: FakeAccelerator) -> None:
    streams = AcceleratorStreams(torch.device("meta", 1))
    event = streams.record("other")
    assert streams.record(event=event) is event
    assert accelerator.log == [("record", 1, "other"), ("record", 1, "first")]
