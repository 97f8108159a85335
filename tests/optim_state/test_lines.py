"""What ranks compare of values that are no whole tensors, before they load them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp.optim_state.flatten import Part
from fsdp.optim_state.vocabulary import FSDPParamInfo, Member, _OptimStateKey


def _line(value: Any) -> str:
    member = Member(
        param=nn.Parameter(torch.ones(1)),
        key=_OptimStateKey(unflat_param_names=("w",), is_fsdp_managed=True),
        indices=(0,),
        shape=torch.Size([1]),
        offset=0,
        numel=1,
        is_whole=False,
    )
    part = Part(info=cast("FSDPParamInfo", None), member=member, others={"step": value})
    (line,) = part.lines()
    return line


class _Thing:
    """Shows its address, as objects do."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 1.0000001),
        (torch.tensor(1.0), torch.tensor(1.0001)),
        (torch.tensor(100000.0), torch.tensor(100000.5)),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)),
        (1, True),
        (1, "1"),
        (1.0, torch.tensor(1.0)),
        ([1, torch.tensor(2.0)], [1, torch.tensor(2.00001)]),
        ({"a": 1}, {"a": 2}),
        ((1,), [1]),
        (None, _Thing()),
    ],
)
def test_a_difference_is_seen_however_small(one: Any, other: Any) -> None:
    assert _line(one) != _line(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_Thing(), _Thing()),
        ([_Thing()], [_Thing()]),
        (float("nan"), float("nan")),
        (torch.tensor(float("nan")), torch.tensor(float("nan"))),
    ],
)
def test_the_same_on_two_ranks_is_the_same(one: Any, other: Any) -> None:
    assert _line(one) == _line(other)


class _Elsewhere(torch.Tensor):
    """Says where it is, as the tensors of an accelerator do."""

    def __repr__(self, **_: Any) -> str:
        return f"tensor({self.item()}, device='elsewhere:{id(self)}')"

    def __format__(self, _: str) -> str:
        return repr(self)


def test_the_number_of_a_device_is_no_difference() -> None:
    one, other = (torch.ones(()).as_subclass(_Elsewhere) for _ in range(2))
    assert f"{one}" != f"{other}"
    assert _line(one) == _line(other)
