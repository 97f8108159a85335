"""Directories and live models go back and forth between this package and PyTorch's wrappers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as helpers
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap

import fsdp
from conformance.ranks import RankContext
from fsdp import checkpoint
from fsdp.reshard import reshard
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import Residual, batch, build, loss_of, optimizer_of
from tests.fsdp.ranks import on_ranks

OURS = ["flat", "original", "fully"]
THEIRS = ["torch_fully", "torch_flat", "torch_original", "plain"]
TELLING = [
    ("torch_fully", "flat"),
    ("torch_flat", "fully"),
    ("torch_original", "original"),
    ("plain", "flat"),
]
PAIRS = pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param(theirs, ours, marks=[] if (theirs, ours) in TELLING else [pytest.mark.long])
        for theirs in THEIRS
        for ours in OURS
    ],
)


def wrapped(face: str, *, other: bool = False) -> nn.Module:
    """The model of all tests in one of the forms; ``other``: with other weights."""
    model = build()
    if other:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    theirs = face.startswith("torch")
    package: Any = torch_fsdp if theirs else fsdp
    policy = torch_wrap.ModuleWrapPolicy if theirs else ModuleWrapPolicy
    if face == "plain":
        return model
    if face.endswith("fully"):
        for block in model.blocks:
            package.fully_shard(block)
        return package.fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return package.FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy({Residual}),
            use_orig_params=face.endswith("original"),
            device_id=torch.device("cpu"),
        )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    """One step on the data of both ranks: a plain model sees them all."""
    if any(hasattr(module, "_fsdp_state") or is_unit(module) for module in model.modules()):
        loss_of(model, batch(number, rank)).backward()
    else:
        for each in range(2):
            (loss_of(model, batch(number, each)) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def is_unit(module: nn.Module) -> bool:
    kinds = (torch_fsdp.FSDPModule, torch_fsdp.FullyShardedDataParallel)
    return isinstance(module, kinds)


def trained(face: str, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped(face)
    optimizer = optimizer_of(model.parameters())
    for number in range(2):
        step(model, optimizer, number, rank)
    return model, optimizer


def agree_and_go_on(one: Any, other: Any, rank: int) -> None:
    """Equal parameters now, and after a step that needs the whole optimizer state."""
    for number in (2, 3):
        first, second = full(one[0]), full(other[0])
        assert first.keys() == second.keys()
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=2e-6, atol=2e-6)
        step(*one, number, rank)
        step(*other, number, rank)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, fsdp.FullyShardedDataParallel):
        return {name: value.clone() for name, value in model.state_dict().items()}
    options = helpers.StateDictOptions(full_state_dict=True)
    state = helpers.get_model_state_dict(model, options=options)
    return {name: value.clone() for name, value in state.items()}


def save_with_torch(
    path: str, model: nn.Module, optimizer: torch.optim.Optimizer, key: str
) -> None:
    states = helpers.get_state_dict(model, optimizer)
    dcp.save({"model": states[0], key: states[1]}, checkpoint_id=path)


def load_with_torch(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states = helpers.get_state_dict(model, optimizer)
    state = {"model": states[0], "optim": states[1]}
    dcp.load(state, checkpoint_id=path)
    helpers.set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )


def _from_theirs(context: RankContext, *, path: str, theirs: str, ours: str) -> None:
    source = trained(theirs, context.rank)
    save_with_torch(path, *source, key="adam")
    model = wrapped(ours, other=True)
    optimizer = optimizer_of(model.parameters())
    checkpoint.load(path, model, optimizer, optimizer_key="adam")
    agree_and_go_on(source, (model, optimizer), context.rank)


@PAIRS
def test_what_torch_has_saved_is_loaded(theirs: str, ours: str, tmp_path: Path) -> None:
    on_ranks(_from_theirs, 2, path=str(tmp_path / "saved"), theirs=theirs, ours=ours)


def _to_theirs(context: RankContext, *, path: str, theirs: str, ours: str) -> None:
    source = trained(ours, context.rank)
    checkpoint.save(path, *source)
    model = wrapped(theirs, other=True)
    optimizer = optimizer_of(model.parameters())
    load_with_torch(path, model, optimizer)
    agree_and_go_on(source, (model, optimizer), context.rank)


@PAIRS
def test_torch_loads_what_was_saved(theirs: str, ours: str, tmp_path: Path) -> None:
    on_ranks(_to_theirs, 2, path=str(tmp_path / "saved"), theirs=theirs, ours=ours)


def _model_alone(context: RankContext, *, path: str) -> None:
    source = trained("torch_fully", context.rank)
    states = helpers.get_state_dict(*source)
    dcp.save({**states[0], "optim": states[1], "epoch": 3}, checkpoint_id=path)
    model = wrapped("flat", other=True)
    optimizer = optimizer_of(model.parameters())
    checkpoint.load(path, model, optimizer, model_key="")
    agree_and_go_on(source, (model, optimizer), context.rank)


def test_a_state_at_the_top_is_loaded(tmp_path: Path) -> None:
    on_ranks(_model_alone, 2, path=str(tmp_path / "saved"))


def _flattened(context: RankContext, *, path: str) -> None:
    source = trained("torch_fully", context.rank)
    options = helpers.StateDictOptions(flatten_optimizer_state_dict=True)
    states = helpers.get_state_dict(*source, options=options)
    dcp.save({"app": {"model": states[0], "optim": states[1]}}, checkpoint_id=path)
    model = wrapped("flat", other=True)
    optimizer = optimizer_of(model.parameters())
    keys = {"model_key": "app.model", "optimizer_key": "app.optim"}
    checkpoint.load(path, model, optimizer, **keys)
    agree_and_go_on(source, (model, optimizer), context.rank)


def test_a_flattened_state_below_another_key_is_loaded(tmp_path: Path) -> None:
    on_ranks(_flattened, 2, path=str(tmp_path / "saved"))


def _live(context: RankContext, *, source: str, target: str) -> None:
    one = trained(source, context.rank)
    model = wrapped(target, other=True)
    optimizer = optimizer_of(model.parameters())
    reshard(one[0], model, one[1], optimizer)
    agree_and_go_on(one, (model, optimizer), context.rank)


@pytest.mark.parametrize(
    ("source", "target"), [("torch_fully", "flat"), ("original", "torch_fully")]
)
def test_live_models_of_torch_are_resharded(source: str, target: str) -> None:
    on_ranks(_live, 2, source=source, target=target)
