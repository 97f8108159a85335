"""LBFGS has one state for all parameters: refused before anything happens, and kept by hand."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, checkpoint
from fsdp.reshard import reshard
from tests.fsdp.plain import batch, loss_of
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.reshard.faces import made

FACES = ["fully_root", "no_shard", "original_no_shard", "plain"]
"""In which it steps as on whole parameters, where the ranks divide all sizes."""
Verb = Callable[[nn.Module, Any, str], Any]
WRAPPER = FullyShardedDataParallel
VERBS: dict[str, Verb] = {
    "save": lambda model, optim, path: checkpoint.save(path, model, optim),
    "safetensors": lambda m, o, path: checkpoint.save(path, m, o, format="safetensors"),
    "reshard": lambda model, optim, _: reshard(model, model, optim, optim),
    "get": lambda model, optim, _: checkpoint.get_optimizer_state_dict(model, optim),
    "get both": lambda model, optim, _: checkpoint.get_state_dict(model, optim),
    "set": lambda model, optim, _: checkpoint.set_optimizer_state_dict(model, optim, NOTHING),
    "set both": lambda model, optim, _: checkpoint.set_state_dict(
        model, iter([optim]), model_state_dict={}, optim_state_dict=NOTHING
    ),
}
OF_WRAPPER: dict[str, Verb] = {
    "optim_state_dict": lambda model, optim, _: WRAPPER.optim_state_dict(model, optim),
    "to_load": lambda model, optim, _: WRAPPER.optim_state_dict_to_load(model, optim, NOTHING),
    "full": lambda model, optim, _: WRAPPER.full_optim_state_dict(model, optim),
    "sharded": lambda model, optim, _: WRAPPER.sharded_optim_state_dict(model, optim),
}


NOTHING: dict[str, Any] = {"state": {}, "param_groups": []}


class Even(nn.Sequential):
    """Of sizes that two ranks divide."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 4))


def _pair(face: str, context: RankContext) -> tuple[nn.Module, LBFGS]:
    torch.manual_seed(7)
    model = made(face, list(range(context.world_size)), model=Even())
    assert model is not None
    return model, LBFGS(model.parameters(), lr=0.5, max_iter=3)


def _stepped(model: nn.Module, optimizer: LBFGS, steps: range) -> list[float]:
    """The losses of all ranks, which have the same batches."""
    losses: list[float] = []
    for step in steps:

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, 0))
            loss.backward()
            losses.append(loss.item())
            return loss.item()

        closure()  # an optimizer is looked at before its first step, over shards
        optimizer.step(closure)
    return losses


def _refused(context: RankContext, face: str, verb: str, path: str) -> list[str]:
    model, optimizer = _pair(face, context)
    fresh = LBFGS(model.parameters())
    call = (VERBS | OF_WRAPPER)[verb]
    never = error_of(lambda: call(model, fresh, path))
    _stepped(model, optimizer, range(1))
    issued = len(context.recorder.records)
    error = error_of(lambda: call(model, optimizer, path))
    if not verb.startswith(("save", "safe", "reshard", "optim", "to_", "full", "sharded")):
        assert len(context.recorder.records) == issued
    assert never == error
    _stepped(model, optimizer, range(1, 2))  # the model is still there
    return error


CELLS = [(face, verb) for face in FACES for verb in VERBS] + [
    (face, verb) for face in FACES if "no_shard" in face for verb in OF_WRAPPER
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("face", "verb"), CELLS)
def test_no_verb_takes_it_for_states_of_parameters(face: str, verb: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    errors = on_ranks(_refused, 2, face=face, verb=verb, path=str(path))
    named_on_every_rank(errors, NotImplementedError, "LBFGS keeps one state for all of its param")
    named_on_every_rank(
        errors, NotImplementedError, "beside it on every rank what its state_dict()"
    )
    assert not path.exists()


def _resumed(context: RankContext, face: str, path: str) -> None:
    model, optimizer = _pair(face, context)
    _stepped(model, optimizer, range(2))
    checkpoint.save(path, model)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    wanted = _stepped(model, optimizer, range(2, 4))
    again, other = _pair(face, context)
    checkpoint.load(path, again)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert _stepped(again, other, range(2, 4)) == wanted


@pytest.mark.parametrize("face", FACES)
def test_what_the_message_says_resumes_bit_for_bit(face: str, tmp_path: Path) -> None:
    on_ranks(_resumed, 2, face=face, path=str(tmp_path / "saved"))
