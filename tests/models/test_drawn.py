"""Models that are written in their names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from conformance import drawing
from conformance.models import case, drawn

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(drawing.models())
def test_every_drawing_is_a_model_that_trains(model) -> None:
    assert str(drawn.parse(model.name)) == model.name
    built = model.build()
    loss = model.loss(built, model.batch(0, 0, 0))
    loss.backward()
    assert loss.shape == ()
    trained = [p for p in built.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None for p in trained)
    again = dict(model.build().named_parameters())
    assert all(torch.equal(again[name], p) for name, p in built.named_parameters())
    assert all(any(isinstance(m, unit) for unit in model.units) for m in _units(built))


def _units(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if isinstance(m, drawn.DrawnUnit)]


def test_a_name_says_what_is_built() -> None:
    model = case("drawn:6.(7b.5n)f.(4t.5v.(5sg))r.3")
    built = model.build()
    assert {name: tuple(p.shape) for name, p in built.named_parameters()} == {
        "parts.0.parts.0.linear.weight": (7, 6),
        "parts.0.parts.0.linear.bias": (7,),
        "parts.0.parts.1.linear.weight": (5, 7),
        "parts.0.parts.1.norm.weight": (5,),
        "parts.0.parts.1.norm.bias": (5,),
        "parts.1.parts.0.linear.weight": (4, 5),
        "parts.1.parts.0.square.weight": (4, 4),
        "parts.1.parts.1.linear.weight": (5, 4),
        "parts.1.parts.2.parts.0.gain": (1,),
        "parts.1.parts.2.parts.0.linear.weight": (5, 5),
        "parts.2.linear.weight": (3, 5),
    }
    assert [p.requires_grad for p in built.parameters()] == [False] * 5 + [True] * 6
    assert built.parts[1].parts[0].twin.weight is built.parts[1].parts[0].square.weight
    assert not built.parts[1].parts[2].parts[0].linear.weight.is_contiguous()
    assert model.traits == {"tied", "uneven", "tiny", "frozen", "buffers", "reused", "strided"}
    model.loss(built, model.batch(0, 0, 0))
    assert built.parts[1].parts[1].passes == 2  # called twice
    assert case("drawn:4.12").traits == frozenset()


def test_a_model_in_float64_has_weights_buffers_and_data_in_it() -> None:
    model = case("drawn:6d.(7bv.5n)f.3t")
    built = model.build()
    held = [*built.parameters(), *built.buffers(), *model.batch(1, 2, 0)]
    floating = {tensor.dtype for tensor in held if tensor.is_floating_point()}
    assert floating == {model.dtype} == {torch.float64}
    assert built.parts[0].parts[0].passes.dtype == torch.int64
    assert built.parts[1].twin.weight is built.parts[1].square.weight
    assert case("drawn:6.3").dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("drawn:6", "not a drawn model"),
        ("drawn:6.(3)", "the last item must be a layer"),
        ("drawn:6.(7)r.3", r"\(7\)r is called twice, but takes 6 and returns 7"),
        ("drawn:6.().3", "a unit needs at least one layer"),
        ("drawn:6.0.3", "a size must be at least 1"),
        ("drawn:0.3", "a size must be at least 1"),
        ("drawn:6x.3", "letters 'x' of 6x: each of 'd' at most once"),
        ("drawn:6dd.3", "each of 'd' at most once"),
        ("drawn:6.7z.3", "letters 'z' of 7z: each of 'bnsgtv' at most once"),
        ("drawn:6.7bb.3", "each of 'bnsgtv' at most once"),
        ("drawn:6.(7)x.3", "each of 'fr' at most once"),
        ("drawn:6.(7.3", "not a drawn model"),
        ("drawn:6.7).3", "not a drawn model"),
        ("drawn:6..3", "not a drawn model"),
        ("drawn:06.3", "not a drawn model"),
        ("drawn:", "not a drawn model"),
    ],
)
def test_a_name_that_says_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case(name)
