"""What decides on collectives is agreed upon before the first one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from conformance.ranks import RankContext
from fsdp import MixedPrecisionPolicy
from tests.fsdp.plain import batch, build
from tests.fsdp.ranks import agreed, error_of
from tests.fsdp.test_training import shard_blocks

HALF = torch.bfloat16
CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "compute": (
        [{}, {"mp_policy": MixedPrecisionPolicy(param_dtype=HALF)}],
        "rank 1 has 'inp.weight' (10, 10) float32 trainable in group 0 '', computed in bfloat16",
    ),
    "reduce": (
        [
            {"mp_policy": MixedPrecisionPolicy(param_dtype=HALF)},
            {"mp_policy": MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)},
        ],
        "computed in bfloat16, reduced in float32",
    ),
    "placement": (
        [{}, {"shard_placement_fn": lambda p: Shard(1) if p.shape == (10, 10) else None}],
        "rank 1 has 'inp.weight' (10, 10) float32 trainable in group 0 '', cut on dim 1",
    ),
    "after_forward": (
        [{"reshard_after_forward": True}, {"reshard_after_forward": False}],
        "rank 1 has 'inp.weight' (10, 10) float32 trainable in group 0 '', kept after forward",
    ),
}


def _chosen_by_rank(context: RankContext, case: str) -> list[str]:
    model = shard_blocks(build(), **CASES[case][0][context.rank])
    return error_of(lambda: model(batch(0, context.rank)))


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_chose_otherwise_all_hear_the_first_difference(case: str) -> None:
    kind, text = agreed(_chosen_by_rank, 2, case=case)
    assert kind == "ValueError"
    assert CASES[case][1] in text


def _smaller_meshes(context: RankContext) -> list[str]:
    model = shard_blocks(build(), reshard_after_forward=2 if context.rank else True)
    return error_of(lambda: model(batch(0, context.rank)))


def test_the_whole_mesh_may_be_called_by_its_number() -> None:
    assert agreed(_smaller_meshes, 2) == ["", ""]
