"""The wrapper trains like `DistributedDataParallel`, and like no wrapper at all.

The models are those that PyTorch's own tests use. Beside them, on the same ranks and with the same
random numbers, runs a copy without a wrapper, whose gradients are averaged by hand, and a copy in
`DistributedDataParallel`; cases of the suite are compared with the unsharded oracle instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance.models import case
from conformance.models.fixtures import (
    AlwaysWrapNestedWrappedModule,
    MixtureOfExperts,
    NestedWrappedModule,
    NonUniformReqGradNWM,
    TestDummyModelUneven,
    TransformerWithSharedParams,
    keep,
)
from conformance.ranks import RankContext
from conformance.testing import Parity, assert_parity
from conformance.testing.place import standing
from fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, ShardingStrategy
from tests.fsdp.ranks import on_ranks

LONG = [pytest.param(world, marks=pytest.mark.long) for world in (3, 4)]
WORLDS = pytest.mark.parametrize("world", [1, 2, *LONG])
KINDS = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
STEPS = 2
CPU = torch.device("cpu")
PREFIX = "_fsdp_wrapped_module."

Wrap = Callable[[nn.Module], nn.Module]


def wrap(module: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "FSDP is switching")
        return FullyShardedDataParallel(module, **options)


# Models. Each takes the rank and what makes a unit, and gives the model; the root is left bare.


def transformer(rank: int, unit: Wrap) -> nn.Module:
    """A tied weight, batch norm, dropout, buffers of several dtypes."""
    return TransformerWithSharedParams(rank=rank, wrap=unit)


def nested(rank: int, unit: Wrap) -> nn.Module:
    return NestedWrappedModule(rank=rank, wrap=unit)


def always(rank: int, unit: Wrap) -> nn.Module:
    return AlwaysWrapNestedWrappedModule(rank=rank, wrap=unit)


def frozen_encoder(rank: int, unit: Wrap) -> nn.Module:
    """Units that are frozen as a whole, before units that train."""

    def freezing(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.TransformerEncoderLayer):
            module.requires_grad_(False)
        return unit(module)

    return TransformerWithSharedParams(rank=rank, wrap=freezing, add_bn=False)


def mostly_frozen(rank: int, unit: Wrap) -> nn.Module:
    """One unit holds both kinds of parameters."""
    return NonUniformReqGradNWM(rank=rank, wrap=unit)


def uneven(rank: int, unit: Wrap) -> nn.Module:
    """Sizes that no world divides."""
    return TestDummyModelUneven(rank=rank, wrap=unit)


MODELS: dict[str, Callable[[int, Wrap], nn.Module]] = {
    "transformer": transformer,
    "nested": nested,
    "always": always,
    "frozen_encoder": frozen_encoder,
    "uneven": uneven,
}


@dataclass(kw_only=True)
class Trained:
    """What one copy of a model went through."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    inputs: list[torch.Tensor]


def trained(
    model: nn.Module,
    parameters: Callable[[], Any],
    average: Callable[[], None],
    device: torch.device = CPU,
) -> Trained:
    """Train for some steps; `parameters` gives the whole ones by their bare names."""
    wrappers = (FullyShardedDataParallel, DistributedDataParallel)
    inner = model.module if isinstance(model, wrappers) else model
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9, weight_decay=0.1)
    losses, inputs = [], []
    for step in range(STEPS):
        given = [
            value.requires_grad_() if value.is_floating_point() else value
            for value in inner.get_input(device)
        ]
        torch.manual_seed(100 * step + dist.get_rank())  # dropout
        loss = inner.get_loss(given, model(*given)) / 10
        inner.run_backward(loss)
        average()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        inputs += [value.grad for value in given if value.grad is not None]
    return Trained(losses=losses, parameters=dict(parameters()), inputs=inputs)


def bare_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in model.named_parameters():
        yield name, param.detach().clone()


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for name, param in model.named_parameters():
            yield name.replace(PREFIX, ""), param.detach().clone()


def without_wrapper(make: Callable[[int, Wrap], nn.Module], device: torch.device = CPU) -> Trained:
    model = make(dist.get_rank(), keep).to(device)

    def average() -> None:
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()

    return trained(model, lambda: bare_parameters(model), average, device)


def with_ddp(make: Callable[[int, Wrap], nn.Module], device: torch.device = CPU) -> Trained:
    inner = make(dist.get_rank(), keep).to(device)
    # Statistics of batch norm are each rank's own here, as without a wrapper.
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    return trained(model, lambda: bare_parameters(inner), lambda: None, device)


def with_ours(
    make: Callable[[int, Wrap], nn.Module], device: torch.device = CPU, **options: Any
) -> Trained:
    if device != CPU:
        options["device_id"] = device
    model = wrap(make(dist.get_rank(), lambda module: wrap(module, **options)), **options)
    return trained(model, lambda: whole_parameters(model), lambda: None, device)


def same(ours: Trained, other: Trained, who: str) -> None:
    def close(got: Any, wanted: Any, what: str) -> None:
        torch.testing.assert_close(
            got, wanted, rtol=5e-6, atol=5e-6, msg=lambda m: f"{what} against {who}: {m}"
        )

    close(ours.losses, other.losses, "losses")
    assert list(ours.parameters) == list(other.parameters)
    for name, value in other.parameters.items():
        close(ours.parameters[name], value, name)
    assert len(ours.inputs) == len(other.inputs)
    for index, gradient in enumerate(other.inputs):
        close(ours.inputs[index], gradient, f"gradient of input {index}")


def moved(trained: Trained, make: Callable[[int, Wrap], nn.Module]) -> None:
    """Every parameter that requires a gradient was trained, and no other."""
    model = make(dist.get_rank(), keep)
    for name, param in model.named_parameters():
        changed = not torch.equal(trained.parameters[name].cpu(), param.detach())
        assert changed == param.requires_grad, name


def _parity(context: RankContext, name: str, *, original: bool, options: dict[str, Any]) -> None:
    make, device = MODELS[name], context.device
    ours = with_ours(make, device, use_orig_params=original, **options)
    same(ours, without_wrapper(make, device), "no wrapper")
    same(ours, with_ddp(make, device), "DistributedDataParallel")
    moved(ours, make)


@WORLDS
@KINDS
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_like_ddp_and_like_no_wrapper(name: str, world: int, *, original: bool) -> None:
    on_ranks(_parity, world, name=name, original=original, options={})


OPTIONS: dict[str, dict[str, Any]] = {
    "keep": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicas": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "ahead": {"forward_prefetch": True, "backward_prefetch": None},
}


@KINDS
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_trains_alike(name: str, options: dict[str, Any], *, original: bool) -> None:
    on_ranks(_parity, 2, name=name, original=original, options=options)


def _mixed(context: RankContext) -> None:
    """Only original parameters may differ in whether they train; flat ones refuse."""
    device = context.device
    ours = with_ours(mostly_frozen, device, use_orig_params=True)
    same(ours, without_wrapper(mostly_frozen, device), "no wrapper")
    same(ours, with_ddp(mostly_frozen, device), "DistributedDataParallel")
    moved(ours, mostly_frozen)
    with pytest.raises(ValueError, match="requires_grad"):
        with_ours(mostly_frozen, device)


@WORLDS
def test_frozen_and_trained_parameters_share_a_unit(world: int) -> None:
    on_ranks(_mixed, world)


# Mixture of experts: one unit's group is this rank alone


def _experts(context: RankContext, *, original: bool) -> None:
    options: dict[str, Any] = {"use_orig_params": original}
    device = context.device
    if device != CPU:
        options["device_id"] = device
    alone = [dist.new_group([rank]) for rank in range(context.world_size)][context.rank]

    def unit(module: nn.Module) -> nn.Module:
        return wrap(module, **options)

    def of_this_rank(module: nn.Module) -> nn.Module:
        return wrap(module, process_group=alone, **options)

    plain = MixtureOfExperts(rank=context.rank).to(device)
    wanted = trained(plain, lambda: bare_parameters(plain), lambda: None, device)
    inner = MixtureOfExperts(rank=context.rank, wrap=unit, wrap_expert=of_this_rank)
    model = wrap(inner, **options)
    ours = trained(model, lambda: whole_parameters(model), lambda: None, device)
    same(ours, wanted, "no wrapper")
    if context.world_size > 1:
        expert = ours.parameters["module.2.weight"]
        others = [torch.empty_like(expert) for _ in range(context.world_size)]
        dist.all_gather(others, expert)
        assert not torch.equal(others[0], others[1])


@WORLDS
@KINDS
def test_an_expert_stays_its_ranks_own(world: int, *, original: bool) -> None:
    on_ranks(_experts, world, original=original)


# The same on accelerators: one rank with one of them, two ranks with two


def on_accelerators(function: Callable[..., Any], world: int, **given: Any) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    on_ranks(function, world, device=accelerator.type, **given)


def needing(count: int) -> Any:
    short = torch.accelerator.device_count() < count
    return pytest.param(
        count, marks=pytest.mark.skipif(short, reason=f"needs accelerators: {count}")
    )


ACCELERATORS = pytest.mark.parametrize("world", [needing(1), needing(2)])


@ACCELERATORS
@KINDS
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_alike_on_accelerators(name: str, world: int, *, original: bool) -> None:
    on_accelerators(_parity, world, name=name, original=original, options={})


@ACCELERATORS
@KINDS
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_trains_alike_on_accelerators(
    name: str, options: dict[str, Any], world: int, *, original: bool
) -> None:
    on_accelerators(_parity, world, name=name, original=original, options=options)


@ACCELERATORS
def test_frozen_and_trained_parameters_share_a_unit_on_accelerators(world: int) -> None:
    on_accelerators(_mixed, world)


@ACCELERATORS
@KINDS
def test_an_expert_stays_its_ranks_own_on_accelerators(world: int, *, original: bool) -> None:
    on_accelerators(_experts, world, fresh=True, original=original)


# Cases of the suite, against the unsharded oracle


def _oracle(context: RankContext, name: str, variant: str, accumulation: int) -> None:
    how = Parity(accumulation=accumulation)
    with standing(context):
        assert_parity("fsdp.FullyShardedDataParallel", case(name), variant=variant, parity=how)


@WORLDS
@pytest.mark.parametrize("variant", ["default", "use_orig_params"])
@pytest.mark.parametrize("name", ["uneven", "tiny", "frozen"])
def test_it_trains_like_the_unsharded_oracle(name: str, variant: str, world: int) -> None:
    on_ranks(_oracle, world, name=name, variant=variant, accumulation=2)
