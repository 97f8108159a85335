"""What an adapter's verb must return is said in one sentence, to who wrote the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conformance.adapter import Adapter, BuildConfig, OptimizerFactory, Wrapped
from conformance.case import Case
from conformance.history import HistoryWriter
from conformance.models import case as model_case
from conformance.scenarios import Run
from conformance.scenarios.carriers import InFile


class Returns(Adapter):
    """Builds and steps to what it is given."""

    def __init__(self, built: Any, stepped: Any = None) -> None:
        self.built, self.stepped = built, stepped

    def build(self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig) -> Any:
        if self.built is not Wrapped:
            return self.built
        return Wrapped(module=model, optimizer=make_optimizer(model.parameters()))

    def step(self, *args: Any, **options: Any) -> Any:
        return self.stepped


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[HistoryWriter]:
    with closing(HistoryWriter(tmp_path, 0, {})) as opened:
        yield opened


def run(adapter: Adapter, writer: HistoryWriter, folder: Path) -> Run:
    return Run(
        adapter=adapter,
        case=Case.of("mlp", "train"),
        model=model_case("mlp"),
        writer=writer,
        batch=lambda step, micro: None,
        device=torch.device("cpu"),
        world=1,
        scratch=folder,
        carrier=InFile(path=folder / "states.pt", rank=0),
    )


@pytest.mark.parametrize(
    ("built", "shown"),
    [
        (nn.Linear(1, 1), "an object of type Linear"),
        ((nn.Linear(1, 1), None), "an object of type tuple"),
        (None, "None"),
        (Wrapped.__class__, "an object of type type"),
    ],
    ids=str,
)
def test_build_returns_a_wrapped(
    writer: HistoryWriter, tmp_path: Path, built: object, shown: str
) -> None:
    with pytest.raises(TypeError) as raised:
        run(Returns(built), writer, tmp_path).build()
    assert str(raised.value) == (
        f"Returns.build() returned {shown}, expected a conformance.Wrapped: end it with"
        " `return Wrapped(module=..., optimizer=...)`"
    )


def test_step_returns_a_step_result(writer: HistoryWriter, tmp_path: Path) -> None:
    trained = run(Returns(Wrapped, stepped=torch.zeros(())), writer, tmp_path)
    wrapped = trained.build()
    with pytest.raises(TypeError) as raised:
        trained.train_step(wrapped, 0)
    assert str(raised.value) == (
        "Returns.step() returned an object of type Tensor, expected a conformance.StepResult: end"
        " it with `return StepResult(losses=[...], grad_norm=...)`"
    )
