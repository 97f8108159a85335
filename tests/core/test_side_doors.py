"""What side doors hand out: a wrong piece is seen in the whole, and what was seen stays so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import models
from conformance.adapter import Adapter, BuildConfig, OptimizerFactory, Wrapped
from conformance.adapters.fsdp_composable import FullyShardAdapter
from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.history import History, HistoryWriter
from conformance.scenarios import Run
from conformance.scenarios.carriers import InFile
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import Finding, Verdict

HERE = f"{__name__}:"
CASE = Case.parse("mlp/train/accumulation=1,optimizer=sgd")
CHECKED = ("gradients.value", "parameters.first_step", "parameters.end", "optimizer.state")


def test_parameters_that_are_handed_out_want_no_gradient() -> None:
    module = nn.Linear(2, 2)
    wrapped = Wrapped(module=module, optimizer=torch.optim.SGD(module.parameters()))
    given = Adapter.full_parameters(FullyShardAdapter(), wrapped)
    assert {name: value.requires_grad for name, value in given.items()} == {
        "weight": False,
        "bias": False,
    }


class Changed(FullyShardAdapter):
    """Hands out a first parameter that is not what the wrapper trains."""

    def full_parameters(self, w: Wrapped) -> dict[str, Tensor]:
        found = super().full_parameters(w)
        first = next(iter(found))
        return {**found, first: self.changed(found[first])}

    def changed(self, sharded: Any) -> Tensor:
        return self.with_local(sharded, sharded.to_local().clone())

    def with_local(self, sharded: Any, piece: Tensor, **placed: Any) -> Tensor:
        from torch.distributed.tensor import DTensor

        how = {"placements": sharded.placements, "shape": sharded.shape} | placed
        stride = torch.empty(how["shape"], device="meta").stride()
        mesh = sharded.device_mesh
        return DTensor.from_local(piece, mesh, run_check=False, stride=stride, **how)


class OtherRanksPiece(Changed):
    def changed(self, sharded: Any) -> Tensor:
        own = sharded.to_local()
        pieces = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(pieces, own.contiguous())
        return self.with_local(sharded, pieces[1 - dist.get_rank()])


class LastRanksRowLate(Changed):
    def changed(self, sharded: Any) -> Tensor:
        own = sharded.to_local()
        return self.with_local(sharded, own.roll(1, 0) if dist.get_rank() else own)


class Short(Changed):
    def changed(self, sharded: Any) -> Tensor:
        return self.with_local(sharded, sharded.to_local()[:-1])


class WholeOnOneRank(Changed):
    def changed(self, sharded: Any) -> Tensor:
        whole: Tensor = sharded.full_tensor()
        return whole if dist.get_rank() else sharded


class LowOnOneRank(Changed):
    def changed(self, sharded: Any) -> Tensor:
        own = sharded.to_local()
        return self.with_local(sharded, own.bfloat16() if dist.get_rank() else own)


class SaysItIsWhole(Changed):
    def changed(self, sharded: Any) -> Tensor:
        from torch.distributed.tensor import Replicate

        return self.with_local(sharded, sharded.to_local(), placements=[Replicate()])


class SaysThatThereAreMoreRows(Changed):
    def changed(self, sharded: Any) -> Tensor:
        rows, *rest = sharded.shape
        padded = torch.cat([sharded.to_local(), sharded.to_local()[:1]])
        return self.with_local(sharded, padded, shape=torch.Size((rows + 2, *rest)))


class HoldsMoreThanItSays(Changed):
    def changed(self, sharded: Any) -> Tensor:
        return self.with_local(sharded, sharded.full_tensor())


class LacksOneOnOneRank(Changed):
    def full_parameters(self, w: Wrapped) -> dict[str, Tensor]:
        found = FullyShardAdapter.full_parameters(self, w)
        return dict(list(found.items())[dist.get_rank() :])


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Session(Setting(directory=tmp_path_factory.mktemp("cases"), world=2)) as opened:
        yield opened


def judged(session: Session, adapter: type[Changed]) -> dict[str, Finding]:
    subject = Subject(adapter=f"{HERE}{adapter.__name__}", variant="default")
    found = session.judge_case(subject, CASE, [CHECKS[check] for check in CHECKED])
    return {finding.check: finding for finding in found}


def test_the_right_pieces_pass(session: Session) -> None:
    assert {finding.verdict for finding in judged(session, Changed).values()} == {Verdict.PASS}


@pytest.mark.parametrize(
    ("adapter", "cause", "words"),
    [
        (OtherRanksPiece, Cause.PERMUTED, "rank 0"),
        (LastRanksRowLate, Cause.PERMUTED, "rank 0"),
        (WholeOnOneRank, Cause.NON_FINITE, "rank 0"),
        (LowOnOneRank, Cause.NON_FINITE, "rank 0"),
        (SaysItIsWhole, Cause.WRONG_SHAPE, "rank 0"),
        (SaysThatThereAreMoreRows, Cause.WRONG_SHAPE, "rank 0"),
        (LacksOneOnOneRank, Cause.MISSING_KEY, "rank 1"),
    ],
)
def test_a_wrong_piece_is_found(
    session: Session, adapter: type[Changed], cause: Cause, words: str
) -> None:
    found = judged(session, adapter)
    assert found["parameters.end"].verdict is Verdict.FAIL
    assert found["parameters.end"].cause is cause
    assert words in found["parameters.end"].sentence


@pytest.mark.parametrize("adapter", [Short, HoldsMoreThanItSays])
def test_a_piece_of_another_shape_than_its_placements_say_ends_the_case(
    session: Session, adapter: type[Changed]
) -> None:
    found = judged(session, adapter)
    assert found["run.completed"].verdict is Verdict.FAIL
    assert "this rank's local tensor is (" in found["run.completed"].sentence


class Bare(Adapter):
    """The model as it is, which hands out what it goes on changing."""

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        return Wrapped(module=model, optimizer=make_optimizer(model.parameters()))


def test_gradients_are_those_of_the_moment_whatever_becomes_of_them(tmp_path: Path) -> None:
    model = models.case("mlp")
    with HistoryWriter(tmp_path, 0, {}) as writer:
        run = Run(
            adapter=Bare(),
            case=CASE,
            model=model,
            writer=writer,
            batch=lambda step, micro: model.batch(0, step, micro),
            device=torch.device("cpu"),
            world=1,
            scratch=tmp_path,
            carrier=InFile(path=tmp_path / "states.pt", rank=0),
        )
        wrapped = run.build()
        parameters = list(wrapped.module.parameters())
        run.before_optimizer = lambda: [p.grad.fill_(7) for p in parameters]
        run.train_step(wrapped, 0)
        run.observe_built(wrapped)
        seen = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.detach().fill_(7)
    history = History.read(tmp_path, 1)
    for gradient in history.get(0, "gradients", step=0).values():
        assert not (gradient == 7).any()
    for step in (0, -1):
        found = history.get(0, "parameters", step=step).values()
        assert all(map(torch.equal, found, seen))
