"""What it costs the host to shard a model and to start it: counted, not timed."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.ranks import RankContext
from fsdp import fully_shard
from fsdp.engine.torch_private import dtensor_of, dtensor_parameter, make_spec, spec_of
from fsdp.engine.unit import FSDPState
from tests.fsdp.ranks import agreed


class DTensorOperators(TorchDispatchMode):
    """Counts the operators that are asked of DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def _chain(units: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(units)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _operators_of_sharding(context: RankContext) -> dict[str, int]:
    with DTensorOperators() as operators:
        _chain(2)
    return dict(+operators.calls)


def test_sharding_asks_no_operator_of_dtensors() -> None:
    """Each would be planned anew for each shape, which takes milliseconds."""
    assert agreed(_operators_of_sharding, 2) == {}


def _comparisons(context: RankContext, *, units: int) -> int:
    model, compared = _chain(units), 0

    def equal(one: FSDPState, other: object) -> bool:
        nonlocal compared
        compared += 1
        return one is other

    with mock.patch.object(FSDPState, "__eq__", equal):
        model(torch.ones(1, 4)).sum().backward()
    return compared


def test_units_are_not_compared_with_each_other() -> None:
    """Or a start would take the square of their number."""
    assert agreed(_comparisons, 1, units=20) <= 20


def _specs(context: RankContext) -> dict[str, bool]:
    mesh, equal, rows = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1,)), Shard(0)

    def spec(mesh: Any = mesh, cut: Any = rows, **changed: Any) -> Any:
        facts = {"shape": (2, 3), "stride": (3, 1), "dtype": torch.float32}
        return make_spec(mesh, [cut], **facts | changed)

    one = spec()
    others = [
        spec(equal),
        spec(cut=Shard(1)),
        spec(cut=Replicate()),
        spec(shape=(3, 2)),
        spec(stride=(1, 2)),
        spec(dtype=torch.float16),
    ]
    found = {
        "same": spec() is one,
        "others differ": all(other is not one and other != one for other in others[1:]),
        "mesh of its own": others[0].mesh is equal,
        "of what was asked": (one.mesh, one.placements) == (mesh, (Shard(0),)),
    }
    known = ref(one)
    del one, others
    gc.collect()
    return found | {"forgotten": known() is None}


def test_equal_specs_are_one_object_while_somebody_has_it() -> None:
    assert set(agreed(_specs, 1).values()) == {True}


def _parameter(context: RankContext, *, requires_grad: bool) -> bool:
    local = torch.arange(6.0).view(2, 3)
    mesh = init_device_mesh("cpu", (1,))
    spec = make_spec(mesh, [Shard(0)], shape=(2, 3), stride=(3, 1), dtype=torch.float32)
    ours = dtensor_parameter(local, spec, requires_grad=requires_grad)
    theirs = nn.Parameter(dtensor_of(local, spec, requires_grad=False), requires_grad=requires_grad)
    module = nn.Module()
    module.weight = ours
    assert isinstance(ours, nn.Parameter)
    assert dict(module.named_parameters()) == {"weight": ours}
    return (
        type(ours) is type(theirs) is DTensor
        and (ours.requires_grad, ours.is_leaf) == (theirs.requires_grad, True)
        and spec_of(ours) == spec_of(theirs)
        and ours.to_local().data_ptr() == local.data_ptr()
    )


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_is_made_as_torch_makes_it(*, requires_grad: bool) -> None:
    assert agreed(_parameter, 1, requires_grad=requires_grad)
