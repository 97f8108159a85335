"""How many bytes are alive on a rank at the most, and how many are left over; on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from conformance.ranks import RankContext
from conformance.scenarios.live_bytes import CpuMeter, metering
from fsdp import FullyShardedDataParallel, fully_shard
from tests.fsdp.ranks import on_ranks

WORLD = 2
WIDTH = 128
UNIT = WIDTH * WIDTH * 4  # bytes of a unit's parameters
UNITS = 8
SHARD = UNITS * UNIT // WORLD  # bytes of a rank's parameters, and of their gradients
FEW, MANY = 2, 2048  # rows; the activations of all units in the former are a quarter of a unit
RESULT = MANY * WIDTH * 4  # bytes of what a layer makes of many rows
SMALL = 1024  # bytes of what ranks tell each other
FACES = pytest.mark.parametrize("face", ["composable", "flat", "original"])
PEAKS = {"forward": SHARD + UNIT + UNIT // 2, "backward": 2 * SHARD + 3 * UNIT + UNIT // 2}


class Layer(nn.Sequential):
    """Keeps two results for backward, and a checkpoint of it one input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH, bias=False), nn.Sigmoid(), nn.Tanh())


class Peak(CpuMeter):
    """The most bytes that were ever alive after an operation."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.peak = 0
        self._allowed = allowed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.uncollected() > self.peak:
            # What is above that may be held by a thread of gloo, which has not yet let go of it.
            enough = max(self.peak, self._allowed)
            self.peak = max(self.peak, self._patience.settled(self.uncollected, enough))
        return result


def sharded(face: str, kind: CheckpointImpl | None = None, place: str = "") -> nn.Module:
    options = {} if face == "composable" else {"use_orig_params": face == "original"}
    unit: Any = fully_shard if face == "composable" else FullyShardedDataParallel
    layers = []
    for _ in range(UNITS):
        layer: nn.Module = Layer()
        if place == "inside":
            layer = checkpoint_wrapper(layer, checkpoint_impl=kind)
        layer = unit(layer, **options)
        if place == "outside":
            layer = checkpoint_wrapper(layer, checkpoint_impl=kind)
        layers.append(layer)
    return unit(nn.Sequential(*layers), **options)


def peaks(model: nn.Module, rows: int, allowed: dict[str, int]) -> dict[str, int]:
    """Bytes at the most in a forward, and in a backward, of parameters without gradients."""
    x = torch.randn(rows, WIDTH, requires_grad=True)
    found = {}
    with Peak(allowed["forward"]) as peak:
        _ = [param.detach().sum() for param in model.parameters()]  # shows the meter the shards
        out = model(x)
        found["forward"], peak.peak, peak._allowed = peak.peak, 0, allowed["backward"]
        out.sum().backward()
        found["backward"] = peak.peak
    return found


def _of_a_training(context: RankContext, face: str) -> dict[str, int]:
    with metering(torch.device("cpu")) as meter:
        model = sharded(face)
        found = {"built": meter.read(SHARD + SMALL)}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            found |= peaks(model, FEW, PEAKS)
            optimizer.step()
            optimizer.zero_grad()
        found["after a step"] = meter.read(SHARD + SMALL)
        del model, optimizer
        found["deleted"] = meter.read(SMALL)
    return found


@FACES
def test_few_units_are_whole_at_a_time_and_nothing_is_left_over(face: str) -> None:
    """In forward one; in backward that, the next, and gradients of one to be reduced."""
    allowed = PEAKS | {"built": SHARD, "after a step": SHARD, "deleted": 0}
    for found in on_ranks(_of_a_training, WORLD, face=face):
        for where, most in allowed.items():
            assert found[where] <= most + SMALL, f"{where}: {found[where]} bytes"


def _of_checkpoints(
    context: RankContext, face: str, kind: CheckpointImpl, place: str
) -> tuple[int, int, int]:
    """Bytes at the most in a backward: without checkpoints, with them, and of few rows."""
    found = []
    enough = dict.fromkeys(PEAKS, UNITS * 4 * RESULT)
    for model in (sharded(face), sharded(face, kind, place)):
        with metering(torch.device("cpu")):
            found.append(peaks(model, MANY, enough)["backward"])
    model.zero_grad()
    with metering(torch.device("cpu")):
        few = peaks(model, FEW, PEAKS)["backward"]
    return found[0], found[1], few


@FACES
@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("kind", list(CheckpointImpl), ids=["reentrant", "no_reentrant"])
def test_each_checkpoint_lowers_the_peak(face: str, kind: CheckpointImpl, place: str) -> None:
    """Of the two results that a unit keeps, but where it runs again, and beside that."""
    given = {"face": face, "kind": kind, "place": place}
    for without, found, few in on_ranks(_of_checkpoints, WORLD, **given):
        assert found <= without - (UNITS - 3) * RESULT, f"{found} bytes, {without} without"
        assert few <= PEAKS["backward"] + SMALL, f"{few} bytes of few rows: too many whole units"
