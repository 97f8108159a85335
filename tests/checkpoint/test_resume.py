"""Training goes on as if nothing had happened: through a directory or live, in any world."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, checkpoint
from fsdp.reshard import reshard
from tests.draws import draws
from tests.fsdp.plain import Stack, batch, loss_of, whole
from tests.fsdp.ranks import on_ranks
from tests.reshard.faces import everything, made, same

HYBRID = ["hybrid", "fully_hybrid"]
FACES = ["flat", "flat_one", "original", "fully", "fully_root", "plain", "no_shard", *HYBRID]
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


@dataclass(frozen=True)
class Case:
    """One drawn configuration."""

    source: str
    target: str
    one: int
    other: int
    optimizer: str
    blocks: int
    hidden: int
    frozen: int
    dtype: torch.dtype
    way: str

    @property
    def worlds(self) -> tuple[int, int]:
        """Ranks of the source and of the target: of two rows each, if they are hybrid."""
        return _ranks(self.source, self.one), _ranks(self.target, self.other)


def _ranks(face: str, count: int) -> int:
    return count + count % 2 if face in HYBRID else count


CASES = st.builds(
    Case,
    source=st.sampled_from(FACES),
    target=st.sampled_from(FACES),
    one=st.integers(1, 4),
    other=st.integers(1, 4),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    blocks=st.integers(1, 2),
    hidden=st.integers(1, 9),
    frozen=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    way=st.sampled_from(["sharded", "safetensors", "live"]),
)


def drawn(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Stack(case.blocks, hidden=case.hidden).to(case.dtype)
    # Whole units: one flat parameter is trained or is not.
    for block in list(model.blocks)[: case.frozen]:
        block.requires_grad_(requires_grad=False)
    return model


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = OPTIMIZERS[case.optimizer](params)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Every rank sees the same data, so any world computes the same mean."""
    dtype = next(model.parameters()).dtype
    loss_of(model, batch(number, 0).to(dtype)).backward()
    optimizer.step()
    optimizer.zero_grad()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        return {name: value.clone() for name, value in model.state_dict().items()}
    return {name: whole(value) for name, value in model.state_dict().items()}


class Trip:
    """Two models on their ranks, and the ways between them."""

    def __init__(self, case: Case, path: str) -> None:
        self.case, self.path, self.count = case, path, 0
        self.groups: dict[int, Any] = {}
        for world in case.worlds:
            self.groups[world] = dist.new_group(list(range(world)))

    def make(self, face: str, world: int, seed: int) -> tuple[Any, Any]:
        # One flat parameter has one requires_grad.
        if self.case.frozen:
            face = {"flat_one": "flat", "no_shard": "original_no_shard"}.get(face, face)
        model = made(face, list(range(world)), model=drawn(self.case, seed))
        return model, optimizer_of(model, self.case) if model is not None else None

    def go(self, one: tuple[Any, Any], other: tuple[Any, Any], worlds: Sequence[int]) -> None:
        self.count += 1
        path = f"{self.path}/{self.count}"
        if self.case.way == "live":
            reshard(one[0], other[0], one[1], other[1], limit=1000)
            return
        if one[0] is not None:
            group = self.groups[worlds[0]]
            checkpoint.save(path, *one, process_group=group, format=self.case.way)
        dist.barrier()
        if other[0] is not None:
            checkpoint.load(path, *other, process_group=self.groups[worlds[1]])


def _trip(context: RankContext, *, case: Case, path: str) -> None:
    trip = Trip(case, path)
    one, other = case.worlds
    source = trip.make(case.source, one, seed=7)
    if source[0] is not None:
        step(*source, 0)
        step(*source, 1)
    target = trip.make(case.target, other, seed=8)
    trip.go(source, target, (one, other))
    again = trip.make(case.source, one, seed=9)
    trip.go(target, again, (other, one))
    if source[0] is not None:
        # W -> W' -> W: the same bits, and the same bits after the uninterrupted step.
        same(told(again), told(source))
        step(*source, 2)
        step(*again, 2)
        same(told(again), told(source))
    if target[0] is not None:
        step(*target, 2)
        agrees(target[0], case)


def told(pair: tuple[Any, Any]) -> dict[str, Any]:
    return everything(*pair)


def agrees(model: nn.Module, case: Case) -> None:
    """The other world, within rounding, with one process that was never interrupted.

    In float64: adaptive optimizers make large steps of gradients that are rounding alone.
    """
    if case.dtype is torch.float32:
        return
    oracle = drawn(case, seed=7)
    optimizer = optimizer_of(oracle, case)
    for number in range(3):
        step(oracle, optimizer, number)
    wanted = full(oracle)
    got = full(model)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-7, atol=1e-8, msg=name)


# No shrinking: an example is a job, and a drawn case is short enough to be read.
QUICK = settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def check(case: Case) -> None:
    with tempfile.TemporaryDirectory() as path:
        on_ranks(_trip, max(case.worlds), case=case, path=path)


STATE_FROM_THE_START = Case(
    source="original",
    target="original",
    one=3,
    other=3,
    optimizer="adagrad",  # makes its state with itself, for parts without elements too
    blocks=2,
    hidden=1,
    frozen=0,
    dtype=torch.float32,
    way="live",
)


HYBRID_IN_ANOTHER_WORLD = Case(
    source="hybrid",
    target="fully_hybrid",
    one=4,
    other=2,
    optimizer="fused",
    blocks=2,
    hidden=5,
    frozen=1,
    dtype=torch.float64,
    way="sharded",
)


@given(CASES)
@example(STATE_FROM_THE_START)
@example(HYBRID_IN_ANOTHER_WORLD)
@QUICK
def test_there_and_back_and_one_step(case: Case) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.property
@given(CASES)
@settings(QUICK, max_examples=draws())
def test_there_and_back_and_one_step_in_many_draws(case: Case) -> None:
    check(case)
