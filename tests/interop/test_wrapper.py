"""Ours and torch's ``FullyShardedDataParallel`` are exchangeable: same bits, names and policies."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap

from conformance.ranks import RankContext
from fsdp import wrap as our_wrap
from fsdp import wrapper as our_wrapper
from fsdp import wrapper_options as our_options
from tests.fsdp.plain import Residual, batch, build, loss_of, optimizer_of
from tests.fsdp.ranks import agreed


class Ours:
    """The public names of this package, by the names of torch's."""

    wrap = our_wrap
    FSDP = our_wrapper.FullyShardedDataParallel
    ShardingStrategy = our_options.ShardingStrategy
    BackwardPrefetch = our_options.BackwardPrefetch
    MixedPrecision = our_options.MixedPrecision
    CPUOffload = our_options.CPUOffload


class Theirs:
    """Torch's."""

    wrap = torch_wrap
    FSDP = torch_fsdp.FullyShardedDataParallel
    ShardingStrategy = torch_fsdp.ShardingStrategy
    BackwardPrefetch = torch_fsdp.BackwardPrefetch
    MixedPrecision = torch_fsdp.MixedPrecision
    CPUOffload = torch_fsdp.CPUOffload


def _options(package: Any, variant: str) -> dict[str, Any]:
    return {
        "default": {},
        "keep": {"sharding_strategy": package.ShardingStrategy.SHARD_GRAD_OP},
        "replicas": {"sharding_strategy": package.ShardingStrategy.NO_SHARD},
        "post": {"backward_prefetch": package.BackwardPrefetch.BACKWARD_POST},
        "no_prefetch": {"backward_prefetch": None, "forward_prefetch": True},
        "bf16": {
            "mixed_precision": package.MixedPrecision(
                param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
            )
        },
        "bf16_reduced_in_float32": {
            "mixed_precision": package.MixedPrecision(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=True,
            )
        },
    }[variant]


def _make(package: Any, variant: str, *, original: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return package.FSDP(
            build(),
            device_id=torch.device("cpu"),
            auto_wrap_policy=package.wrap.ModuleWrapPolicy({Residual}),
            use_orig_params=original,
            **_options(package, variant),
        )


def _train(package: Any, rank: int, variant: str, *, original: bool, micro: int) -> list[Any]:
    model = _make(package, variant, original=original)
    names = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    optimizer = optimizer_of(model.parameters())
    found: list[Any] = [names]
    for step in range(3):
        for part in range(micro):
            if part < micro - 1:
                with model.no_sync():
                    loss_of(model, batch(step, rank, part)).backward()
            else:
                loss = loss_of(model, batch(step, rank, part))
                loss.backward()
        found.append(loss.item())
        found.append(model.clip_grad_norm_(0.5, (2.0, 1.0, float("inf"))[step]).item())
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    found.append({key: value.tolist() for key, value in state.items()})
    found.append({key: str(value.dtype) for key, value in state.items()})
    return found


def _same(context: RankContext, variant: str, *, original: bool, micro: int) -> list[bool]:
    ours, theirs = (
        _train(package, context.rank, variant, original=original, micro=micro)
        for package in (Ours, Theirs)
    )
    return [a == b for a, b in zip(ours, theirs, strict=True)]


VARIANTS = (
    "default",
    "keep",
    "replicas",
    "post",
    "no_prefetch",
    "bf16",
    "bf16_reduced_in_float32",
)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_losses_norms_and_states_are_the_same_bits(variant: str, *, original: bool) -> None:
    assert all(agreed(_same, 2, variant=variant, original=original, micro=1))


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_accumulation_gives_the_same_bits(*, original: bool) -> None:
    assert all(agreed(_same, 2, variant="default", original=original, micro=2))


def tree() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 5),
        nn.ModuleList([nn.Linear(5, 5), nn.Linear(3, 3)]),
        nn.Sequential(nn.Linear(5, 5), nn.ReLU()),
        nn.MultiheadAttention(4, 2),
    )


class Box(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("always_wrap_policy", {}),
        *[("size_based_auto_wrap_policy", {"min_num_params": n}) for n in (10, 12, 30, 31, 80)],
        ("size_based_auto_wrap_policy", {"min_num_params": 10, "force_leaf_modules": set()}),
        ("size_based_auto_wrap_policy", {"min_num_params": 31, "exclude_wrap_modules": set()}),
        ("transformer_auto_wrap_policy", {"transformer_layer_cls": {nn.Linear}}),
        ("lambda_auto_wrap_policy", {"lambda_fn": lambda m: isinstance(m, nn.ReLU)}),
    ],
)
def test_policies_wrap_the_same_modules(name: str, arguments: dict[str, Any]) -> None:
    ours, theirs = tree(), tree()
    ours_policy = functools.partial(getattr(our_wrap, name), **arguments)
    targets = our_wrap.choose_targets(
        ours, ours_policy, {}, ignored_modules=set(), ignored_params=set()
    )
    our_wrap.replace_targets(ours, targets, Box)
    torch_wrap._recursive_wrap(
        theirs,
        auto_wrap_policy=functools.partial(getattr(torch_wrap, name), **arguments),
        wrapper_cls=Box,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
