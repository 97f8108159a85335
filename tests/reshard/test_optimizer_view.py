"""Where an optimizer's values lie after a load, and which of them are per element. No ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.reshard.optimizer import OptimizerView, _elementwise

ELSEWHERE = torch.device("meta")  # a device that is not the host, on any machine


def put(**options: Any) -> dict[str, Any]:
    """The state that a parameter elsewhere has after a load of a step count, by these options."""
    holder = nn.Parameter(torch.ones(3, device=ELSEWHERE))
    piece: Any = SimpleNamespace(holder=holder, names=("w",), name="w")
    optimizer = torch.optim.Adam([holder])
    optimizer.param_groups[0].update(options)
    view = OptimizerView(optimizer, [piece])
    view.put(holder, {"step": torch.tensor(4.0), "exp_avg": torch.ones_like(holder), "kept": 7})
    return optimizer.state[holder]


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, "cpu"),
        ({"capturable": False, "fused": None}, "cpu"),
        ({"capturable": True}, "meta"),
        ({"fused": True}, "meta"),
    ],
)
def test_a_step_count_lies_where_the_optimizer_wants_it(
    options: dict[str, Any], place: str
) -> None:
    state = put(**options)
    assert state["step"].device.type == place
    assert state["exp_avg"].device.type == "meta"
    assert state["kept"] == 7


def test_a_step_count_that_is_put_is_nobody_elses() -> None:
    holder = nn.Parameter(torch.ones(3))
    piece: Any = SimpleNamespace(holder=holder, names=("w",), name="w")
    optimizer, count = torch.optim.Adam([holder]), torch.tensor(4.0)
    view = OptimizerView(optimizer, [piece])
    view.put(holder, {"step": count})
    optimizer.state[holder]["step"] += 1
    assert count == 4.0
    view.put(holder, {})
    assert holder not in optimizer.state


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("step", torch.zeros(()), False),  # of a parameter without dims it has its shape
        ("exp_avg", torch.zeros(()), True),
        ("step", torch.zeros(3), True),
        ("exp_avg", torch.zeros(2, 3), True),
        ("exp_avg", 0.0, False),
    ],
)
def test_what_fits_the_parameter_is_per_element_but_for_its_step_count(
    key: str, value: Any, *, expected: bool
) -> None:
    fitting: Any = SimpleNamespace(fits=lambda tensor: True)
    assert _elementwise(fitting, key, value) is expected
    other: Any = SimpleNamespace(fits=lambda tensor: False)
    assert not _elementwise(other, key, value)
