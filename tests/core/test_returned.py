"""What an adapter's verb must return is said in one sentence, to who wrote the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from conformance.adapter import Adapter, BuildConfig, OptimizerFactory, StepResult, Wrapped
from conformance.case import Case
from conformance.history import HistoryWriter
from conformance.models import case as model_case
from conformance.per_rank import PerRank
from conformance.scenarios import Run
from conformance.scenarios.carriers import InFile

ITSELF: dict[str, Any] = {}
ITSELF["itself"] = ITSELF


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


def test_a_step_result_has_losses(writer: HistoryWriter, tmp_path: Path) -> None:
    stepped = StepResult(losses=[torch.zeros(()), None])  # type: ignore[list-item]
    trained = run(Returns(Wrapped, stepped=stepped), writer, tmp_path)
    wrapped = trained.build()
    with pytest.raises(TypeError) as raised:
        trained.train_step(wrapped, 0)
    assert str(raised.value) == (
        "Returns.step() returned None, at .losses[1] of what it returned; expected a"
        " conformance.StepResult with one loss per micro-batch"
    )


def test_an_evaluation_returns_its_loss(
    writer: HistoryWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = run(Returns(Wrapped), writer, tmp_path)
    wrapped = evaluated.build()
    monkeypatch.setattr(evaluated.adapter, "evaluate", lambda *_: None)
    with pytest.raises(
        TypeError, match=r"^Returns.evaluate\(\) returned None; expected the loss, a"
    ):
        evaluated.evaluate(wrapped, 0)


WEIGHT = torch.zeros(2)


@pytest.mark.parametrize(
    ("verb", "got", "shown"),
    [
        ("bare", None, "None; expected an nn.Module"),
        ("full_parameters", [WEIGHT], "an object of type list; expected a mapping from FQN to"),
        ("full_parameters", {"a": None}, "None, at ['a'] of what it returned; expected a mapping"),
        ("full_gradients", {"a": [WEIGHT]}, "an object of type list, at ['a'] of what"),
        ("full_gradients", None, "None; expected a mapping from FQN to tensor or None"),
        ("full_optimizer_state", {"a": WEIGHT}, "an object of type Tensor, at ['a'] of what"),
        (
            "full_optimizer_state",
            {"a": {"b": {"seen": {1}}}},
            "an object of type set, at ['a']['b']['seen'] of what it returned; expected a mapping"
            " from FQN to a mapping of tensors, numbers and strings",
        ),
        ("hyperparameters", {"lr": 0.1}, "an object of type dict; expected a list of mappings of"),
        (
            "hyperparameters",
            [{"betas": (0.9, WEIGHT)}],
            "an object of type Tensor, at [0]['betas'][1] of",
        ),
        ("buffers", {"count": 1}, "an object of type int, at ['count'] of what it returned"),
        ("local_tensors", {"parameters": WEIGHT}, "an object of type Tensor, at ['parameters'] of"),
        ("local_tensors", {"optimizer": [1]}, "an object of type int, at ['optimizer'][0] of"),
        ("model_state", [WEIGHT], "an object of type list; expected a mapping"),
        ("evaluate", None, "None; expected the loss, a 0-dim tensor"),
        ("optim_state", None, "None; expected a mapping"),
    ],
)
def test_a_side_door_hands_out_what_is_due(
    writer: HistoryWriter, tmp_path: Path, verb: str, got: object, shown: str
) -> None:
    asked = run(Returns(Wrapped), writer, tmp_path)
    wrapped = asked.build()
    setattr(asked.adapter, verb, lambda *_: got)
    with pytest.raises(TypeError) as raised:
        asked.asked(verb, wrapped)
    assert str(raised.value).startswith(f"Returns.{verb}() returned {shown}")


@pytest.mark.parametrize(
    ("verb", "got"),
    [
        ("bare", nn.Linear(1, 1)),
        ("full_parameters", MappingProxyType({"a": nn.Parameter(WEIGHT)})),
        ("full_gradients", {"a": WEIGHT, "b": None}),
        (
            "full_optimizer_state",
            {"a": {"step": 1, "m": WEIGHT, "b": {"l": WEIGHT, "k": [1, "x"]}}},
        ),
        ("hyperparameters", [{"lr": 0.1, "betas": (0.9, 0.99), "foreach": None}]),
        ("hyperparameters", [{"lr": 0.1, "own": {"kind": "a"}}]),
        ("local_tensors", {"parameters": (WEIGHT,), "optimizer": []}),
        ("local_tensors", {"parameters": {"a": WEIGHT}.values(), "optimizer": iter([WEIGHT])}),
        ("model_state", ITSELF),
        ("evaluate", 0.5),
        ("model_state", {"a": object(), "b": [WEIGHT, {1}]}),
        ("buffers", PerRank(({"a": WEIGHT}, {"a": WEIGHT}))),
    ],
)
def test_what_is_due_is_handed_on(
    writer: HistoryWriter, tmp_path: Path, verb: str, got: object
) -> None:
    asked = run(Returns(Wrapped), writer, tmp_path)
    wrapped = asked.build()
    setattr(asked.adapter, verb, lambda *_: got)
    assert asked.asked(verb, wrapped) is got


@pytest.mark.parametrize(
    ("observe", "verb"),
    [
        ("observe_state", "full_parameters"),
        ("observe_state", "full_optimizer_state"),
        ("observe_state", "hyperparameters"),
        ("observe_state", "buffers"),
        ("observe_stored", "local_tensors"),
    ],
)
def test_what_is_observed_is_looked_at_first(
    writer: HistoryWriter, tmp_path: Path, observe: str, verb: str
) -> None:
    asked = run(Returns(Wrapped), writer, tmp_path)
    wrapped = asked.build()
    setattr(asked.adapter, verb, lambda *_: "nothing")
    with pytest.raises(
        TypeError, match=rf"^Returns.{verb}\(\) returned an object of type str; exp"
    ):
        getattr(asked, observe)(wrapped, 0)
