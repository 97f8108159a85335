"""The losses of older weights that the oracle observes beside its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from conformance import models
from conformance.adapter import Conventions
from conformance.execute import OracleRequest, VirtualWriter, run_truth, virtual_batches
from conformance.history import History, as_tensor
from conformance.oracle import VirtualRanks
from conformance.oracle_run import kept
from conformance.per_rank import PerRank
from conformance.scenarios.carriers import Held

CPU = torch.device("cpu")


def observed(case: str, folder: Path) -> tuple[History, Callable[[int, int], PerRank]]:
    """What the reference run of two ranks observes, and their batches."""
    request = OracleRequest(
        world=2,
        conventions=Conventions(),
        capabilities=(),
        case=case,
        seed=0,
        directory=str(folder),
    )
    batch = virtual_batches(request, CPU, None)
    truth = VirtualRanks(2, Conventions(), frozenset(), seed=0)
    with VirtualWriter(folder, 2) as writer:
        run_truth(request, "reference", CPU, truth, writer, batch, Held(world=2, states=None))
    return History.read(folder, 2), batch


@pytest.mark.parametrize("acts", ["sss", "sws"])
def test_a_stale_loss_is_that_of_the_weights_before_the_last_step_of_any_kind(
    acts: str, tmp_path: Path
) -> None:
    history, batch = observed(f"mlp/sequence/accumulation=1,acts={acts},optimizer=sgd", tmp_path)
    model = models.case("mlp")
    module = model.build()
    module.load_state_dict(history.get(0, "parameters", step=0), strict=False)
    for rank in range(2):
        stale = as_tensor(history.get(rank, "stale_loss", step=2, micro=0))
        expected = model.loss(module, batch(2, 0).values[rank])
        torch.testing.assert_close(stale, expected.detach())
        assert not torch.equal(stale, as_tensor(history.get(rank, "loss", step=2, micro=0)))


def test_gradients_of_the_last_micro_batch_are_those_of_it_alone(tmp_path: Path) -> None:
    history, _ = observed("mlp/sequence/accumulation=3,acts=s,optimizer=sgd", tmp_path)
    for fqn, last in history.get(0, "gradients_last_micro", step=0).items():
        own = [history.get(r, "gradients_of_micro", step=0, micro=2)[fqn] for r in (0, 1)]
        assert torch.equal(last, (own[0] + own[1]) / 2)


def test_what_is_asked_of_older_weights_leaves_the_model_as_it_was() -> None:
    model = models.case("batchnorm")
    module = model.build()
    held = [*module.parameters(), *module.buffers()]
    there, before = [t.data_ptr() for t in held], [t.detach().clone() for t in held]
    with kept(module) as values, torch.no_grad():
        loss = model.loss(module, model.batch(0, 0, 0))
        for parameter, own in zip(module.parameters(), values, strict=True):
            parameter.data = own + 1
        assert not torch.equal(model.loss(module, model.batch(0, 0, 0)), loss)
    after = [*module.parameters(), *module.buffers()]
    assert [id(t) for t in after] == [id(t) for t in held]
    assert [t.data_ptr() for t in after] == there
    assert all(map(torch.equal, after, before))


def train_and_fail(module: nn.Module) -> None:
    with kept(module):
        for parameter in module.parameters():
            parameter.data = parameter.detach() + 1
        raise ArithmeticError


def test_weights_are_back_after_an_exception() -> None:
    module = models.case("batchnorm").build()
    own = [t.data_ptr() for t in (*module.parameters(), *module.buffers())]
    with pytest.raises(ArithmeticError):
        train_and_fail(module)
    assert [t.data_ptr() for t in (*module.parameters(), *module.buffers())] == own
