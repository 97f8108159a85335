"""What is said about a flat parameter, by arithmetic on the sizes of its original parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp.flat_handle import ShardParamInfo
from fsdp.flat_parameter import FlatParameter
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import MixedPrecision
from tests.fsdp.ranks import agreed, on_ranks
from tests.fsdp.test_wrapper import wrapped

NOTHING = ShardParamInfo(False)


class Three(nn.Module):
    """Parameters of 21, 35 and 25 elements, or as told."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        for index, size in enumerate(sizes or (21, 35, 25)):
            setattr(self, f"p{index}", nn.Parameter(torch.arange(float(size))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(p.sum() for p in self.parameters())


def three(*sizes: int, **options: Any) -> FSDP:
    return FSDP(Three(*sizes), **options)


def held(info: ShardParamInfo) -> tuple[Any, ...]:
    return tuple(info)[1:]


def _unaligned(context: RankContext) -> list[Any]:
    model = three()
    handle = model._handle
    assert isinstance(handle.flat_param, FlatParameter)
    assert handle.flat_param is model._flat_param
    assert handle.unsharded_numel == 81
    assert handle.flat_param.numel() == 41
    assert handle.in_range(0, 0) == (ShardParamInfo(True, 0, 1, 0, 0), NOTHING, NOTHING)
    assert handle.in_range(20, 20) == (ShardParamInfo(True, 0, 1, 20, 20), NOTHING, NOTHING)
    assert [held(info) for info in handle.in_range(10, 60)] == [
        (0, 11, 10, 20),
        (11, 35, 0, 34),
        (46, 5, 0, 4),
    ]
    assert held(handle.in_range(22, 23)[1]) == (0, 2, 1, 2)
    assert [info.in_shard for info in handle.in_range(81, 200)] == [False] * 3
    assert held(handle.in_range(70, 200)[2]) == (0, 11, 14, 24)
    return [list(model._handle.shard_metadata())]


def test_a_shard_lists_the_parameters_that_it_cuts() -> None:
    first, second = (values[0] for values in on_ranks(_unaligned, 2))
    assert first == [
        ["p0", "p1"],
        [[21], [35]],
        [[1], [1]],
        [True, True],
        [21, 35],
        [[0, 20], [0, 19]],
    ]
    assert second == [
        ["p1", "p2"],
        [[35], [25]],
        [[1], [1]],
        [True, True],
        [35, 25],
        [[20, 34], [0, 24]],
    ]


def _aligned(context: RankContext, sizes: tuple[int, ...], *, half: bool) -> list[Any]:
    mixed = MixedPrecision(param_dtype=torch.float16) if half else None
    model = three(*sizes, use_orig_params=True, mixed_precision=mixed)
    handle = model._handle
    assert handle.flat_param is None
    return [handle.unsharded_numel, [list(pair) for pair in handle.shard_metadata().param_offsets]]


def test_parameters_start_at_sixteen_bytes_with_original_names() -> None:
    # 21 + (3) + 35 + (1) + 25 = 85, so 43 on each rank: the first ends inside the second parameter
    assert on_ranks(_aligned, 2, sizes=(21, 35, 25), half=False) == (
        [85, [[0, 20], [0, 18]]],
        [85, [[19, 34], [0, 24]]],
    )
    # 10 + (6) + 25 + (7) + 15 = 63 in a 16-bit dtype, so 32 on each rank
    assert on_ranks(_aligned, 2, sizes=(10, 25, 15), half=True) == (
        [63, [[0, 9], [0, 15]]],
        [63, [[16, 24], [0, 14]]],
    )


def test_a_shard_that_ends_in_a_gap_ends_with_the_parameter_before_it() -> None:
    # 21 + (3) + 20 = 44, so 22 on each rank: the first ends one into the gap
    assert on_ranks(_aligned, 2, sizes=(21, 20), half=False) == (
        [44, [[0, 20]]],
        [44, [[0, 19]]],
    )


def _formats(context: RankContext) -> list[Any]:
    first = nn.Conv2d(2, 3, 3, bias=False).to(memory_format=torch.channels_last)
    second = nn.Conv2d(3, 4, 1, bias=False).to(memory_format=torch.channels_last)
    third = nn.Conv2d(3, 4, 3, bias=False)
    model = FSDP(nn.Sequential(first, second, third))
    metadata = model._handle.shard_metadata()
    return [list(map(list, metadata.param_strides)), list(metadata.param_contiguities)]


def test_memory_formats_are_told() -> None:
    (alone,) = on_ranks(_formats, 1)
    assert alone == [[[18, 1, 6, 2], [3, 1, 3, 3], [27, 9, 3, 1]], [False, False, True]]


def _without(context: RankContext) -> bool:
    model = wrapped(nn.ReLU, auto_wrap_policy=None)
    return model._handle is None and not list(model.parameters())


def test_a_unit_without_parameters_has_no_handle() -> None:
    assert agreed(_without, 2) is True


def _example(context: RankContext, *, both: bool) -> list[int]:
    module = nn.Linear(5, 7) if both else nn.Linear(5, 5, bias=False)
    model = FSDP(module, use_orig_params=True)
    return [p.numel() for p in model.parameters()]


@pytest.mark.parametrize(
    ("both", "wanted"),
    [
        (False, ([13], [12])),  # 25 elements, padded to 26
        (True, ([22, 0], [13, 7])),  # 35, a gap of 1, 7, padded to 44
    ],
)
def test_the_examples_of_the_specification(wanted: Any, *, both: bool) -> None:
    assert on_ranks(_example, 2, both=both) == wanted


def _full_of_gaps(context: RankContext) -> list[float]:
    """What lies between parameters never reaches a parameter or a state."""
    model = three(3, 5, use_orig_params=True)
    with FSDP.summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    model(torch.ones(1)).sum().backward()
    return [value for tensor in model.state_dict().values() for value in tensor.tolist()]


def test_gaps_belong_to_nobody() -> None:
    assert agreed(_full_of_gaps, 2) == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0, 5.0]
