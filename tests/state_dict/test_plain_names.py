"""Modules and parameters whose names look like those of wrappers keep them in every state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import StateDictType, checkpoint, fully_shard
from fsdp.flat_parameter import FLAT_PARAM
from fsdp.reshard import reshard
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import whole
from tests.fsdp.ranks import on_ranks
from tests.reshard.faces import Marks
from tests.state_dict import cells

LINEARS = (
    "my_fsdp_wrapped_module",
    "a_checkpoint_wrapped_module",
    "_checkpoint_wrapped_module_x",
    "x_orig_mod",
)
FULL = StateDictOptions(full_state_dict=True)


class Alike(nn.Module):
    """Every name ends or begins as the part that a wrapper puts into names."""

    def __init__(self) -> None:
        super().__init__()
        self.own_fsdp_wrapped_module = nn.Parameter(torch.rand(3))
        for name in LINEARS:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in LINEARS:
            x = self.get_submodule(name)(x)
        return x * self.own_fsdp_wrapped_module


def _plain(seed: int = 7) -> Alike:
    torch.manual_seed(seed)
    return Alike()


def _made(face: str, seed: int = 7) -> nn.Module:
    """The model in one form, with a checkpoint wrapper around one of the modules."""
    model = _plain(seed)
    model.a_checkpoint_wrapped_module = checkpoint_wrapper(model.a_checkpoint_wrapped_module)
    if face == "fully":
        for module in [each for each in model.modules() if isinstance(each, nn.Linear)]:
            fully_shard(module, mesh=cells.mesh_of(2))
        return fully_shard(model, mesh=cells.mesh_of(2))
    policy = ModuleWrapPolicy({nn.Linear})
    return cells.wrap(model, auto_wrap_policy=policy, use_orig_params=face == "original")


def _marked(model: nn.Module) -> Marks:
    optimizer = Marks(model.parameters())
    optimizer.step()
    for entry in optimizer.state.values():
        del entry["word"]  # torch loads a text as a generator of its letters
    return optimizer


def _check(model: nn.Module, optimizer: Marks | None = None) -> None:
    """``model`` has the values of the plain one, under its names, and states made from them."""
    wanted = _plain().state_dict()
    if isinstance(model, FSDP):
        state = checkpoint.get_model_state_dict(model, options=FULL)
    else:  # torch's own function takes wrappers out of names wherever their letters stand
        state = {name: whole(value) for name, value in model.state_dict().items()}
    cells.same(state, wanted)
    if optimizer is None:
        return
    if isinstance(model, FSDP):
        found = checkpoint.get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    else:
        entries = (optimizer.state[param] for param in model.parameters())
        found = {n: {"twice": whole(e["twice"])} for n, e in zip(wanted, entries, strict=True)}
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name]["twice"], value * 2), name


def _model_states(context: RankContext, kind: StateDictType, *, original: bool) -> None:
    model: Any = _made("original" if original else "flat")
    state = cells.saved(model, kind)
    units = sorted({name.rpartition(".")[0] for name in _plain().state_dict()})
    flat = [f"{unit}.{FLAT_PARAM}" if unit else FLAT_PARAM for unit in units]
    wanted = sorted(_plain().state_dict()) if kind is not cells.LOCAL else flat
    assert sorted(state) == sorted(wanted)
    other: Any = _made("original" if original else "flat", seed=8)
    found = cells.load(other, kind, state)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    _check(other)
    if kind is cells.FULL:
        found = cells.load(other, kind, {}, strict=False)
        assert sorted(found.missing_keys) == sorted(wanted)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("kind", cells.KINDS.values(), ids=cells.KINDS)
def test_a_model_state_has_the_names_of_the_plain_model(
    kind: StateDictType, *, original: bool
) -> None:
    on_ranks(_model_states, 2, kind=kind, original=original)


def _optimizer_states(context: RankContext, *, original: bool) -> None:
    model: Any = _made("original" if original else "flat")
    optimizer = _marked(model)
    state = FSDP.optim_state_dict(model, optimizer)
    wanted = _plain().state_dict()
    assert sorted(state["state"]) == sorted(state["param_groups"][0]["params"]) == sorted(wanted)
    other = Marks(model.parameters())
    FSDP.optim_state_dict_to_load(model, other, state, load_directly=True)
    _check(model, other)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_an_optimizer_state_has_the_names_of_the_plain_model(*, original: bool) -> None:
    on_ranks(_optimizer_states, 2, original=original)


def _in_memory(context: RankContext, face: str) -> None:
    model, other = _made(face), _made(face, seed=8)
    optimizer, fresh = _marked(model), Marks(other.parameters())
    states = checkpoint.get_state_dict(model, optimizer)
    checkpoint.set_state_dict(other, fresh, model_state_dict=states[0], optim_state_dict=states[1])
    _check(other, fresh)


@pytest.mark.parametrize("face", ["flat", "original"])
def test_states_in_memory_have_the_names_of_the_plain_model(face: str) -> None:
    on_ranks(_in_memory, 2, face=face)


def _moved(context: RankContext, source: str, target: str) -> None:
    model, other = _made(source), _made(target, seed=8)
    optimizer, fresh = _marked(model), Marks(other.parameters())
    reshard(model, other, optimizer, fresh)
    _check(other, fresh)


def _on_disk(context: RankContext, source: str, target: str, path: str) -> None:
    model, other = _made(source), _made(target, seed=8)
    optimizer, fresh = _marked(model), Marks(other.parameters())
    checkpoint.save(path, model, optimizer)
    checkpoint.load(path, other, fresh)
    _check(other, fresh)


PAIRS = pytest.mark.parametrize(
    ("source", "target"), [("flat", "fully"), ("fully", "original"), ("original", "flat")]
)


@PAIRS
def test_one_model_becomes_another_by_the_names_of_the_plain_model(
    source: str, target: str
) -> None:
    on_ranks(_moved, 2, source=source, target=target)


@PAIRS
def test_a_checkpoint_has_the_names_of_the_plain_model(
    source: str, target: str, tmp_path: Path
) -> None:
    on_ranks(_on_disk, 2, source=source, target=target, path=str(tmp_path / "saved"))
