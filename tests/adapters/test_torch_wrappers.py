"""Side doors show the truth, states make the round trip, every variant builds."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapters import BUILT_IN
from conformance.ranks import Job, RankPool, RankVerdict
from tests.adapters import jobs

DDP = "torch.DistributedDataParallel"
ZERO = "torch.ZeroRedundancyOptimizer"
FSDP1 = "torch.FullyShardedDataParallel"
FSDP2 = "torch.fully_shard"
TORCH = sorted(name for name in BUILT_IN if name.startswith("torch."))

SIDE_DOORS = [
    (adapter, variant, model)
    for adapter, variant in (
        (DDP, "default"),
        (ZERO, "default"),
        (FSDP1, "default"),
        (FSDP1, "use_orig_params"),
        (FSDP1, "use_orig_params,NO_SHARD"),
        (FSDP2, "default"),
    )
    for model in ("transformer", "frozen", "uneven", "tiny", "strided", "unused")
    if (adapter, model) != (FSDP2, "strided")  # refused by the wrapper
    # its gradients are wrong: docs/findings/fsdp1-no-shard-strided-gradients.md
    if (variant, model) != ("use_orig_params,NO_SHARD", "strided")
]

# at 2 ranks, where each replica is one rank: docs/findings/fsdp1-hybrid-shard-of-one-rank.md
WRONG = ["HYBRID_SHARD,replicas=2", "use_orig_params,HYBRID_SHARD,replicas=2"]

ROUND_TRIPS = [
    (DDP, "default", "transformer", "full"),
    (ZERO, "default", "transformer", "full"),
    (FSDP1, "default", "transformer", "full"),
    (FSDP1, "default", "uneven", "sharded"),
    (FSDP1, "default", "uneven", "local"),
    (FSDP1, "use_orig_params", "uneven", "sharded"),
    (FSDP1, "use_orig_params", "transformer", "save"),
    (FSDP1, "NO_SHARD", "mlp", "full"),
    (FSDP1, "HYBRID_SHARD", "mlp", "sharded"),
    (FSDP2, "default", "transformer", "full"),
    (FSDP2, "default", "uneven", "sharded"),
    (FSDP2, "default", "tiny", "save"),
]


def values(pool: RankPool, function: Any, **kwargs: Any) -> tuple[Any, ...]:
    outcome = pool.run(Job.of(function, **kwargs))
    assert outcome.verdict is RankVerdict.OK, outcome.sentence
    return outcome.values


def no_words(pool: RankPool, function: Any, **kwargs: Any) -> None:
    assert values(pool, function, **kwargs) == ([], [])


@pytest.mark.parametrize(("adapter", "variant", "model"), SIDE_DOORS)
def test_side_doors_show_what_a_plain_module_has(
    pool: RankPool, adapter: str, variant: str, model: str
) -> None:
    no_words(pool, jobs.side_doors, adapter=adapter, variant=variant, model=model)


def test_the_wrappers_own_refusal_comes_through(pool: RankPool) -> None:
    job = Job.of(jobs.side_doors, adapter=FSDP2, variant="default", model="strided")
    outcome = pool.run(job)
    assert "NotImplementedError: FSDP does not support non-contiguous" in outcome.sentence


@pytest.mark.parametrize(("adapter", "variant", "model", "kind"), ROUND_TRIPS)
def test_states_make_the_round_trip(
    pool: RankPool, adapter: str, variant: str, model: str, kind: str
) -> None:
    no_words(pool, jobs.round_trip, adapter=adapter, variant=variant, model=model, kind=kind)


@pytest.mark.parametrize("adapter", [DDP, ZERO, FSDP2])
def test_a_full_state_of_rank_0_alone_reaches_all_ranks(pool: RankPool, adapter: str) -> None:
    words = values(pool, jobs.explicit_full_state, adapter=adapter, variant="default")
    assert [w for ranks in words for w in ranks if not w.startswith("rank 1")] == []


@pytest.mark.parametrize("adapter", TORCH)
def test_every_variant_builds_and_steps(pool: RankPool, adapter: str) -> None:
    no_words(pool, jobs.every_variant_builds, adapter=adapter, wrong=WRONG)


def test_unused_parameters_are_announced_only_where_there_are_some(pool: RankPool) -> None:
    for variant, model, expected in (
        ("default", "unused", True),
        ("default", "mlp", False),
        ("static_graph=True,broadcast_buffers=False", "unused", False),
    ):
        (said, _) = values(pool, jobs.remarks, adapter=DDP, variant=variant, model=model)
        assert any("find_unused_parameters=True" in remark for remark in said) is expected


@pytest.mark.parametrize(
    ("adapter", "variant", "parameters", "optimizer"),
    [
        (DDP, "default", 1.0, 2.0),
        (FSDP1, "default", 0.5, 1.0),
        (FSDP1, "use_orig_params", 0.5, 1.0),
        (FSDP1, "NO_SHARD", 1.0, 2.0),
        (FSDP2, "default", 0.5, 1.0),
    ],
)
def test_a_rank_stores_its_part(
    pool: RankPool, adapter: str, variant: str, parameters: float, optimizer: float
) -> None:
    for held in values(pool, jobs.parts, adapter=adapter, variant=variant):
        assert held["parameters"] == pytest.approx(parameters * held["whole"], rel=0.1)
        assert held["optimizer"] == pytest.approx(optimizer * held["whole"], rel=0.1)


def test_zero_deals_the_optimizer_state_out_to_the_ranks(pool: RankPool) -> None:
    ranks = values(pool, jobs.parts, adapter=ZERO, variant="default")
    whole = ranks[0]["whole"]
    assert sum(held["optimizer"] for held in ranks) == pytest.approx(2 * whole, rel=0.01)
    assert all(0 < held["optimizer"] < 2 * whole for held in ranks)
