"""Beside the compiler: what gathers and reduces stays out of graphs, and nothing is captured twice.

A graph is one of a module's computation; a step after the first must not make another.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import fsdp
from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from tests.fsdp.plain import (
    Residual,
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
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks

STEPS = 3
OURS = str(Path(fsdp.__file__).parent)
LONG = pytest.mark.long

Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Two(nn.Module):
    """Units with computation of the root between them, and no loop: graphs may end and go on."""

    def __init__(self, first: Callable[[], nn.Module] = Residual) -> None:
        super().__init__()
        self.first = first()
        self.second = Residual()
        self.out = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x) * 2)
        return self.out(self.second(hidden).sin())


class Sides(nn.Module):
    """A unit of two inputs: another kind of node announces the end of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(10, 10), nn.Linear(10, 10)
        self.both = nn.Bilinear(10, 10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.both(self.left(x), self.right(x))


def _step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x)
    loss.backward()
    return loss


@contextmanager
def _captured() -> Iterator[list[str]]:
    """The files of all functions that the compiler captures meanwhile."""
    files: list[str] = []
    torch._dynamo.reset()
    handle = register_bytecode_hook(lambda code, _: files.append(code.co_filename))
    try:
        yield files
    finally:
        handle.remove()


def _values(model: nn.Module) -> list[torch.Tensor]:
    if not isinstance(model, FullyShardedDataParallel):
        return [whole(p) for p in model.parameters()]
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return [p.detach().clone() for p in model.parameters()]


def _graphs(
    context: RankContext,
    make: Callable[[Any], nn.Module],
    kind: Callable[[], nn.Module],
    backend: str = "eager",
    *,
    step: bool = False,
) -> list[int]:
    """How many graphs there are after each step of training what ``make`` returns for a backend.

    It trains like a model of that ``kind``. ``step``: forward and backward are compiled together.
    """
    counter = CompileCounterWithBackend(backend)
    counts, losses = [], []
    with _captured() as files:
        model, plain = make(counter), build(kind)
        run = torch.compile(_step, backend=counter) if step else _step
        optimizer = optimizer_of(model.parameters())
        for number in range(STEPS):
            losses.append(run(model, batch(number, context.rank)).item())
            optimizer.step()
            optimizer.zero_grad()
            counts.append(counter.frame_count)
    wanted = train_plain(plain, context.world_size, STEPS)
    if context.rank == 0:
        torch.testing.assert_close(losses, wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(_values(model), list(plain.parameters()), rtol=2e-6, atol=2e-6)
    assert [file for file in files if file.startswith(OURS)] == []
    return counts


# Units, each in one graph


def _unit(module: nn.Module, way: str, backend: Any) -> nn.Module:
    """``module`` sharded and compiled, in one of the orders and forms that users have."""
    options = {"backend": backend, "fullgraph": True}
    if way == "compiled, sharded":
        return fully_shard(torch.compile(module, **options))
    if way == "compiled in place, sharded":
        module.compile(**options)
        return fully_shard(module)
    fully_shard(module)
    if way == "sharded, compiled":
        return torch.compile(module, **options)
    module.compile(**options)
    return module


def _units(context: RankContext, *, way: str, backend: str = "eager") -> list[int]:
    def make(counter: Any) -> nn.Module:
        model = build()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = _unit(block, way, counter)
        return fully_shard(model)

    return _graphs(context, make, Stack, backend)


@pytest.mark.parametrize(
    "way",
    [
        "compiled in place, sharded",
        pytest.param("compiled, sharded", marks=LONG),  # so does tests/interop, beside torch's
        pytest.param("sharded, compiled", marks=LONG),
        pytest.param("sharded, compiled in place", marks=LONG),
    ],
)
def test_all_units_of_a_class_share_one_graph(way: str) -> None:
    assert agreed(_units, 2, fresh=True, way=way) == [1] * STEPS


@LONG
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        "aot_eager_decomp_partition",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
        ),
    ],
)
def test_units_train_like_eager_ones_with_any_backend(backend: str) -> None:
    way = "compiled in place, sharded"
    counts = agreed(_units, 2, fresh=True, timeout=900.0, way=way, backend=backend)
    assert counts == [1] * STEPS


def _wrapped_units(context: RankContext, *, original: bool, inside: bool) -> list[int]:
    options = {"use_orig_params": original}

    def make(counter: Any) -> nn.Module:
        model = build()
        for index, block in enumerate(model.blocks):
            if inside:
                block.compile(backend=counter, fullgraph=True)
            model.blocks[index] = FullyShardedDataParallel(block, **options)
            if not inside:
                model.blocks[index].compile(backend=counter, fullgraph=True)
        return FullyShardedDataParallel(model, **options)

    return _graphs(context, make, Stack)


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=LONG)], ids=["outer", "inner"])
@pytest.mark.parametrize(
    "original", [False, pytest.param(True, marks=LONG)], ids=["flat", "original"]
)
def test_wrapped_units_share_one_graph(*, original: bool, inside: bool) -> None:
    assert agreed(_wrapped_units, 2, fresh=True, original=original, inside=inside) == [1] * STEPS


# What is around units


def _two(model: nn.Module) -> nn.Module:
    for unit in (model.first, model.second, model):
        fully_shard(unit)
    return model


def _whole_model(context: RankContext) -> list[int]:
    def make(counter: Any) -> nn.Module:
        model = _two(build(Two))
        model.compile(backend=counter)
        return model

    return _graphs(context, make, Two)


def test_graphs_of_a_model_end_at_its_units() -> None:
    # One for each unit, one from the first to the second, one from there on.
    assert agreed(_whole_model, 1, fresh=True) == [4] * STEPS


class Method(Two):
    """A unit is run by another method than forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first.run(x) * 2)
        return self.out(self.second(hidden).sin())


class Runs(Residual):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _method(context: RankContext) -> list[int]:
    def make(counter: Any) -> nn.Module:
        model = _two(build(Method, first=Runs))
        register_fsdp_forward_method(model.first, "run")
        model.compile(backend=counter)
        return model

    return _graphs(context, make, functools.partial(Method, first=Runs))


@LONG
def test_graphs_end_at_registered_methods() -> None:
    assert agreed(_method, 1, fresh=True) == [4] * STEPS


def _whole_step(context: RankContext) -> list[int]:
    def make(_: Any) -> nn.Module:
        model = build(Sides)
        fully_shard(model.both)
        return fully_shard(model)

    return _graphs(context, make, Sides, step=True)


def test_a_step_may_be_compiled_with_its_backward() -> None:
    # From the input to the unit, the unit, the loss.
    first, *later = agreed(_whole_step, 1, fresh=True)
    assert first > 0
    assert later == [first, first]


FACES = {"composable": fully_shard, "wrapper": FullyShardedDataParallel}


def _in_one_graph(context: RankContext) -> dict[str, list[str]]:
    def error(shard: Callable[[nn.Module], nn.Module]) -> list[str]:
        torch._dynamo.reset()
        model = shard(build())
        around = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
        return error_of(lambda: around(batch(0, context.rank)))

    return {face: error(shard) for face, shard in FACES.items()}


@pytest.fixture(scope="module")
def refusals() -> tuple[dict[str, list[str]], ...]:
    """Of every rank, the error of each face."""
    return on_ranks(_in_one_graph, 2, fresh=True)


@pytest.mark.parametrize("face", FACES)
def test_one_graph_around_units_is_refused_with_the_reason(
    face: str, refusals: tuple[dict[str, list[str]], ...]
) -> None:
    errors = tuple(each[face] for each in refusals)
    named_on_every_rank(errors, torch._dynamo.exc.Unsupported, "with fullgraph=True, compile shard")


def _compiled_backward(context: RankContext) -> list[str]:
    torch._dynamo.reset()
    kind = functools.partial(nn.Linear, 10, 3)
    model, plain = fully_shard(build(kind)), build(kind)
    loss = loss_of(model, batch(0, context.rank))
    compiler = torch.compile(backend="eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        error = error_of(loss.backward)
    model.reshard()  # an optimizer is made over shards
    train_sharded(model, context.rank, STEPS)
    train_plain(plain, context.world_size, STEPS)
    compare(model, plain)
    return error


def test_compiled_autograd_is_refused_on_every_rank() -> None:
    errors = on_ranks(_compiled_backward, 2, fresh=True)
    named_on_every_rank(errors, RuntimeError, "gradients would not be reduced")


# Steps of optimizers


class Narrow(nn.Module):
    """Of two rows, of which the last of three ranks has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def _steps_compiled(context: RankContext) -> dict[str, list[int]]:
    return {name: _step_compiled(context, name) for name in ("adamw", "sgd")}


def _step_compiled(context: RankContext, name: str) -> list[int]:
    """How many graphs a compiled step has after each iteration; it trains as the plain model."""
    counter = CompileCounterWithBackend("eager")
    counts = []
    with _captured() as files:
        model, plain = build(Narrow), build(Narrow)
        fully_shard(model.first)
        fully_shard(model)
        optimizer = optimizer_of(model.parameters(), name)
        step = torch.compile(optimizer.step, backend=counter)
        for number in range(STEPS):
            loss_of(model, batch(number, context.rank)).backward()
            model(batch(7, context.rank))  # what this gathers is old after the step
            step()
            optimizer.zero_grad()
            counts.append(counter.frame_count)
    train_plain(plain, context.world_size, STEPS, kind=name)
    compare(model, plain, tolerance=1e-5)  # the compiler adds up in another order
    assert [file for file in files if file.startswith(OURS)] == []
    return counts


def test_the_step_of_an_optimizer_is_one_graph() -> None:
    """Momentum makes another one, once it is there."""
    graphs = agreed(_steps_compiled, 3, fresh=True, timeout=900.0)
    assert graphs == {"adamw": [1, 1, 1], "sgd": [1, 2, 2]}


# Names


def _names(context: RankContext) -> None:
    torch._dynamo.reset()
    model, plain = build(Two), build(Two)
    model.first = torch.compile(model.first, backend="eager")
    model.second.compile(backend="eager")
    _two(model)
    inside = [name.replace("first.", "first._orig_mod.") for name in plain.state_dict()]
    assert list(model.state_dict()) == inside
    assert sorted(get_model_state_dict(model)) == sorted(plain.state_dict())
    values = {name: torch.full_like(value, 7) for name, value in plain.state_dict().items()}
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    assert all(whole(p).eq(7).all() for p in model.parameters())


def test_tools_name_parameters_as_without_the_compiler() -> None:
    on_ranks(_names, 2, fresh=True)
