"""Which collectives are issued, how many, and in which order."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import fully_shard, register_fsdp_forward_method
from fsdp.engine.buffer import Buffer
from fsdp.engine.param import ShardedState
from fsdp.engine.param_group import FSDPParamGroup
from fsdp.engine.state import Prefetches
from tests.fsdp.plain import DIM, batch, build, loss_of
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_training import shard_blocks


class Events:
    """The effective unshards and the post-backwards, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._unshard, self._post = FSDPParamGroup.unshard, FSDPParamGroup.post_backward

    def __enter__(self) -> Events:
        events = self

        def unshard(group: FSDPParamGroup, **kwargs: Any) -> None:
            idle = not group.pending and group.sharded_state is not ShardedState.UNSHARDED
            events._unshard(group, **kwargs)
            if idle and group.pending:
                events.seen.append(f"unshard {group.module_fqn}".rstrip())

        def post_backward(group: FSDPParamGroup, **kwargs: Any) -> None:
            events.seen.append(f"post {group.module_fqn}".rstrip())
            events._post(group, **kwargs)

        FSDPParamGroup.unshard, FSDPParamGroup.post_backward = unshard, post_backward
        return self

    def __exit__(self, *_: object) -> None:
        FSDPParamGroup.unshard, FSDPParamGroup.post_backward = self._unshard, self._post

    def take(self) -> list[str]:
        taken, self.seen = self.seen, []
        return taken


FORWARD = ["unshard", "unshard blocks.0", "unshard blocks.1", "unshard blocks.2"]
BACKWARD = [
    "unshard blocks.2",
    "unshard blocks.1",
    "post blocks.2",
    "unshard blocks.0",
    "post blocks.1",
    "post blocks.0",
    "post",
]


def _default_order(context: RankContext, forwards: int) -> list[list[str]]:
    model = shard_blocks(build(blocks=3))
    loss_of(model, batch(0, context.rank)).backward()
    with Events() as events:
        x = batch(0, context.rank)
        loss = sum(loss_of(model, x * (part + 1)) for part in range(forwards))
        forward = events.take()
        loss.backward()
        return [forward, events.take()]


def test_backward_prefetches_the_previous_unit() -> None:
    assert agreed(_default_order, 2, forwards=1) == [FORWARD, BACKWARD]


def test_two_forwards_repeat_the_forward_order() -> None:
    forward, backward = agreed(_default_order, 2, forwards=2)
    # The root stays whole after its first forward.
    assert forward == FORWARD + FORWARD[1:]
    unshards = [event for event in backward if event.startswith("unshard")]
    assert unshards == [e for e in BACKWARD if e.startswith("unshard")] * 2


def _keep_order(context: RankContext, *, manual: bool) -> list[list[str]]:
    model = shard_blocks(build(blocks=3), reshard_after_forward=False)
    with Events() as events:
        loss = loss_of(model, batch(0, context.rank))
        events.take()
        if manual:
            for unit in (model, *model.blocks):
                unit.reshard()
        loss.backward()
        return [e for e in events.take() if e.startswith("unshard")]


@pytest.mark.parametrize("manual", [False, True], ids=["kept", "resharded_by_hand"])
def test_kept_parameters_are_not_gathered_in_backward(*, manual: bool) -> None:
    wanted = ["unshard", "unshard blocks.2", "unshard blocks.1", "unshard blocks.0"]
    assert agreed(_keep_order, 2, manual=manual) == (wanted if manual else [])


def _explicit(context: RankContext, where: str) -> list[str]:
    model = shard_blocks(build(blocks=3))
    loss_of(model, batch(0, context.rank)).backward()
    units = [model, *model.blocks]
    for index, unit in enumerate(units):
        if where == "forward":
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 3])
        else:
            unit.set_modules_to_backward_prefetch(list(reversed(units[max(1, index - 2) : index])))
    with Events() as events:
        loss = loss_of(model, batch(0, context.rank))
        forward = events.take()
        loss.backward()
        return forward if where == "forward" else events.take()


def test_explicit_forward_prefetch_issues_in_listed_order() -> None:
    assert agreed(_explicit, 2, where="forward") == FORWARD


def test_explicit_backward_prefetch_replaces_the_default() -> None:
    events = agreed(_explicit, 2, where="backward")
    assert events[:4] == [
        "unshard blocks.2",
        "unshard blocks.1",
        "unshard blocks.0",
        "post blocks.2",
    ]


def _counts(context: RankContext, *, reshard: bool | None) -> dict[str, list[int]]:
    model = shard_blocks(build(blocks=3), reshard_after_forward=reshard)
    loss_of(model, batch(0, context.rank)).backward()
    records = context.recorder.records
    found: dict[str, list[int]] = {"all_gather": [], "reduce_scatter": []}
    start = len(records)
    loss = loss_of(model, batch(1, context.rank))
    middle = len(records)
    loss.backward()
    for part in (records[start:middle], records[middle:]):
        for op, counts in found.items():
            counts.append(sum(record.op == op for record in part))
    return found


@pytest.mark.parametrize(("reshard", "backward"), [(None, 3), (True, 4), (False, 0)])
def test_one_gather_per_unit_and_pass_and_one_scatter_per_unit(
    *, reshard: bool | None, backward: int
) -> None:
    counts = agreed(_counts, 2, reshard=reshard)
    assert counts == {"all_gather": [4, backward], "reduce_scatter": [0, 4]}


def _bytes(context: RankContext) -> list[int]:
    model = fully_shard(nn.Linear(16, 16))
    loss_of(model, batch(0, context.rank, dim=16)).backward()
    return [
        record.bytes
        for record in context.recorder.records
        if record.op == "reduce_scatter" or record.dtype == "float32"
    ]


def test_a_pass_moves_the_bytes_of_the_parameters() -> None:
    numel = 16 * 16 + 16
    # One gather, since the root stays whole, and one reduction.
    assert agreed(_bytes, 2) == [4 * numel, 4 * numel]


def _no_world_one_collectives(context: RankContext) -> int:
    model = shard_blocks(build())
    loss_of(model, batch(0, 0)).backward()
    return len(context.recorder.records)


def test_one_rank_issues_no_collective() -> None:
    assert agreed(_no_world_one_collectives, 1) == 0


def _registered(context: RankContext) -> list[list[str]]:
    model = shard_blocks(build())

    def kinds() -> list[str]:
        units = (model.inp, model.blocks[0].up)
        return [type(unit.weight.data).__name__ for unit in units]

    before = kinds()
    loss = loss_of(model, batch(0, context.rank))
    between = kinds()
    loss.backward()
    return [before, between, kinds()]


def test_the_registered_parameters_follow_the_pass() -> None:
    assert agreed(_registered, 2) == [
        ["DTensor", "DTensor"],
        ["Tensor", "DTensor"],
        ["DTensor", "DTensor"],
    ]


def _unshard_by_hand(context: RankContext, *, async_op: bool) -> list[Any]:
    model = shard_blocks(build())
    block = model.blocks[0]
    handle = block.unshard(async_op=async_op)  # before lazy initialisation
    pending = type(block.up.weight.data).__name__
    if handle is not None:
        handle.wait()
        handle.wait()
    done = type(block.up.weight.data).__name__
    equal = torch.equal(block.up.weight, build().blocks[0].up.weight)
    with Events() as events:
        model(batch(0, context.rank))
        forward = events.take()
    block.reshard()
    return [handle is None, pending, done, equal, "unshard blocks.0" in forward]


def test_unshard_by_hand_installs_the_parameters() -> None:
    assert agreed(_unshard_by_hand, 2, async_op=False) == [True, "Tensor", "Tensor", True, False]


def test_an_asynchronous_unshard_installs_them_at_wait() -> None:
    assert agreed(_unshard_by_hand, 2, async_op=True) == [False, "DTensor", "Tensor", True, False]


def _pending_before_forward(context: RankContext) -> bool:
    model = shard_blocks(build())
    model.blocks[0].unshard(async_op=True)
    return torch.equal(model(batch(0, context.rank)), build()(batch(0, context.rank)))


def test_forward_waits_for_a_pending_unshard() -> None:
    assert agreed(_pending_before_forward, 2) is True


def _empty_unit(context: RankContext) -> list[bool]:
    model = fully_shard(nn.Sequential(nn.ReLU()))
    handle = model.unshard(async_op=True)
    handle.wait()
    model.reshard()
    return [model.unshard() is None, model(torch.ones(2)).sum().item() == 2.0]


def test_a_unit_without_parameters_works() -> None:
    assert agreed(_empty_unit, 2) == [True, True]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.linear(x) * scale


def _other_method(context: RankContext) -> float:
    model = fully_shard(build(Encoder))
    register_fsdp_forward_method(model, "encode")
    plain = build(Encoder)
    register_fsdp_forward_method(plain, "encode")  # no-op
    x = batch(0, 0)
    got, want = model.encode(x, scale=2.0), plain.encode(x, scale=2.0)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(model.linear.weight.grad.full_tensor(), plain.linear.weight.grad)
    return (got - want).abs().max().item()


def test_another_method_may_be_a_forward() -> None:
    assert agreed(_other_method, 2) == 0.0


def _embedding(context: RankContext) -> list[str]:
    model = shard_blocks(build(blocks=2))
    model.blocks[0].set_unshard_in_backward(False)
    # A unit that backward needs after all cannot compute; here its forward keeps its values.
    model.blocks[0].set_reshard_after_forward(False)
    with Events() as events:
        loss = loss_of(model, batch(0, context.rank))
        events.take()
        loss.backward()
        return [e for e in events.take() if e.startswith("unshard")]


def test_backward_does_not_gather_what_it_was_told_not_to() -> None:
    assert agreed(_embedding, 2) == ["unshard blocks.1"]


class Indexed(nn.Module):
    """A table of which backward needs the rows' numbers only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0] * 100).long() % 11
        return self.out(self.table(rows) + x)


def _table(context: RankContext) -> list[str]:
    model, plain = build(Indexed), build(Indexed)
    fully_shard(model.table).set_unshard_in_backward(False)
    fully_shard(model)
    with Events() as events:
        loss = loss_of(model, batch(0, context.rank))
        events.take()
        loss.backward()
        seen = [e for e in events.take() if e.startswith("unshard")]
    plain_gradients(plain, context.world_size)
    compare_gradients(model, plain)
    return seen


def test_an_embedding_is_not_gathered_for_backward_and_has_its_gradient() -> None:
    assert agreed(_table, 2) == []


def plain_gradients(plain: nn.Module, world: int, times: int = 1) -> None:
    for rank in range(world):
        (times * loss_of(plain, batch(0, rank)) / world).backward()


def compare_gradients(model: nn.Module, plain: nn.Module) -> None:
    for got, (name, want) in zip(model.parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(
            got.grad.full_tensor(),
            want.grad,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def _kept_after_backward(context: RankContext) -> list[Any]:
    """Parameters that backward leaves whole are there for the next forward."""
    model, plain = shard_blocks(build()), build()
    model.set_reshard_after_backward(False)
    sharded = dict(model.named_parameters())
    loss_of(model, batch(0, context.rank)).backward()
    kinds = {type(p.data).__name__ for p in model.parameters()}
    with Events() as events:
        loss = loss_of(model, batch(0, context.rank))
        forward = events.take()
        loss.backward()
    for unit in (model, *model.blocks):
        unit.reshard()
    same = all(p is sharded[name] for name, p in model.named_parameters())
    plain_gradients(plain, context.world_size, times=2)
    compare_gradients(model, plain)
    return [sorted(kinds), forward, same]


def test_parameters_may_stay_whole_after_a_backward_that_reduces() -> None:
    assert agreed(_kept_after_backward, 2) == [["Tensor"], [], True]


def _twice_backward(context: RankContext) -> list[list[str]]:
    """Two backwards over one forward: each gathers what forward had given up."""
    model, plain = shard_blocks(build(blocks=3)), build(blocks=3)
    loss = loss_of(model, batch(0, context.rank))
    found = []
    with Events() as events:
        for retain in (True, False):
            events.take()
            loss.backward(retain_graph=retain)
            found.append([e for e in events.take() if e.startswith("unshard")])
    plain_gradients(plain, context.world_size, times=2)
    compare_gradients(model, plain)
    return found


def test_a_second_backward_over_the_same_forward_gathers_again() -> None:
    blocks = ["unshard blocks.2", "unshard blocks.1", "unshard blocks.0"]
    # The first backward has given up the root as well, which forward had left whole.
    assert agreed(_twice_backward, 2) == [blocks, ["unshard", *blocks]]


def _failing_method(context: RankContext) -> list[Any]:
    """A method that raises leaves a module that can go on."""

    class Fails(Encoder):
        def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            if scale < 0:
                raise ValueError("on purpose")
            return super().encode(x, scale=scale)

    model, plain = fully_shard(build(Fails)), build(Fails)
    register_fsdp_forward_method(model, "encode")
    with pytest.raises(ValueError, match="on purpose"):
        model.encode(batch(0, 0), scale=-1.0)
    kind = type(model.linear.weight.data).__name__
    model.encode(batch(0, context.rank), scale=2.0).pow(2).mean().backward()
    for rank in range(context.world_size):
        (plain.encode(batch(0, rank), scale=2.0).pow(2).mean() / context.world_size).backward()
    compare_gradients(model, plain)
    return [kind]


def test_a_method_that_raises_leaves_a_usable_model() -> None:
    assert agreed(_failing_method, 2) == ["DTensor"]


def _access(context: RankContext, where: str) -> list[Any]:
    """Whole parameters read by hand, between passes or between forward and backward."""
    model, plain = shard_blocks(build(blocks=3)), build(blocks=3)
    block = model.blocks[1]
    loss = loss_of(model, batch(0, context.rank)) if where == "in_a_pass" else None
    with Events() as events:
        block.unshard()
        equal = torch.equal(block.up.weight, plain.blocks[1].up.weight)
        block.reshard()
        kind = type(block.up.weight.data).__name__
        by_hand = events.take()
        if loss is None:
            loss = loss_of(model, batch(0, context.rank))
            events.take()
        loss.backward()
        backward = [e for e in events.take() if e.startswith("unshard")]
    plain_gradients(plain, context.world_size)
    compare_gradients(model, plain)
    return [equal, kind, by_hand, backward]


@pytest.mark.parametrize("where", ["before_a_pass", "in_a_pass"])
def test_what_was_read_by_hand_is_gathered_again_for_backward(where: str) -> None:
    blocks = ["unshard blocks.2", "unshard blocks.1", "unshard blocks.0"]
    name = "unshard blocks.1" if where == "in_a_pass" else "unshard"  # no name before lazy start
    assert agreed(_access, 2, where=where) == [True, "DTensor", [name], blocks]


def _stop_gradient(context: RankContext) -> bool:
    class Stop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[1](self.blocks[0](x))
            return self.blocks[2](x.detach())

    torch.manual_seed(0)
    model = shard_blocks(Stop())
    for step in range(2):
        loss_of(model, batch(step, context.rank)).backward()
    states = [g for s in fully_shard.state(model).context.all_states for g in s.groups]
    grads = [p.grad is not None for p in model.parameters()]
    return all(g.sharded_state is ShardedState.SHARDED and not g.pending for g in states) and (
        grads == [False] * 4 + [True] * 2
    )


def test_a_prefetch_that_backward_does_not_reach_is_dropped() -> None:
    assert agreed(_stop_gradient, 2) is True


def _separate_group(context: RankContext) -> list[bool]:
    model = shard_blocks(build())
    model.set_separate_reduce_scatter_group()
    loss_of(model, batch(0, context.rank)).backward()
    records = context.recorder.records
    scatter = {r.group for r in records if r.op == "reduce_scatter"}
    gather = {r.group for r in records if r.op == "all_gather"}
    model.set_separate_reduce_scatter_group(False)
    start = len(records)
    loss_of(model, batch(0, context.rank)).backward()
    shared = {r.group for r in records[start:]}
    return [len(scatter) == 1, not scatter & gather, shared == gather]


def test_reduce_scatters_may_have_a_group_of_their_own() -> None:
    assert agreed(_separate_group, 2) == [True, True, True]


class InPlace(nn.Module):
    """Its unit changes its own input, and returns a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.inp(x))


def _in_place(context: RankContext) -> None:
    model, plain = shard_blocks(build(InPlace)), build(InPlace)
    loss_of(model, batch(0, context.rank)).backward()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-5, atol=1e-6)


def test_a_unit_may_change_its_input_in_place() -> None:
    on_ranks(_in_place, 2)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(-1)


def _warns(context: RankContext) -> list[str]:
    model = fully_shard(build(Flat))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(0, context.rank)).sum().backward()
    return [str(w.message)[:47] for w in caught if "view tensor" in str(w.message)]


def test_an_output_that_is_a_view_is_warned_of() -> None:
    assert agreed(_warns, 2) == ["FSDP2-wrapped module (FSDPFlat) returned a view"]


def _logged(context: RankContext, blocks: int, prefetches: str) -> list[str]:
    model = shard_blocks(build(blocks=blocks))
    for unit in (model, *model.blocks):
        fully_shard.state(unit).prefetches = Prefetches[prefetches]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        loss_of(model, batch(0, context.rank)).backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return lines


def test_the_debug_log_tells_the_pass() -> None:
    assert agreed(_logged, 2, blocks=1, prefetches="BEFORE_GRADIENTS") == [
        "FSDP::root_pre_forward",
        "FSDP::pre_forward ()",
        "FSDP::pre_forward (blocks.0)",
        "FSDP::post_forward (blocks.0)",
        "FSDP::post_forward ()",
        "FSDP::pre_backward ()",
        "FSDP::backward_prefetch (blocks.0)",
        "FSDP::pre_backward (blocks.0)",
        "FSDP::post_backward (blocks.0)",
        "FSDP::root_post_backward",
        "FSDP::post_backward ()",
    ]


BACKWARD_LOG: dict[str, list[str]] = {
    "BEFORE_GRADIENTS": [
        "pre_backward ()",
        "backward_prefetch (blocks.1)",
        "pre_backward (blocks.1)",
        "backward_prefetch (blocks.0)",
        "post_backward (blocks.1)",
        "pre_backward (blocks.0)",
        "post_backward (blocks.0)",
    ],
    "AFTER_GRADIENTS": [
        "pre_backward ()",
        "pre_backward (blocks.1)",
        "post_backward (blocks.1)",
        "backward_prefetch (blocks.0)",
        "pre_backward (blocks.0)",
        "post_backward (blocks.0)",
    ],
    "NEVER": [
        "pre_backward ()",
        "pre_backward (blocks.1)",
        "post_backward (blocks.1)",
        "pre_backward (blocks.0)",
        "post_backward (blocks.0)",
    ],
}


@pytest.mark.parametrize("prefetches", BACKWARD_LOG)
def test_backward_prefetches_before_or_after_the_gradients_or_never(prefetches: str) -> None:
    # The root's inputs need no gradient: it is through only when backward is.
    lines = agreed(_logged, 2, blocks=2, prefetches=prefetches)
    start = lines.index("FSDP::pre_backward ()")
    end = lines.index("FSDP::root_post_backward")
    assert [line.removeprefix("FSDP::") for line in lines[start:end]] == BACKWARD_LOG[prefetches]


def _profiled(context: RankContext) -> list[str]:
    model = shard_blocks(build(blocks=1))
    with torch.profiler.profile() as profile:
        loss_of(model, batch(0, context.rank)).backward()
    return sorted({event.key for event in profile.key_averages() if "FSDP::" in event.key})


def test_a_profile_names_the_groups() -> None:
    names = agreed(_profiled, 2)
    assert "FSDP::pre_forward (blocks.0)" in names


def _memory_at_the_gather(context: RankContext) -> list[int]:
    """Bytes of each group's whole buffer when its first gather asks for memory."""
    found: list[int] = []
    usual = Buffer.allocate

    def watched(buffer: Buffer) -> None:
        found.append(buffer.data.untyped_storage().nbytes())
        usual(buffer)

    model = shard_blocks(build())
    Buffer.allocate = watched  # type: ignore[method-assign]
    try:
        model(batch(0, context.rank))
    finally:
        Buffer.allocate = usual  # type: ignore[method-assign]
    return found


def test_a_buffer_gets_its_memory_from_the_stream_that_fills_it_first() -> None:
    for found in on_ranks(_memory_at_the_gather, 2):
        assert found
        assert set(found) == {0}
