"""Parameters that choose what is gathered for them."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from conformance.ranks import RankContext
from fsdp import MixedPrecisionPolicy, fully_shard
from tests.fsdp.plain import DIM, batch, build, compare, loss_of, train_plain, train_sharded
from tests.fsdp.ranks import agreed
from tests.fsdp.test_training import shard_blocks


class Doubled(torch.Tensor):
    """Travels as two halves of its value in float64, whatever its own dtype."""

    seen: dict[str, Any] = {}  # noqa: RUF012 - what the last gather was given

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Doubled:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> Doubled:
        return Doubled(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = pytree.tree_map_only(
            cls, lambda t: t.inner, (args, kwargs or {})
        )
        out = func(*plain_args, **plain_kwargs)
        wrapped = pytree.tree_map_only(torch.Tensor, Doubled, out)
        return return_and_correct_aliasing(func, args, kwargs or {}, wrapped)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        Doubled.seen = {
            "mesh": (mesh.ndim, mesh.size()),
            "outer": (tuple(outer_size), tuple(outer_stride)),
            "module": type(module).__name__,
            "policy": mp_policy,
        }
        halves = self.inner.double() / 2
        return (halves, halves.clone()), "metadata"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == "metadata"
        total = (outputs[0] + outputs[1]).to(param_dtype)
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(total)
            return None
        return total, (total,)


def doubled(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Doubled(module.weight.detach()))
    return model


def _trains(context: RankContext, hidden: int) -> list[Any]:
    model = shard_blocks(doubled(build(hidden=hidden)))
    plain = build(hidden=hidden)
    out = model(batch(0, context.rank))
    torch.testing.assert_close(out, plain(batch(0, context.rank)))
    loss_of(model, batch(0, context.rank)).backward()
    for rank in range(context.world_size):
        (loss_of(plain, batch(0, rank)) / context.world_size).backward()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = got.grad.full_tensor()
        grad = grad.inner if isinstance(grad, Doubled) else grad
        torch.testing.assert_close(grad, want.grad, rtol=1e-5, atol=1e-6, msg=name)
    seen = Doubled.seen
    gathers = [r for r in context.recorder.records if r.op == "all_gather" and "8" in r.dtype]
    return [
        seen["mesh"],
        seen["module"],
        seen["policy"] == MixedPrecisionPolicy(),
        len(gathers) > 0,
    ]


@pytest.mark.parametrize("hidden", [12, 13], ids=["even", "uneven"])
def test_a_tensor_subclass_chooses_what_travels(hidden: int) -> None:
    assert agreed(_trains, 2, hidden=hidden) == [[1, 2], "Linear", True, True]


def _patched(context: RankContext) -> list[int]:
    """The methods are put on the local tensors after sharding."""
    model, plain = shard_blocks(build(hidden=12)), build(hidden=12)
    calls = {"before": 0, "after": 0}

    def before(self: torch.Tensor, mesh: Any) -> Any:
        calls["before"] += 1
        return (self.detach().clone(),), None

    def after(self: torch.Tensor, outs: Any, meta: Any, dtype: Any, *, out: Any = None) -> Any:
        calls["after"] += 1
        return None if out is not None else (outs[0], ())

    local = model.blocks[0].up.weight._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(before, local)
    local.fsdp_post_all_gather = types.MethodType(after, local)
    train_sharded(model, context.rank, steps=2)
    train_plain(plain, context.world_size, steps=2)
    compare(model, plain)
    return [calls["before"], calls["after"]]


@pytest.mark.parametrize("world", [1, 2])
def test_methods_may_be_patched_on_after_sharding(world: int) -> None:
    # Two gathers of the block in each of two steps.
    assert agreed(_patched, world) == [4, 4]


def _alone(context: RankContext) -> list[Any]:
    """A group of nothing else, with fewer rows than ranks: some ranks send no row of their own."""
    model, plain = nn.Linear(DIM, 2, bias=False), nn.Linear(DIM, 2, bias=False)
    torch.manual_seed(0)
    nn.init.normal_(plain.weight)
    model.weight = nn.Parameter(Doubled(plain.weight.detach().clone()))
    fully_shard(model)
    for step in range(2):
        x = batch(step, context.rank)
        torch.testing.assert_close(model(x), plain(x))
        loss_of(model, x).backward()
        for rank in range(context.world_size):
            (loss_of(plain, batch(step, rank)) / context.world_size).backward()
    grad = model.weight.grad.full_tensor()
    grad = grad.inner if isinstance(grad, Doubled) else grad
    torch.testing.assert_close(grad, plain.weight.grad, rtol=1e-5, atol=1e-6)
    return [fully_shard.state(model).groups[0].shard.layout.total_numel]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_group_may_consist_of_extended_parameters_alone(world: int) -> None:
    assert agreed(_alone, world) == [0]


def _half(context: RankContext) -> str:
    module = fully_shard(nn.Linear(DIM, DIM))
    module.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None
    try:
        module(batch(0, 0))
    except AssertionError as error:
        return str(error)
    return ""


def test_one_of_the_two_methods_is_not_enough() -> None:
    assert "Both fsdp_pre_all_gather and fsdp_post_all_gather" in agreed(_half, 2)


def _signature(context: RankContext) -> str:
    module = fully_shard(nn.Linear(DIM, DIM))
    local = module.weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh, size: None
    local.fsdp_post_all_gather = lambda *args: None
    try:
        module(batch(0, 0))
    except AssertionError as error:
        return str(error)
    return ""


def test_another_signature_is_refused() -> None:
    assert "Invalid fsdp_pre_all_gather of 'weight'" in agreed(_signature, 2)
