"""The losses of older weights that the oracle observes beside its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformance import models
from conformance.adapter import Conventions
from conformance.execute import OracleRequest, VirtualWriter, run_truth, virtual_batches
from conformance.history import History, as_tensor
from conformance.oracle import VirtualRanks
from conformance.oracle_run import copied
from conformance.scenarios.carriers import Held

CPU = torch.device("cpu")


@pytest.mark.parametrize("acts", ["sss", "sws"])
def test_a_stale_loss_is_that_of_the_weights_before_the_last_step_of_any_kind(
    acts: str, tmp_path: Path
) -> None:
    request = OracleRequest(
        world=2,
        conventions=Conventions(),
        capabilities=(),
        case=f"mlp/sequence/accumulation=1,acts={acts},optimizer=sgd",
        seed=0,
        directory=str(tmp_path),
    )
    batch, truth = (
        virtual_batches(request, CPU, None),
        VirtualRanks(2, Conventions(), frozenset(), seed=0),
    )
    with VirtualWriter(tmp_path, 2) as writer:
        run_truth(request, "reference", CPU, truth, writer, batch, Held(world=2, states=None))
    history, model = History.read(tmp_path, 2), models.case("mlp")
    module = model.build()
    module.load_state_dict(history.get(0, "parameters", step=0), strict=False)
    for rank in range(2):
        stale = as_tensor(history.get(rank, "stale_loss", step=2, micro=0))
        expected = model.loss(module, batch(2, 0).values[rank])
        torch.testing.assert_close(stale, expected.detach())
        assert not torch.equal(stale, as_tensor(history.get(rank, "loss", step=2, micro=0)))


def test_a_copy_of_a_model_shares_neither_weights_nor_hooks_with_it() -> None:
    module = models.case("mlp").build()
    inner = next(iter(module.children()))
    inner.register_forward_hook(lambda *_: called.append("both"))
    called: list[str] = []
    copy = copied(module)
    assert not {p.data_ptr() for p in module.parameters()} & {
        p.data_ptr() for p in copy.parameters()
    }
    for part in module.modules():
        part.register_forward_pre_hook(lambda *_: called.append("original"))
    next(iter(copy.children())).register_forward_pre_hook(lambda *_: called.append("copy"))
    copy(models.case("mlp").batch(0, 0, 0)[0])
    assert called == ["copy", "both"]


def test_a_copy_keeps_ties() -> None:
    module = models.case("transformer").build()
    names = [name for name, _ in module.named_parameters()]
    assert [name for name, _ in copied(module).named_parameters()] == names
    assert len(names) < len([*module.named_parameters(remove_duplicate=False)])
