"""Training sharded equals training without sharding, for every way of sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from conformance.ranks import RankContext
from fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.fsdp.plain import (
    DIM,
    Residual,
    Stack,
    batch,
    build,
    compare,
    loss_of,
    optimizer_of,
    train_evaluating,
    train_plain,
    train_sharded,
    whole,
)
from tests.fsdp.ranks import agreed, count, on_ranks


def shard_blocks(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def largest_even_dim(world: int):
    def choose(param: nn.Parameter) -> Shard | None:
        even = [dim for dim, size in enumerate(param.shape) if size % world == 0]
        return Shard(max(even, key=lambda d: (param.shape[d], d))) if even else None

    return choose


VARIANTS = {
    "default": {},
    "keep": {"reshard_after_forward": False},
    "reshard": {"reshard_after_forward": True},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "largest_dim": {"shard_placement_fn": "largest"},
}


def _parity(context: RankContext, variant: str, kind: str) -> list[float]:
    options = dict(VARIANTS[variant])
    if options.get("shard_placement_fn") == "largest":
        options["shard_placement_fn"] = largest_even_dim(context.world_size)
    model = shard_blocks(build(hidden=12), **options)
    losses = train_sharded(model, context.rank, kind=kind)
    plain = build(hidden=12)
    wanted = train_plain(plain, context.world_size, kind=kind)
    compare(model, plain)
    if context.rank == 0:
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)
    return losses


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_equals_the_unsharded_model(world: int, variant: str) -> None:
    values = on_ranks(_parity, world, variant=variant, kind="adamw")
    assert all(losses[0] != losses[-1] for losses in values)


def test_parameters_that_are_cut_along_another_dim_train_alike() -> None:
    on_ranks(_parity, 2, variant="largest_dim", kind="sgd")


def _uneven(context: RankContext) -> None:
    model = shard_blocks(build())
    train_sharded(model, context.rank, kind="sgd")
    plain = build()
    train_plain(plain, context.world_size, kind="sgd")
    compare(model, plain)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sizes_that_no_world_divides(world: int) -> None:
    on_ranks(_uneven, world)


def _integer_reshard(context: RankContext) -> list[Any]:
    model = shard_blocks(build(), reshard_after_forward=2)
    output = model(batch(0, context.rank))
    block = model.blocks[0]
    between = {n: tuple(p.to_local().shape) for n, p in block.named_parameters()}
    meshes = {tuple(p.device_mesh.mesh.flatten().tolist()) for p in block.parameters()}
    values = {
        n: torch.equal(whole(p), q)
        for (n, p), q in zip(block.named_parameters(), build().blocks[0].parameters(), strict=True)
    }
    output.sum().backward()
    model.zero_grad()
    train_sharded(model, context.rank)
    plain = build()
    train_plain(plain, context.world_size)
    compare(model, plain)
    return [between["up.weight"], sorted(meshes), all(values.values())]


def test_an_integer_reshards_to_a_smaller_mesh_after_forward() -> None:
    for rank, value in enumerate(on_ranks(_integer_reshard, 4)):
        rows = 7 if rank % 2 == 0 else 6  # chunks of 13 rows over 2 ranks
        assert value == [[rows, DIM], [[0, 1, 2, 3]], True]


def _given_up_early(context: RankContext, where: str) -> list[Any]:
    """What an integer keeps after forward may be given up as well, or before forward ends."""

    class Eager(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            if where == "inside":
                self.reshard()
            return out

    class Blocks(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Eager() for _ in range(2))

    model = build(Blocks)
    where, inside = "nowhere", where == "inside"
    plain = build(Blocks)
    shard_blocks(model, reshard_after_forward=2)
    where = "inside" if inside else "after"
    loss = loss_of(model, batch(0, context.rank))
    kept = model.blocks[0].up.weight.to_local().shape[0]
    if not inside:
        model.blocks[0].reshard()
    given_up = model.blocks[0].up.weight.to_local().shape[0]
    loss.backward()
    where = "nowhere"
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=1e-5, atol=1e-6)
    return [kept, given_up]


@pytest.mark.parametrize("where", ["after", "inside"])
def test_what_an_integer_keeps_may_be_given_up_by_hand(where: str) -> None:
    # 13 rows over 2 ranks of a smaller mesh, over all 4.
    found = on_ranks(_given_up_early, 4, where=where)
    kept, given_up = [7, 6, 7, 6], [4, 4, 4, 1]
    assert [rows for rows, _ in found] == kept
    assert [rows for _, rows in found] == (kept if where == "inside" else given_up)


def _hybrid(context: RankContext, *, skip_all_reduce: bool) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_blocks(build(), mesh=mesh)

    def before(module: nn.Module, part: int) -> None:
        if skip_all_reduce:
            module.set_requires_all_reduce(part == 1)

    micro = 2 if skip_all_reduce else 1
    train_sharded(model, context.rank, micro=micro, before_micro=before)
    plain = build()
    train_plain(plain, context.world_size, micro=micro)
    compare(model, plain)
    return sum(record.op == "all_reduce" for record in context.recorder.records)


@pytest.mark.parametrize("skip_all_reduce", [False, True])
def test_hybrid_sharding_reduces_over_shards_and_replicas(*, skip_all_reduce: bool) -> None:
    # One all-reduce for each of three groups and three steps, skipped or not.
    assert on_ranks(_hybrid, 4, skip_all_reduce=skip_all_reduce) == (9, 9, 9, 9)


def _accumulate(context: RankContext, *, keep: bool) -> list[int]:
    model = shard_blocks(build())

    def before(module: nn.Module, part: int) -> None:
        module.set_requires_gradient_sync(part == 2)
        if keep:
            module.set_reshard_after_backward(part == 2)

    train_sharded(model, context.rank, micro=3, before_micro=before)
    plain = build()
    train_plain(plain, context.world_size, micro=3)
    compare(model, plain)
    ops = [record.op for record in context.recorder.records]
    return [ops.count("reduce_scatter"), ops.count("all_gather")]


@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "keep_after_backward"])
def test_accumulation_without_sync_reduces_once(*, keep: bool) -> None:
    scatters, gathers = on_ranks(_accumulate, 2, keep=keep)[0]
    assert scatters == 3 * 3
    # Per step, the first micro-batch gathers 3 + 2 times. With kept parameters the later ones find
    # them whole in forward, free the blocks after it and gather these two again in backward.
    # Full tensors add one for each of the 14 parameters compared, and start-up one exchange.
    rounds = 3 * (5 + 5 + 5) if not keep else 3 * (5 + 2 + 2)
    assert gathers == rounds + 14 + 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def _tied(context: RankContext) -> bool:
    model = fully_shard(build(Tied))
    train_sharded(model, context.rank)
    plain = build(Tied)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return model.first.weight is model.second.weight


def test_a_parameter_shared_inside_a_group_stays_shared() -> None:
    assert on_ranks(_tied, 2) == (True, True)


def _tied_across(context: RankContext) -> str:
    model = build(Tied)
    fully_shard(model.first)
    fully_shard(model)
    try:
        model(batch(0, context.rank))
    except ValueError as error:
        return str(error)
    return ""


def test_a_parameter_shared_by_two_groups_is_refused() -> None:
    assert "shared with a parameter already managed" in on_ranks(_tied_across, 2)[0]


class Partly(nn.Module):
    """Uses one branch only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])
        self.spare = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def _unused(context: RankContext) -> list[bool]:
    model = shard_blocks(build(Partly))
    loss_of(model, batch(0, context.rank)).backward()
    none = [p.grad is None for p in model.parameters()]
    model.zero_grad()
    train_sharded(model, context.rank)
    plain = build(Partly)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return none


def test_parameters_without_gradient_keep_none() -> None:
    assert on_ranks(_unused, 2)[0] == [False, False, True, True, True, True]


def _frozen(context: RankContext, where: str) -> list[str]:
    def freeze(model: nn.Module) -> nn.Module:
        chosen = {
            "block": list(model.blocks[0].parameters()),
            "bias": [p for n, p in model.named_parameters() if n.endswith("bias")],
            "first": list(model.inp.parameters()),
        }[where]
        for param in chosen:
            param.requires_grad_(False)
        return model

    model = shard_blocks(freeze(build()))
    context.recorder.mark("train")
    train_sharded(model, context.rank, steps=1)
    ops = [r.op for r in context.recorder.records if r.phase == "train"]
    train_sharded(model, context.rank)
    plain = freeze(build())
    train_plain(plain, context.world_size, steps=1)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return ops


@pytest.mark.parametrize(("where", "scatters"), [("block", 2), ("bias", 3), ("first", 3)])
def test_frozen_parameters_do_not_move_and_are_not_reduced(where: str, scatters: int) -> None:
    for ops in on_ranks(_frozen, 2, where=where):
        assert ops.count("reduce_scatter") == scatters


def _freeze_later(context: RankContext) -> None:
    model, plain = shard_blocks(build()), build()
    for each, train in ((model, train_sharded), (plain, train_plain)):
        number = context.rank if each is model else context.world_size
        train(each, number, steps=1)
        for param in each.blocks[1].parameters():
            param.requires_grad_(False)
        train(each, number, steps=2)
    compare(model, plain)
    # An optimizer over what trains has cleared the other gradients: a frozen one must have none.
    assert all(param.grad is None for param in model.blocks[1].parameters())


def test_freezing_between_iterations_is_followed() -> None:
    on_ranks(_freeze_later, 2)


class Reused(nn.Module):
    """Runs its block several times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.blocks[0](x))
        return x


def _reused(context: RankContext) -> None:
    model = shard_blocks(build(Reused))
    train_sharded(model, context.rank)
    plain = build(Reused)
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_a_module_may_run_several_times_in_one_forward() -> None:
    on_ranks(_reused, 2)


def _two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return loss_of(model, x) + loss_of(model, x.flip(0) * 0.5)


def _forwards_then_backward(context: RankContext) -> None:
    model = shard_blocks(build())
    train_sharded(model, context.rank, loss=_two_forwards)
    plain = build()
    train_plain(plain, context.world_size, loss=_two_forwards)
    compare(model, plain)


def test_several_forwards_may_precede_a_backward() -> None:
    on_ranks(_forwards_then_backward, 2)


def _pipeline(context: RankContext) -> None:
    model, plain = shard_blocks(build()), build()
    model.set_is_last_backward(False)
    first, second = (loss_of(model, batch(0, context.rank, part)) for part in range(2))
    first.backward()
    model.set_is_last_backward(True)
    second.backward()
    for rank in range(context.world_size):
        for part in range(2):
            (loss_of(plain, batch(0, rank, part)) / context.world_size).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=1e-5, atol=1e-6)


def test_interleaved_forwards_and_backwards_accumulate() -> None:
    on_ranks(_pipeline, 2)


def _bf16(context: RankContext, reduce: str) -> list[str]:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype={"float32": torch.float32, "none": None}[reduce],
    )
    model = shard_blocks(build(), mp_policy=policy)
    seen = {}
    model.blocks[0].up.register_forward_hook(
        lambda module, args, out: seen.update(
            weight=module.weight.dtype, arg=args[0].dtype, out=out.dtype
        )
    )
    context.recorder.mark("train")
    losses = train_sharded(model, context.rank)
    scatter = {r.dtype for r in context.recorder.records if r.op == "reduce_scatter"}
    gather = {
        r.dtype
        for r in context.recorder.records
        if r.op == "all_gather" and r.phase == "train" and not r.dtype.startswith("int")
    }
    plain = build()
    wanted = train_plain(plain, context.world_size)
    compare(model, plain, tolerance=0.1)
    if context.rank == 0:
        torch.testing.assert_close(losses, wanted, rtol=0.1, atol=0.05)
    dtypes = {p.dtype for p in model.parameters()}
    return [*(str(d) for d in seen.values()), *scatter, *gather, *map(str, dtypes)]


@pytest.mark.parametrize(("reduce", "scatter"), [("float32", "float32"), ("none", "bfloat16")])
def test_each_stage_uses_the_dtype_of_the_policy(reduce: str, scatter: str) -> None:
    bf16 = "torch.bfloat16"
    wanted = [bf16, bf16, bf16, scatter, "bfloat16", "torch.float32"]
    for value in on_ranks(_bf16, 2, reduce=reduce):
        assert value == wanted


def _fp16_reduce(context: RankContext) -> None:
    model = shard_blocks(build(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    loss_of(model, batch(0, context.rank)).backward()
    plain = build()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("world", [2, 3])
def test_half_precision_reductions_still_give_the_mean(world: int) -> None:
    on_ranks(_fp16_reduce, world)


def _accumulates_in_float32(context: RankContext) -> list[float]:
    """256 + 1 + 1 in bf16 stays 256: micro-batches must be added in float32, those of a step."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(1, 2, bias=False), mp_policy=policy)
    found = []
    for _ in range(2):
        for part, value in enumerate((256.0, 1.0, 1.0)):
            model.set_requires_gradient_sync(part == 2)
            model(torch.full((1, 1), value)).sum().backward()
        found.append(whole(model.weight.grad).sum().item())
        model.weight.grad = None  # as an optimizer drops it, which knows of nothing that waits
    return found


def test_unsynchronised_gradients_accumulate_in_the_reduce_dtype() -> None:
    assert agreed(_accumulates_in_float32, 2) == [516.0, 516.0]


def _factor(context: RankContext, *, factor: float, force_sum: bool) -> None:
    model = shard_blocks(build())
    for unit in (model, *model.blocks):
        unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(force_sum)
    loss_of(model, batch(0, context.rank)).backward()
    plain = build()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / factor).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_the_sum_over_the_factor(
    *, world: int, factor: float, force_sum: bool
) -> None:
    on_ranks(_factor, world, factor=factor, force_sum=force_sum)


class Pair(nn.Module):
    """Two siblings that are sharded as one group."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 3)
        self.use_head = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.body(x)))
        return self.head(x) if self.use_head else x


def _grouped(context: RankContext, *, use_head: bool) -> int:
    model, plain = build(Pair), build(Pair)
    model.use_head = plain.use_head = use_head
    fully_shard(model.body)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return len(fully_shard.state(model.norm).groups)


@pytest.mark.parametrize("use_head", [True, False], ids=["all_members", "one_member"])
def test_a_list_of_modules_is_one_group(*, use_head: bool) -> None:
    assert on_ranks(_grouped, 2, use_head=use_head) == (1, 1)


def _chunked(context: RankContext) -> None:
    """The main forward runs the norm only; the head runs per chunk, with a backward each."""
    model, plain = build(Pair), build(Pair)
    model.use_head = plain.use_head = False
    fully_shard(model.body)
    fully_shard([model.norm, model.head])
    fully_shard(model)

    def chunked(module: nn.Module, x: torch.Tensor, scale: float) -> None:
        hidden = module(x)
        detached = hidden.detach().requires_grad_()
        for part in detached.chunk(2):
            (module.head(part).pow(2).mean() * scale).backward()
        hidden.backward(detached.grad)

    for step in range(2):
        chunked(model, batch(step, context.rank), 1.0)
        for rank in range(context.world_size):
            chunked(plain, batch(step, rank), 1.0 / context.world_size)
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            whole(got.grad), want.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_members_of_a_group_may_run_alone_in_chunks() -> None:
    on_ranks(_chunked, 2)


def _small(context: RankContext) -> None:
    """Fewer rows than ranks: some ranks hold nothing of a parameter."""
    model = fully_shard(build(Stack, blocks=1, hidden=2))
    train_sharded(model, context.rank)
    plain = build(Stack, blocks=1, hidden=2)
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_parameters_smaller_than_the_world() -> None:
    on_ranks(_small, 4)


class TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, DIM)
        self.b = nn.Linear(DIM, DIM)
        self.use = "ab"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(getattr(self, name)(x) for name in self.use)


def _only_accumulated(context: RankContext) -> None:
    """What earlier micro-batches left is reduced though the last one adds nothing to it."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model, plain = fully_shard(build(TwoPaths), mp_policy=policy), build(TwoPaths)
    for part, use in enumerate(["ab", "a"]):
        model.use = plain.use = use
        model.set_requires_gradient_sync(part == 1)
        loss_of(model, batch(0, context.rank, part)).backward()
        for rank in range(context.world_size):
            (loss_of(plain, batch(0, rank, part)) / context.world_size).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=1e-5, atol=1e-6)


def test_an_accumulated_gradient_is_reduced_without_a_new_one() -> None:
    on_ranks(_only_accumulated, 2)


def _asked_before_the_step(context: RankContext, *, reshard: bool | int | None, grad: bool) -> None:
    """What a forward leaves whole is not what the next one needs, once a step was made."""
    model, plain = shard_blocks(build(), reshard_after_forward=reshard), build()
    train_evaluating(model, context.rank, grad=grad)
    train_plain(plain, context.world_size)
    compare(model, plain)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("reshard", [None, True, False, 1])
def test_a_forward_before_the_step_keeps_nothing_old(
    *, reshard: bool | int | None, grad: bool
) -> None:
    on_ranks(_asked_before_the_step, 2, reshard=reshard, grad=grad)


def _clipped_after_an_evaluation(context: RankContext, *, reshard: bool | None) -> None:
    model, plain = shard_blocks(build(), reshard_after_forward=reshard), build()
    loss_of(model, batch(0, context.rank)).backward()
    with torch.no_grad():
        model(batch(7, context.rank))
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    got, want = (nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (model, plain))
    torch.testing.assert_close(whole(got), want)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad)


@pytest.mark.parametrize("reshard", [None, False])
def test_who_clips_after_an_evaluation_finds_the_gradients(*, reshard: bool | None) -> None:
    on_ranks(_clipped_after_an_evaluation, 2, reshard=reshard)


def _gathered_before_the_step(context: RankContext, *, wait: bool) -> None:
    model, plain = shard_blocks(build()), build()
    optimizer = optimizer_of(model.parameters())
    for step in range(3):
        loss_of(model, batch(step, context.rank)).backward()
        handles = [module.unshard(async_op=True) for module in (model, model.blocks[0])]
        if wait:
            handles[1].wait()
        optimizer.step()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        optimizer.zero_grad()
    train_plain(plain, context.world_size)
    compare(model, plain)


@pytest.mark.parametrize("wait", [False, True])
def test_a_gather_by_hand_before_the_step_keeps_nothing_old(*, wait: bool) -> None:
    on_ranks(_gathered_before_the_step, 2, wait=wait)


def _stepped_in_between(context: RankContext) -> None:
    """Another model's optimizer may step between a forward and its backward."""
    model, plain = shard_blocks(build(), reshard_after_forward=False), build()
    other = fully_shard(build())
    optimizer, others = optimizer_of(model.parameters()), optimizer_of(other.parameters())
    for step in range(3):
        loss = loss_of(model, batch(step, context.rank))
        loss_of(other, batch(step, context.rank)).backward()
        others.step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_another_optimizer_may_step_before_backward() -> None:
    on_ranks(_stepped_in_between, 2)


def _stepped_in_forward(context: RankContext) -> None:
    """A model may train another one in its forward; its own parameters are in use then."""
    model, plain, other = shard_blocks(build()), build(), build()
    optimizer, others = optimizer_of(model.parameters()), optimizer_of(other.parameters())
    loss_of(other, batch(0, context.rank)).backward()
    model.blocks[1].up.register_forward_hook(lambda *_: others.step())
    for step in range(3):
        loss_of(model, batch(step, context.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_an_optimizer_may_step_inside_forward() -> None:
    on_ranks(_stepped_in_forward, 2)


def _stepped_in_backward(context: RankContext) -> list[int]:
    """Steps inside backward free nothing that the rest of it needs."""
    model = shard_blocks(build(blocks=4), reshard_after_forward=False)
    optimizers = {param: optimizer_of([param]) for param in model.parameters()}
    for param, optimizer in optimizers.items():
        param.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    gathers = []
    for step in range(3):
        before = count(context, "all_gather")
        loss_of(model, batch(step, context.rank)).backward()
        gathers.append(count(context, "all_gather") - before)
        for optimizer in optimizers.values():
            optimizer.zero_grad()
    return gathers[1:]  # the first exchanged a digest too


def test_steps_inside_backward_gather_nothing_again() -> None:
    assert agreed(_stepped_in_backward, 2) == [5, 5]


def _kept_after_an_evaluation(context: RankContext) -> list[bool]:
    """Without gradients no step is due, and whole parameters stay for the next evaluation."""
    model = fully_shard(build(), reshard_after_forward=False)
    kept = []
    for _ in range(2):
        with torch.no_grad():
            model(batch(0, context.rank))
        kept.append(isinstance(model.inp.weight, DTensor))
    return kept


def test_whole_parameters_stay_between_evaluations() -> None:
    assert agreed(_kept_after_an_evaluation, 2) == [False, False]
