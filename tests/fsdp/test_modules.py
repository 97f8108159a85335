"""Modules of unusual kinds: several dtypes, caught exceptions, packed sequences, own attributes."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import set_checkpoint_early_stop

from conformance.ranks import RankContext
from fsdp import MixedPrecisionPolicy, fully_shard
from tests.fsdp.plain import (
    DIM,
    Residual,
    Stack,
    batch,
    build,
    compare,
    loss_of,
    train_plain,
    train_sharded,
    whole,
)
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks
from tests.fsdp.test_state import Remembering
from tests.fsdp.test_training import shard_blocks


def _mixed_compute_dtypes(context: RankContext, *, extended: bool) -> list[Any]:
    """Shards of several dtypes are cast piece by piece on their way into the gather."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.table = nn.Parameter(torch.arange(7), requires_grad=False)
            self.small = nn.Parameter(torch.full((5,), 0.1).half(), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.table.sum() + self.small.sum()

    torch.manual_seed(0)
    plain = Mixed()
    torch.manual_seed(0)
    model = Mixed()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    if extended:
        local = model.linear.bias._local_tensor
        local.fsdp_pre_all_gather = types.MethodType(
            lambda self, mesh: ((self.detach().bfloat16(),), None), local
        )
        local.fsdp_post_all_gather = types.MethodType(
            lambda self, outs, meta, dtype, *, out=None: (
                None if out is not None else (outs[0], (outs[0],))
            ),
            local,
        )
    wanted = plain.to(torch.bfloat16)
    wanted.table.data = torch.arange(7)
    x = batch(0, context.rank)
    for _ in range(2):
        out = model(x)
        assert torch.equal(out, wanted(x.bfloat16()))
        out.float().pow(2).mean().backward()
    gathered = {r.dtype for r in context.recorder.records if r.op == "all_gather"} - {"int64"}
    return [sorted(gathered), str(model.linear.weight.grad.dtype)]


@pytest.mark.parametrize("extended", [False, True])
def test_a_group_of_several_dtypes_computes_in_those_of_the_policy(*, extended: bool) -> None:
    assert agreed(_mixed_compute_dtypes, 2, extended=extended) == [["uint8"], "torch.float32"]


class Adapted(nn.Module):
    """Frozen parameters of two dtypes, of which the first is not that of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        self.linear = nn.Linear(DIM, DIM)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale.sum().float()


def _unfrozen_later(context: RankContext) -> list[str]:
    plain, policy = build(Adapted), MixedPrecisionPolicy(param_dtype=torch.float32)
    model = fully_shard(build(Adapted), mp_policy=policy)
    with torch.no_grad():
        model(batch(0, 0))
    model.reshard()
    model.linear.requires_grad_(True)
    plain.linear.requires_grad_(True)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    model.scale.requires_grad_(True)
    return error_of(lambda: loss_of(model, batch(0, context.rank)).backward())


def test_frozen_parameters_of_several_dtypes_may_be_unfrozen_if_those_are_of_one() -> None:
    errors = on_ranks(_unfrozen_later, 2)
    named_on_every_rank(errors, AssertionError, "FSDP expects uniform original parameter dtype")


class Waves(nn.Module):
    """Complex parameters beside a real one, and one whose rows no world divides."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.waves = nn.Linear(DIM, 5, dtype=torch.complex64)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.waves(self.inp(x).to(torch.complex64)).abs() * self.scale.sum()


def _complex(context: RankContext, *, sizes: tuple[int, ...], mixed: bool) -> None:
    model, plain = build(Waves), build(Waves)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))
    if not mixed:
        fully_shard(model.waves, mesh=mesh)
    else:
        for module in (model, plain):
            module.inp.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    train_sharded(model, context.rank, kind="sgd")
    train_plain(plain, context.world_size, kind="sgd")
    compare(model, plain)


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "beside_real_ones"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=str)
def test_complex_parameters_are_trained(sizes: tuple[int, ...], *, mixed: bool) -> None:
    on_ranks(_complex, 2, sizes=sizes, mixed=mixed)


def _falls_back(context: RankContext) -> list[str]:
    """A forward may catch what an inner unit raised and go on without it."""

    class Fallback(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            try:
                x = self.blocks[0](x, "too many arguments")
            except TypeError:
                found.add(type(self.blocks[0].up.weight.data).__name__)
                x = x * 2
            return self.out(self.blocks[1](x))

    found: set[str] = set()
    model, plain = shard_blocks(build(Fallback)), build(Fallback)
    train_sharded(model, context.rank)
    kinds = sorted(found)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return kinds


def test_an_exception_caught_in_the_middle_of_forward_leaves_its_unit_sharded() -> None:
    assert agreed(_falls_back, 2) == ["DTensor"]


def _full_recompute(context: RankContext) -> list[str]:
    """Recomputation that runs to the end sees outputs of the same dtype as forward did."""
    model = build(Remembering)
    policy = MixedPrecisionPolicy(output_dtype=torch.float64)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    model.inp.double()
    model.out.double()
    plain = build(Remembering)
    plain.inp.double()
    plain.out.double()
    plain.blocks.register_module("0", Doubling(plain.blocks[0]))
    plain.blocks.register_module("1", Doubling(plain.blocks[1]))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda m, args: (args[0].float(),))
    fully_shard(model.inp)
    fully_shard(model.out)
    fully_shard(model)
    with set_checkpoint_early_stop(False):
        model(batch(0, context.rank).double()).pow(2).mean().backward()
    for rank in range(context.world_size):
        (plain(batch(0, rank).double()).pow(2).mean() / context.world_size).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=1e-5, atol=1e-6)
    return sorted({str(p.grad.dtype) for p in model.parameters()})


class Doubling(nn.Module):
    """Computes in float32 between float64."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x.float()).double()


def test_recomputation_to_the_end_casts_outputs_as_forward_did() -> None:
    assert agreed(_full_recompute, 2) == ["torch.float32", "torch.float64"]


def _sequences(context: RankContext) -> None:
    """Packed sequences are entered: their data is cast and watched."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(DIM, DIM)
            self.blocks = nn.ModuleList([nn.GRU(DIM, 5)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = pack_sequence([self.inp(x[:3]), self.inp(x[3:])])
            out, last = self.blocks[0](packed)
            return out.data.sum(0) + last.sum((0, 1))

    model, plain = shard_blocks(build(Recurrent)), build(Recurrent)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)


def _nested(context: RankContext) -> None:
    """Sequences of several lengths in one tensor, whose gradient comes to an end like any other."""

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        return module(rows).values().pow(2).mean()

    model, plain = (nn.Sequential(build(Residual), build(Residual)) for _ in range(2))
    for module in (*model, model):
        fully_shard(module)
    train_sharded(model, context.rank, loss=loss)
    train_plain(plain, context.world_size, loss=loss)
    compare(model, plain)


def test_nested_tensors_are_followed() -> None:
    on_ranks(_nested, 2)


def test_packed_sequences_are_followed() -> None:
    on_ranks(_sequences, 2)


class Guarded(nn.Module):
    """Counts what is registered on it."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["seen"] = []
        self.weight = nn.Parameter(torch.ones(DIM, DIM))

    def __setattr__(self, name: str, value: Any) -> None:
        self.seen.append(name)
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _own_setattr(context: RankContext) -> int:
    model = fully_shard(build(Guarded))
    model.seen.clear()
    out = model(batch(0, context.rank))
    torch.testing.assert_close(out, build(Guarded)(batch(0, context.rank)))
    return model.seen.count("weight")


def test_a_module_that_watches_its_attributes_is_asked() -> None:
    assert agreed(_own_setattr, 2) == 1


def _copied(context: RankContext) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))
    copied = copy.deepcopy(model[0])
    copied.load_state_dict({key: value * 0 for key, value in copied.state_dict().items()})
    assert not any(whole(param).any() for param in copied.parameters())
    assert all(whole(param).any() for param in model[0].parameters())
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(model)
    loss_of(model, batch(0, context.rank)).backward()


def test_a_module_inside_a_unit_may_be_copied() -> None:
    on_ranks(_copied, 2)


class Shift(nn.Module):
    """Hands the gradient of its output on as that of each input."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(DIM))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return sum(inputs) + self.by


def _begun_with_a_leaf(context: RankContext, *, count: int) -> None:
    model = fully_shard(Shift())
    inputs = [batch(k, context.rank).requires_grad_() for k in range(count)]
    weights = batch(0, 0).requires_grad_()
    torch.autograd.grad(model(*inputs), inputs, weights, create_graph=True)
    assert not weights._backward_hooks


@pytest.mark.parametrize("count", [1, 2])
def test_no_hook_stays_on_what_a_backward_was_begun_with(count: int) -> None:
    on_ranks(_begun_with_a_leaf, 2, count=count)


class Half(nn.Module):
    """Half of a pair that shares a layer with the other half."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(DIM, DIM)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.tanh(self.own(x)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(DIM, DIM)
        self.first, self.second = Half(shared), Half(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _shared_layer(context: RankContext, *, grouped: bool) -> list[str]:
    model, plain = build(Pair), build(Pair)
    if grouped:
        fully_shard([model.first, model.second])
    fully_shard(model)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    groups = [g for s in model._states(recurse=True) for g in s.groups]
    return [param.fqn for group in groups for param in group.fsdp_params]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_layer_below_two_modules_is_sharded_once(*, grouped: bool) -> None:
    names = agreed(_shared_layer, 2, grouped=grouped)
    layers = ["first.shared", "first.own", "second.own"]
    assert sorted(names) == sorted(f"{x}.{p}" for x in layers for p in ("weight", "bias"))


def _sparse(context: RankContext, *, held_back: bool) -> list[str]:
    model = fully_shard(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))
    model.set_requires_gradient_sync(not held_back)
    words = torch.arange(4)
    with torch.no_grad():
        model(words)
    return error_of(lambda: model(words).sum().backward())


@pytest.mark.parametrize("held_back", [False, True], ids=["reduced", "held_back"])
def test_a_sparse_gradient_is_named_on_every_rank(*, held_back: bool) -> None:
    errors = on_ranks(_sparse, 2, held_back=held_back)
    named_on_every_rank(errors, NotImplementedError, "does not reduce sparse gradients")
    named_on_every_rank(errors, NotImplementedError, "'0.weight'")
