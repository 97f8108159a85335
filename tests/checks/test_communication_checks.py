"""What the record of collectives shows."""

from __future__ import annotations

import pytest
import torch

from conformance.causes import Cause
from tests.checks.literal import Story, cause, first_mismatch, training

LAST = "step 0/micro 2"


def accumulating() -> Story:
    return training(accumulation=3)


def without_reductions() -> Story:
    """Accumulation without the all-reduces that a good run has."""
    story = accumulating()
    story.collectives = [[r for r in own if r.op != "all_reduce"] for own in story.collectives]
    return story


def test_a_reduction_inside_no_sync_is_named() -> None:
    story = accumulating()
    story.collective("reduce_scatter", "step 1/micro 0", rank=1)
    first = first_mismatch("no_sync.collectives", story)
    assert first is not None
    assert first.cause is Cause.REDUCED_IN_NO_SYNC
    assert (first.where["rank"], first.where["step"], first.where["micro"]) == (1, 1, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "all_gather", "reduce_op": None},
        {"op": "broadcast", "reduce_op": None},
        {"op": "all_reduce", "dtype": "int32"},
        {"op": "all_reduce", "numel": 1},
        {"op": "all_reduce", "judged": False},
        {"op": "all_reduce", "backward": False, "module": "norm"},
    ],
)
def test_what_is_no_reduction_of_gradients_is_legal_in_no_sync(fields: dict[str, object]) -> None:
    story = accumulating()
    story.collective(phase="step 0/micro 0", **fields)  # type: ignore[arg-type]
    assert cause("no_sync.collectives", story) is None


def test_more_reduced_than_any_padding_explains_is_named() -> None:
    story = accumulating()
    story.collective("all_reduce", LAST, numel=24)  # 12 are due, 24 with every piece aligned
    assert cause("no_sync.collectives", story) is Cause.REDUCED_REPEATEDLY


def test_more_reduced_because_frozen_parameters_have_gradients_is_named_so() -> None:
    story = accumulating()
    story.collective("all_reduce", LAST, numel=24)
    story.instead("gradients", {"kept": torch.tensor([0.5, 0.5])}, step=0)
    first = first_mismatch("no_sync.collectives", story)
    assert first is not None
    assert first.cause is Cause.UNEXPECTED_GRADIENT
    assert first.sentence.endswith("; frozen kept has a gradient")


def test_less_reduced_is_not_because_frozen_parameters_have_gradients() -> None:
    story = without_reductions()
    for step in range(2):
        story.collective("all_reduce", f"step {step}/micro 2", numel=12)
        story.instead("gradients", {"kept": torch.tensor([0.5, 0.5])}, step=step)
    assert cause("no_sync.collectives", story) is Cause.NOT_REDUCED


def test_a_reduction_of_a_part_is_named() -> None:
    story = without_reductions()
    for step in range(2):
        story.collective("all_reduce", f"step {step}/micro 2", numel=12)
    assert cause("no_sync.collectives", story) is Cause.NOT_REDUCED


def test_buckets_bitmaps_and_padding_are_legal() -> None:
    story = without_reductions()
    for step in range(2):
        story.collective("reduce_scatter", f"step {step}/micro 2", numel=12, reduce_op="avg")
        story.collective("reduce_scatter", f"step {step}/micro 2", numel=4, reduce_op="avg")
        story.collective("all_reduce", f"step {step}/micro 2", numel=9, dtype="int32")
    assert cause("no_sync.collectives", story) is None


def hybrid(shard_numel: int) -> Story:
    """Gradients are scattered in a group of two, then each rank's half is reduced over replicas."""
    story = without_reductions()
    for step in range(2):
        story.collective("reduce_scatter", f"step {step}/micro 2", numel=16, group_ranks=(0, 1))
        story.collective(
            "all_reduce",
            f"step {step}/micro 2",
            numel=shard_numel,
            group_ranks=(0, 2),
            stream="r#1",
        )
    return story


def test_hybrid_sharding_reduces_shards_over_replicas() -> None:
    assert cause("no_sync.collectives", hybrid(8)) is None
    assert cause("no_sync.collectives", hybrid(64)) is Cause.REDUCED_REPEATEDLY


@pytest.mark.parametrize(
    "other",
    [{"dtype": "int32"}, {"numel": 16}, {"reduce_op": "avg"}, {"root": 1}],
)
def test_another_collective_on_one_rank_is_named(other: dict[str, object]) -> None:
    story = training()
    story.collective("all_reduce", "step 1/after", rank=0)
    story.collective("all_reduce", "step 1/after", rank=1, **other)
    first = first_mismatch("collectives.order", story)
    assert first is not None
    assert first.cause is Cause.OTHER_COLLECTIVE
    parameters = next(
        m for w, at, _, m in story.seen if (w, dict(at)) == ("parameters", {"step": 1})
    )
    assert first.moment == parameters


def test_another_order_is_named() -> None:
    story = training()
    for rank, ops in enumerate((("broadcast", "all_reduce"), ("all_reduce", "broadcast"))):
        for op in ops:
            story.collective(op, "step 1/after", rank=rank)
    assert cause("collectives.order", story) is Cause.OTHER_COLLECTIVE


def test_groups_are_ordered_apart() -> None:
    story = training()
    for rank, streams in enumerate((("a#1", "b#2"), ("b#2", "a#1"))):
        for stream in streams:
            story.collective("all_reduce", "step 1/after", rank=rank, stream=stream)
    assert cause("collectives.order", story) is None


def test_a_collective_of_one_rank_only_is_named() -> None:
    story = training()
    story.collective("all_reduce", "eval", rank=1)
    first = first_mismatch("collectives.order", story)
    assert first is not None
    assert (first.cause, first.where["rank"]) == (Cause.OTHER_COLLECTIVE, 1)


def test_side_doors_may_differ() -> None:
    story = training()
    story.collective("all_reduce", "eval", rank=1, judged=False)
    assert cause("collectives.order", story) is None
