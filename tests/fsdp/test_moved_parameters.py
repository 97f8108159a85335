"""Memory behind sharded parameters is swapped, shared or freed: what is there trains on, or errors.

Of one parameter, or of the module, in ways that change neither its name nor its object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from conformance.ranks import RankContext
from fsdp import fully_shard
from fsdp.flat_parameter import FlatParameter
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import batch, build, compare, train_plain, train_sharded
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks
from tests.fsdp.test_training import shard_blocks
from tests.fsdp.test_wrapper import agrees, wrapped

FACES = pytest.mark.parametrize("face", ["fully", "flat", "original"])
WRAPPERS = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])


def made(face: str) -> nn.Module:
    return shard_blocks(build()) if face == "fully" else wrapped(use_orig_params=face == "original")


def equal(model: nn.Module, plain: nn.Module) -> None:
    (agrees if isinstance(model, FSDP) else compare)(model, plain)


def groups_of(model: nn.Module) -> list[Any]:
    if isinstance(model, FSDP):
        return [group for unit in FSDP.fsdp_modules(model) for group in unit._state.groups]
    units = (fully_shard.state(module) for module in model.modules())  # type: ignore[attr-defined]
    return [group for unit in units if unit is not None for group in unit.groups]


def stays(model: nn.Module) -> bool:
    """Whether every group finds its parameters where it has put them."""
    groups = groups_of(model)
    assert len(groups) == 3
    return not any(group.options.exposure.changed(group.shard.plain) for group in groups)


def local_of(param: torch.Tensor) -> torch.Tensor:
    return param.detach().to_local() if isinstance(param, DTensor) else param.data


# Swapped


def _swapped(context: RankContext, *, face: str, once: bool) -> None:
    """Before training, and while it goes on with the optimizer's moments."""
    model, plain = made(face), build()
    for _ in range(2):
        if once:
            train_sharded(model, context.rank)
            train_plain(plain, context.world_size)
        for param in model.parameters():
            torch.utils.swap_tensors(param, nn.Parameter(param.detach() * 0.5))
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(0.5)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    equal(model, plain)
    assert stays(model)
    assert face != "flat" or all(isinstance(p, FlatParameter) for p in model.parameters())


@pytest.mark.parametrize("once", [False, True], ids=["fresh", "trained"])
@FACES
def test_what_was_swapped_into_a_parameter_is_trained(face: str, *, once: bool) -> None:
    """As torch does when a module is moved under ``set_swap_module_params_on_conversion``."""
    on_ranks(_swapped, 2, face=face, once=once)


def _inner(context: RankContext, *, face: str) -> None:
    """Of a module inside a unit, whose methods are torch's own."""
    model, plain = made(face), build()
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    inner = model.module.out if isinstance(model, FSDP) else model.out
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        inner._apply(lambda tensor: tensor * 0.5)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.no_grad():
        for param in plain.out.parameters():
            param.mul_(0.5)
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    equal(model, plain)


@pytest.mark.parametrize("face", ["fully", "original"])
def test_a_conversion_of_a_module_inside_a_unit_is_seen(face: str) -> None:
    on_ranks(_inner, 2, face=face)


def _plain(context: RankContext) -> list[str]:
    model = made("fully")
    train_sharded(model, context.rank)
    # Of the same class, or torch refuses: the slots of a DTensor are not those of a plain tensor.
    param = model.out.weight
    other = nn.Parameter(DTensor.from_local(torch.ones(3, 10), param.device_mesh))
    torch.utils.swap_tensors(param, other)
    return error_of(lambda: model(batch(0, 0)))


def test_what_is_no_part_of_the_parameter_is_refused_by_name() -> None:
    errors = on_ranks(_plain, 2)
    named_on_every_rank(errors, ValueError, "parameter 'out.weight' was replaced after sharding")


# Shared with other processes


def _shares(context: RankContext, *, original: bool) -> None:
    model, plain = made("original" if original else "flat"), build()
    for _ in range(2):
        model.share_memory()
        assert all(param.is_shared() for param in model.parameters())
        train_sharded(model, context.rank)
        train_plain(plain, context.world_size)
        assert all(param.is_shared() for param in model.parameters())
        assert stays(model)
    equal(model, plain)


@WRAPPERS
def test_a_wrapped_module_is_shared_and_trains_on(*, original: bool) -> None:
    on_ranks(_shares, 2, original=original)


SHARING: dict[str, Callable[[nn.Module], object]] = {
    "root": lambda model: model.share_memory(),
    "unit": lambda model: model.blocks[0].share_memory(),
    "around": lambda model: nn.Sequential(model).share_memory(),
    "inside": lambda model: model.out.share_memory(),
    "parameter": lambda model: model.out.weight.share_memory_(),
    "whole": lambda model: _evaluate_and_share(model),
    "swapped": lambda model: _swap_and_share(model),
}


def _evaluate_and_share(model: nn.Module) -> None:
    """The root stays whole after a forward, and its memory must be freed."""
    with torch.no_grad():
        model(batch(0, 0))
    model.out.share_memory()


def _swap_and_share(model: nn.Module) -> None:
    """A parameter that lost its attributes has them again as soon as the swap was seen."""
    for param in model.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))
    with torch.no_grad():
        model(batch(0, 0))
    model.reshard()
    model.out.share_memory()


def _refuses(context: RankContext, *, way: str) -> list[str]:
    model, plain = made("fully"), build()
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    error = error_of(lambda: SHARING[way](model))
    assert not any(local_of(param).is_shared() for param in model.parameters())  # whole ones too
    assert not any(buffer.is_shared() for buffer in model.buffers())
    model.reshard()
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    compare(model, plain)
    return error


@pytest.mark.parametrize("way", SHARING)
def test_a_module_of_dtensors_is_not_shared_and_says_so(way: str) -> None:
    """Torch would look for the storage of a DTensor, and crash."""
    errors = on_ranks(_refuses, 2, way=way)
    named_on_every_rank(errors, NotImplementedError, "cannot be shared with other processes")


# Freed


def _freed(context: RankContext, *, face: str) -> list[str]:
    """The memory of one parameter is given back, and comes again with its values."""
    model, plain = made(face), build()
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    param = next(model.parameters())
    storage = local_of(param).untyped_storage()
    nbytes, kept = storage.nbytes(), torch.empty(0).set_(storage.clone())  # type: ignore[call-overload]
    error = error_of(lambda: (storage.resize_(0), model(batch(0, 0))))
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
        torch.empty(0).set_(storage).copy_(kept)  # type: ignore[call-overload]
    train_sharded(model, context.rank)
    train_plain(plain, context.world_size)
    equal(model, plain)
    assert stays(model)
    return error


@pytest.mark.parametrize(
    ("face", "fragment"),
    [
        ("fully", "resize storage that is not resizable"),  # torch's words: nothing was freed
        ("flat", "the memory of the flat parameter that begins with 'inp.weight' was freed"),
        ("original", "the memory of 'inp.weight' was freed"),
    ],
)
def test_memory_that_was_freed_is_missed_by_name_and_may_come_again(
    face: str, fragment: str
) -> None:
    named_on_every_rank(on_ranks(_freed, 2, face=face), RuntimeError, fragment)


def test_what_a_gather_is_asked_is_cheap() -> None:
    """No tensor is made to see whether parameters are where they were."""
    assert agreed(_asked, 2) == 0


def _asked(context: RankContext) -> int:
    made_tensors = 0

    class Operators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal made_tensors
            made_tensors += 1
            return func(*args, **(kwargs or {}))

    models = [made(face) for face in ("fully", "flat", "original")]
    with Operators():
        assert all(map(stays, models))
    return made_tensors
