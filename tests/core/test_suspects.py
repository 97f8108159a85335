"""What the oracle observes beside the truth, and where: what defects are known by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformance.adapter import Conventions
from conformance.execute import OracleRequest, VirtualWriter, run_truth, virtual_batches
from conformance.history import History
from conformance.oracle import VirtualRanks
from conformance.scenarios.carriers import Held

CPU = torch.device("cpu")
LOW = Conventions(computes_as="bfloat16", casts_inputs="root")


def places(directory: Path, what: str, conventions: Conventions, micro: int) -> list[object]:
    """Where `what` is observed in a training with so many micro-batches a step."""
    request = OracleRequest(
        world=2,
        conventions=conventions,
        capabilities=(),
        case=f"mlp/train/accumulation={micro},optimizer=sgd",
        seed=0,
        directory=str(directory),
    )
    truth = VirtualRanks(2, conventions, frozenset(), seed=0)
    batch = virtual_batches(request, CPU, None)
    with VirtualWriter(directory, 2) as writer:
        run_truth(request, "reference", CPU, truth, writer, batch, Held(world=2, states=None))
    return [dict(seen.where) for seen in History.read(directory, 2).every(what)]


@pytest.mark.parametrize(("micro", "steps"), [(1, []), (3, [0])])
def test_one_batch_in_the_place_of_several_is_tried_in_the_first_step(
    tmp_path: Path, micro: int, steps: list[int]
) -> None:
    found = places(tmp_path, "gradients_big_batch", Conventions(), micro)
    assert found == [{"step": step} for step in steps]


@pytest.mark.parametrize(("conventions", "micros"), [(Conventions(), []), (LOW, [0, 1, 2])])
def test_losses_that_no_low_dtype_gives_are_those_of_the_first_step(
    tmp_path: Path, conventions: Conventions, micros: list[int]
) -> None:
    found = places(tmp_path, "loss_in_full", conventions, 3)
    assert found == [{"step": 0, "micro": micro} for micro in micros]
