"""Configurations that a wrapper refuses are refusals, not failures of the wrapper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conformance.adapter import Refusal
from conformance.adapters.composable import ComposableAdapter
from conformance.adapters.refusals import refusals
from conformance.ranks import Job, RankPool
from tests.adapters import jobs


def ranks(count: int, *, dims: int = 1) -> Any:
    return SimpleNamespace(ndim=dims, size=lambda dim: count if dim == dims - 1 else 2)


@pytest.mark.parametrize(("reshard", "count"), [(2, 3), (2, 1), (3, 4)])
def test_parts_that_do_not_divide_the_ranks_are_refused(reshard: int, count: int) -> None:
    with pytest.raises(Refusal, match=f"{count} ranks cannot be cut into equal parts of {reshard}"):
        ComposableAdapter._check_part(reshard, ranks(count))


@pytest.mark.parametrize("reshard", [None, True, False, 1, 2])
def test_everything_else_is_left_to_the_wrapper(reshard: object) -> None:
    ComposableAdapter._check_part(reshard, ranks(4))
    ComposableAdapter._check_part(reshard, ranks(2, dims=2))


FLAT = ("torch.FullyShardedDataParallel", "fsdp.FullyShardedDataParallel")
SHARDED = (*FLAT, "torch.fully_shard", "fsdp.fully_shard")


@pytest.mark.parametrize(
    ("adapter", "model"),
    [*((name, "scalar") for name in SHARDED), *((name, "adapted") for name in FLAT)],
)
def test_models_that_a_wrapper_does_not_take_are_refused(
    pool: RankPool, adapter: str, model: str
) -> None:
    job = Job.of(jobs.side_doors, adapter=adapter, variant="default", model=model)
    assert "Refusal: " in pool.run(job).sentence


def test_any_other_error_is_the_wrappers_own() -> None:
    with pytest.raises(ValueError, match="too short"), refusals():
        raise ValueError("the flat parameter is too short")
    with pytest.raises(TypeError, match="scalar"), refusals():
        raise TypeError("FSDP doesn't support scalar parameters")
