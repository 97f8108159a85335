"""State dicts, checkpoints, initialisation and replacement of parameters, recovery."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils.checkpoint import checkpoint

from conformance.ranks import RankContext
from fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from fsdp.engine.param import ShardedState
from tests.fsdp.plain import (
    DIM,
    Stack,
    batch,
    build,
    compare,
    loss_of,
    optimizer_of,
    train_plain,
    train_sharded,
    whole,
)
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_training import shard_blocks


def _class_swap(context: RankContext) -> list[Any]:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    piece = model[:1]
    again = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    return [
        type(model).__name__,
        isinstance(model, FSDPModule) and isinstance(model, nn.Sequential),
        type(piece).__name__,
        type(again) is type(model),
        type(model[0]).__name__,
    ]


def test_the_class_is_swapped_and_slices_are_plain() -> None:
    wanted = ["FSDPSequential", True, "Sequential", True, "Linear"]
    assert agreed(_class_swap, 2) == wanted


def _parameters(context: RankContext) -> bool:
    mesh = init_device_mesh("cpu", (context.world_size,))
    model, plain = shard_blocks(build(), mesh=mesh), build()
    plain.inp.weight.requires_grad_(False)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        reference = distribute_tensor(want.detach(), mesh, [Shard(0)])
        assert isinstance(got, nn.Parameter)
        assert got.placements == reference.placements
        assert got.shape == want.shape
        assert got.stride() == want.stride()
        assert torch.equal(got.to_local(), reference.to_local())
    return True


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_parameters_equal_distribute_tensor(world: int) -> None:
    on_ranks(_parameters, world)


def _save_points(context: RankContext, when: str) -> list[str]:
    model = shard_blocks(build())
    if when != "before":
        loss = loss_of(model, batch(0, context.rank))
    if when == "after_backward":
        loss.backward()
    saved = model.state_dict()
    assert all(isinstance(v, DTensor) for k, v in saved.items() if k != "scale")
    fresh = shard_blocks(build(hidden=13))
    for param in fresh.parameters():
        nn.init.zeros_(param)
    fresh.load_state_dict(saved)
    compare(fresh, build())
    if when == "after_forward":
        loss.backward()  # saving has not disturbed the pass
        plain = build()
        for rank in range(context.world_size):
            (loss_of(plain, batch(0, rank)) / context.world_size).backward()
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(got.grad), want.grad, rtol=1e-5, atol=1e-6)
    return list(saved)


@pytest.mark.parametrize("when", ["before", "after_forward", "after_backward"])
def test_a_state_dict_is_the_same_at_any_point(when: str) -> None:
    assert agreed(_save_points, 2, when=when) == list(build().state_dict())


def _assign(context: RankContext) -> None:
    saved = shard_blocks(build()).state_dict()
    model = Stack().to("meta")
    shard_blocks(model)
    model.load_state_dict(saved, assign=True)
    train_sharded(model, context.rank)
    plain = build()
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_an_assigned_state_dict_is_adopted() -> None:
    on_ranks(_assign, 3)


def _shares_memory(context: RankContext) -> bool:
    model = shard_blocks(build())
    saved = model.state_dict()
    with torch.no_grad():
        model.out.weight.add_(1.0)
    return torch.equal(saved["out.weight"].to_local(), model.out.weight.to_local())


def test_a_state_dict_shares_memory_with_the_parameters() -> None:
    assert agreed(_shares_memory, 2) is True


def _storages(context: RankContext) -> list[tuple[int, ...]]:
    """What each parameter and each entry of a state is in bytes, and the storages behind it."""
    model = shard_blocks(build(Stack, hidden=2))  # the last of three ranks has no row of some
    found = []
    for tensor in [*model.parameters(), *get_model_state_dict(model).values()]:
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            found.append((local.nbytes, local.untyped_storage().nbytes(), tensor.storage_offset()))
    return found


def test_a_parameter_has_a_storage_of_its_own_in_the_memory_of_its_unit() -> None:
    """Views of one are saved and copied with all of it, and for DTensors not compiled at all."""
    for found in on_ranks(_storages, 3):
        assert all(held == nbytes and offset == 0 for nbytes, held, offset in found)


def _share(params: list[nn.Parameter]) -> None:
    for param in params:
        local = param.detach().to_local()  # type: ignore[attr-defined]
        local.share_memory_()  # as sending it to another process does


def _shared(context: RankContext, *, offloaded: bool) -> None:
    options = {"offload_policy": CPUOffloadPolicy()} if offloaded else {}
    model, plain = shard_blocks(build(), **options), build()
    for _ in range(2):
        train_sharded(model, context.rank, steps=2)
        train_plain(plain, context.world_size, steps=2)
        _share(list(model.parameters()))
    compare(model, plain)


@pytest.mark.parametrize("offloaded", [False, True])
def test_training_goes_on_after_parameters_were_shared(*, offloaded: bool) -> None:
    """Which moves storages of the host: no gather may read where the parameters were."""
    on_ranks(_shared, 3, offloaded=offloaded)


def _shared_between(context: RankContext) -> None:
    model, plain = shard_blocks(build(), reshard_after_forward=2), build()
    sharded = list(model.parameters())

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = loss_of(module, x)
        _share(sharded)
        return found

    train_sharded(model, context.rank, loss=loss)
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_parameters_may_be_shared_while_parts_of_them_are_kept() -> None:
    """The backward reads the parts."""
    on_ranks(_shared_between, 4)


def _fake(context: RankContext) -> list[list[Any]]:
    mesh = init_device_mesh("cpu", (context.world_size,))
    with FakeTensorMode():
        model = build()
        fully_shard(model, mesh=mesh)
        saved = model.state_dict()
    sharded = {name: value for name, value in saved.items() if isinstance(value, DTensor)}
    found = [(name, value.to_local()) for name, value in sharded.items()]
    return [[name, list(local.shape), local.device.type] for name, local in found]


def test_a_model_of_fake_tensors_is_sharded_as_one_of_tensors() -> None:
    """As tools do that tell how much memory a model would take."""
    whole = [(name, list(param.shape)) for name, param in build().named_parameters()]
    wanted = [[name, [(rows + 1) // 2, *rest], "cpu"] for name, (rows, *rest) in whole]
    assert on_ranks(_fake, 2)[0] == wanted


def _fake_steps(context: RankContext) -> list[Any]:
    mesh = init_device_mesh("cpu", (context.world_size,))
    before = len(context.recorder.records)
    torch.set_warn_always(True)  # of what fake tensors are asked: kept ranks may have been warned
    try:
        with warnings.catch_warnings(), FakeTensorMode():
            warnings.simplefilter("error")
            model = shard_blocks(build(), mesh=mesh)
            optimizer = optimizer_of(model.parameters())
            for _ in range(2):
                loss_of(model, torch.randn(4, DIM)).backward()
                shapes = {
                    name: list(p.grad.to_local().shape) for name, p in model.named_parameters()
                }
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.set_warn_always(False)
    assert len(context.recorder.records) == before, "something was sent"
    after, plain = shard_blocks(build()), build()  # and nothing fake is left behind
    train_sharded(after, context.rank)
    train_plain(plain, context.world_size)
    compare(after, plain)
    return [shapes, {name: list(p.to_local().shape) for name, p in after.named_parameters()}]


def test_a_model_of_fake_tensors_is_trained() -> None:
    """Without values, which ranks can neither exchange nor compare."""
    for shapes, wanted in on_ranks(_fake_steps, 2):
        assert shapes == wanted


def _saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


COPIES: dict[str, Callable[[Any], Any]] = {
    "torch.save": _saved_and_loaded,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
}


def _copied(context: RankContext, how: str) -> None:
    model = shard_blocks(build())
    train_sharded(model, context.rank)
    copied = COPIES[how](model.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # the copy has memory of its own
    model.load_state_dict(copied)
    plain = build()
    train_plain(plain, context.world_size)
    compare(model, plain)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("world", [2, 3])
def test_a_state_dict_can_be_saved_and_copied(world: int, how: str) -> None:
    on_ranks(_copied, world, how=how)


OBJECTS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "sharded": lambda model: dict(model.named_parameters()),
    "whole": lambda model: (model.unshard(), dict(model.out.named_parameters()))[1],
    "keep_vars": lambda model: model.state_dict(keep_vars=True),
}


def _objects(context: RankContext, *, what: str) -> None:
    model = shard_blocks(build())
    train_sharded(model, context.rank)
    saved = OBJECTS[what](model)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    assert get_unsafe_globals_in_checkpoint(file) == []
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(loaded) == list(saved)
    for name, value in saved.items():
        assert type(loaded[name]) is type(value)
        torch.testing.assert_close(whole(loaded[name]), whole(value), rtol=0, atol=0)
    with torch.no_grad():
        loaded["out.weight" if what != "whole" else "weight"].zero_()  # memory of its own
    # An optimizer takes them for what they are: tensors of nobody's.
    optimizer_of([p for p in loaded.values() if isinstance(p, nn.Parameter)]).step()


@pytest.mark.parametrize("what", OBJECTS)
def test_parameters_themselves_can_be_saved_and_loaded_without_trust(what: str) -> None:
    on_ranks(_objects, 2, what=what)


def _checkpoint(context: RankContext) -> None:
    model, plain = shard_blocks(build()), build()
    optimizer = optimizer_of(model.parameters())
    loss_of(model, batch(0, context.rank)).backward()
    optimizer.step()
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=str(context.directory / "checkpoint"))
    fresh = shard_blocks(build())
    fresh_optimizer = optimizer_of(fresh.parameters())
    state = {
        "model": get_model_state_dict(fresh),
        "optim": get_optimizer_state_dict(fresh, fresh_optimizer),
    }
    dcp.load(state, checkpoint_id=str(context.directory / "checkpoint"))
    set_model_state_dict(fresh, state["model"])
    set_optimizer_state_dict(fresh, fresh_optimizer, state["optim"])
    fresh_optimizer.zero_grad()
    loss_of(fresh, batch(1, context.rank)).backward()
    fresh_optimizer.step()
    plain_optimizer = optimizer_of(plain.parameters())
    for step in range(2):
        for rank in range(context.world_size):
            (loss_of(plain, batch(step, rank)) / context.world_size).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    compare(fresh, plain)


def test_training_goes_on_from_a_distributed_checkpoint() -> None:
    on_ranks(_checkpoint, 2)


def _full_dict(context: RankContext) -> list[int]:
    model = shard_blocks(build())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if context.rank == 0:
        for name, want in build().state_dict().items():
            assert torch.equal(full[name], want), name
    other = shard_blocks(build())
    for param in other.parameters():
        nn.init.zeros_(param)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full, options=options)
    compare(other, build())
    return [len(full)]


def test_a_full_state_dict_is_gathered_and_scattered() -> None:
    assert on_ranks(_full_dict, 2) == ([15], [0])


def _meta(context: RankContext) -> None:
    with torch.device("meta"):
        model = Stack()
    shard_blocks(model)
    model.to_empty(device="cpu")
    plain = build()
    wanted = dict(plain.state_dict())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, DTensor):
                tensor.copy_(distribute_tensor(wanted[name], tensor.device_mesh, tensor.placements))
            else:
                tensor.copy_(wanted[name])
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_a_model_may_start_on_meta() -> None:
    on_ranks(_meta, 3)


def _replace(context: RankContext) -> None:
    model, plain = shard_blocks(build()), build()
    old = model.out.weight
    value = torch.full(old.shape, 0.25)
    model.out.weight = nn.Parameter(distribute_tensor(value, old.device_mesh, old.placements))
    plain.out.weight.data.copy_(value)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_a_parameter_replaced_before_the_first_forward_is_used() -> None:
    on_ranks(_replace, 2)


def _to_float64(context: RankContext, *, trained: bool) -> str:
    model, plain = shard_blocks(build()), build()
    if trained:
        train_sharded(model, context.rank, steps=1)
        train_plain(plain, context.world_size, steps=1)
    model.to(torch.float64)
    plain.to(torch.float64)

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x.double()).pow(2).mean()

    train_sharded(model, context.rank, loss=loss)
    train_plain(plain, context.world_size, loss=loss)
    compare(model, plain)
    return str(model.inp.weight.dtype)


@pytest.mark.parametrize("trained", [False, True])
def test_a_cast_after_sharding_changes_the_compute_dtype(*, trained: bool) -> None:
    assert agreed(_to_float64, 2, trained=trained) == "torch.float64"


def _no_grad_first(context: RankContext, mode: str) -> None:
    model, plain = shard_blocks(build()), build()
    guard = {"no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    model.eval()
    with guard():
        got = model(batch(5, context.rank))
    assert torch.equal(got, plain(batch(5, context.rank)))
    model.train()
    model.reshard()  # no backward did it
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_evaluation_may_come_first(mode: str) -> None:
    on_ranks(_no_grad_first, 2, mode=mode)


def _inference_keeps_a_part(context: RankContext) -> str:
    model, plain = shard_blocks(build(), reshard_after_forward=2), build()
    with torch.inference_mode():
        model(batch(5, context.rank))
    too_early = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="kept over a smaller mesh") as refused:
        too_early.step()
    for module in (model, *model.blocks):
        module.reshard()
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return str(refused.value)


def test_after_inference_a_kept_part_is_gathered_and_no_optimizer_takes_it() -> None:
    assert agreed(_inference_keeps_a_part, 4) == (
        "SGD holds 14 parameters that were kept over a smaller mesh when it was made (inp.weight, "
        "inp.bias, blocks.0.up.weight, ...): its steps would change nothing. Make the optimizer "
        "over the sharded parameters, after sharding."
    )


class Fragile(Stack):
    """Raises where it is told to."""

    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inp(x))
        if self.where == "forward":
            raise RuntimeError("on purpose")
        if self.where == "backward":
            x = _Fails.apply(x)
        return self.out(self.blocks[1](x)) * self.scale


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")


def _recovers(context: RankContext, *, where: str, reset: bool) -> bool:
    model, plain = shard_blocks(build(Fragile)), build(Fragile)
    train_sharded(model, context.rank, steps=1)
    train_plain(plain, context.world_size, steps=1)
    model.where = where
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(model, batch(9, context.rank)).backward()
    model.where = ""
    if reset:
        model.reset_iter_state()
        groups = [g for s in fully_shard.state(model).context.all_states for g in s.groups]
        assert all(g.sharded_state is ShardedState.SHARDED for g in groups)
        assert all(p.grad is None for p in model.parameters())
    else:
        model(batch(9, context.rank))  # a forward alone must heal it
        model.reshard()
    model.zero_grad()
    train_sharded(model, context.rank, steps=2)
    train_plain(plain, context.world_size, steps=2)
    compare(model, plain)
    return True


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reset", [False, True], ids=["by_itself", "by_reset"])
def test_an_exception_leaves_a_usable_model(*, where: str, reset: bool) -> None:
    on_ranks(_recovers, 2, where=where, reset=reset)


class Remembering(Stack):
    """Recomputes its blocks in backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x) * self.scale


class Inner(nn.Module):
    """Recomputes its own inside."""

    reentrant = False

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def _recompute(context: RankContext, *, where: str, reentrant: bool) -> None:
    def make() -> nn.Module:
        model = build(Remembering if where == "outside" else Stack)
        model.reentrant = reentrant
        if where == "inside":
            model.blocks = nn.ModuleList(Inner(block) for block in model.blocks)
            for block in model.blocks:
                block.reentrant = reentrant
        return model

    model, plain = shard_blocks(make()), make()
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(*, where: str, reentrant: bool) -> None:
    on_ranks(_recompute, 2, where=where, reentrant=reentrant)


def _hooks(context: RankContext) -> list[Any]:
    """The optimizer runs inside backward, once per parameter."""
    model, plain = shard_blocks(build()), build()
    calls: dict[str, int] = {}
    steps = {}
    for name, param in model.named_parameters():
        steps[name] = torch.optim.SGD([param], lr=0.1)

        def hook(tensor: torch.Tensor, name: str = name) -> None:
            calls[name] = calls.get(name, 0) + 1
            steps[name].step()
            steps[name].zero_grad()

        param.register_post_accumulate_grad_hook(hook)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, batch(step, context.rank)).backward()
        for rank in range(context.world_size):
            (loss_of(plain, batch(step, rank)) / context.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    compare(model, plain)
    return [*sorted(set(calls.values())), len(calls)]


def test_an_optimizer_may_run_inside_backward() -> None:
    assert agreed(_hooks, 2) == [2, 14]


def _clip(context: RankContext) -> None:
    model, plain = shard_blocks(build()), build()
    loss_of(model, batch(0, context.rank)).backward()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    for norm_type in (2.0, float("inf")):
        got = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        want = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)
        torch.testing.assert_close(whole(got), want, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("world", [2, 3])
def test_gradient_clipping_sees_the_whole_norm(world: int) -> None:
    on_ranks(_clip, world)


@dataclasses.dataclass
class Bundle:
    value: torch.Tensor
    note: str


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.other = nn.Linear(DIM, DIM)

    def forward(self, bundle: Bundle, *, extra: dict[str, Any]) -> dict[str, Any]:
        return {"a": [self.linear(bundle.value)], "b": Bundle(self.other(extra["x"]), bundle.note)}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Nested()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        out = self.blocks[0](Bundle(x, "note"), extra={"x": x * 2, "none": None})
        assert out["b"].note == "note"
        return out["a"][0] + out["b"].value


def _nested(context: RankContext) -> list[str]:
    model, plain = shard_blocks(build(Outer)), build(Outer)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return [r.module or "" for r in context.recorder.records if r.op == "reduce_scatter"][:2]


def test_tensors_inside_containers_are_followed() -> None:
    on_ranks(_nested, 2)


def _ignored(context: RankContext) -> list[Any]:
    model = build()
    kept = model.blocks[0].up.weight
    dist.broadcast(kept.detach(), 0)
    shard_blocks(model, ignored_params={kept})
    loss_of(model, batch(0, context.rank)).backward()
    plain = build()
    loss_of(plain, batch(0, context.rank)).backward()
    same = torch.allclose(kept.grad, plain.blocks[0].up.weight.grad, atol=1e-6)
    return [model.blocks[0].up.weight is kept, same, isinstance(model.blocks[0].up.bias, DTensor)]


def test_ignored_parameters_are_left_alone() -> None:
    assert agreed(_ignored, 2) == [True, True, True]


def _buffers_of_reductions(context: RankContext) -> int:
    model, plain = shard_blocks(build()), build()
    model.set_reduce_scatter_max_input_buffers(3)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return fully_shard.state(model).comm().max_input_buffers


def test_several_reductions_may_be_in_flight() -> None:
    assert agreed(_buffers_of_reductions, 2) == 3


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, 1)
        self.b = nn.Linear(DIM, 1)
        self.use = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.use)(x)


def _choice(context: RankContext) -> None:
    model, plain = fully_shard(build(Choice)), build(Choice)
    model.set_reduce_scatter_unused_params(True)
    model.use = "ab"[context.rank]
    model(batch(0, context.rank)).sum().backward()
    for rank in range(2):
        plain.use = "ab"[rank]
        (plain(batch(0, rank)).sum() / 2).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad)


def test_ranks_may_use_different_parameters_if_unused_ones_count_as_zero() -> None:
    on_ranks(_choice, 2)


def _gradient_inside_forward(context: RankContext) -> None:
    """A backward through an inner unit, while the root's forward still runs."""

    class Penalty(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.blocks[0](x).pow(2).mean().backward()
            return super().forward(x)

    torch.manual_seed(7)
    model = shard_blocks(Penalty())
    torch.manual_seed(7)
    plain = Penalty()
    loss_of(model, batch(0, context.rank)).backward()
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for rank in range(context.world_size):
        plain.zero_grad()
        loss_of(plain, batch(0, rank)).backward()
        for sum_, param in zip(total, plain.parameters(), strict=True):
            sum_ += param.grad / context.world_size
    for got, want in zip(model.parameters(), total, strict=True):
        torch.testing.assert_close(whole(got.grad), want, rtol=1e-5, atol=1e-6)


def test_backward_may_run_inside_a_forward() -> None:
    on_ranks(_gradient_inside_forward, 2)


def _parametrized(context: RankContext) -> None:
    def make() -> nn.Module:
        model = build()
        nn.utils.parametrizations.weight_norm(model.inp)
        return model

    model, plain = shard_blocks(make()), make()
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)


def test_parametrizations_are_sharded_like_other_modules() -> None:
    on_ranks(_parametrized, 2)


def _mixed_dtypes(context: RankContext) -> list[Any]:
    """Frozen integers and other dtypes travel in the same collective, as bytes."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.table = nn.Parameter(torch.arange(7), requires_grad=False)
            self.small = nn.Parameter(torch.ones(5, dtype=torch.float16), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.table.sum() + self.small.float().sum()

    torch.manual_seed(0)
    plain = Mixed()
    torch.manual_seed(0)
    model = fully_shard(Mixed())
    x = batch(0, context.rank)
    assert torch.equal(model(x), plain(x))
    loss_of(model, x).backward()
    gathers = [r for r in context.recorder.records if r.op == "all_gather"]
    return [
        gathers[-1].dtype,
        model.table.dtype is torch.int64,
        model.small.full_tensor().sum().item(),
    ]


def test_a_group_of_several_dtypes_uses_one_gather() -> None:
    values = on_ranks(_mixed_dtypes, 2)
    assert values[0] == values[1]
    assert values[0][1:] == [True, 5.0]
