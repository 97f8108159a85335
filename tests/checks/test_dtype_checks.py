"""In what dtype gradients travel, told by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.adapter import Conventions
from conformance.causes import Cause
from tests.checks.literal import Story, cause, first_mismatch, training


def reducing(label: str = "step 0/micro 0", **fields: Any) -> Story:
    """One step more than right: a last reduction, of a gradient that has a row in the record."""
    story = training(steps=1)
    story.collective("reduce_scatter", label, **{"numel": 8, **fields})
    return story


@pytest.mark.parametrize(
    ("declared", "dtype", "named"),
    [
        ("parameter", "float32", False),
        ("parameter", "bfloat16", True),
        ("parameter", "float64", False),  # wide: costs bytes, no digits
        ("float16", "bfloat16", True),
        ("bfloat16", "bfloat16", False),
        ("float64", "float32", True),
    ],
)
def test_gradients_travel_in_no_shorter_dtype_than_declared(
    declared: Any,
    dtype: str,
    named: bool,  # noqa: FBT001 - a column
) -> None:
    story = reducing(dtype=dtype)
    for rows in story.collectives:  # what `training` has reduced is as was declared
        rows[1] = replace(rows[1], dtype="float32" if declared == "parameter" else declared)
    story.conventions = Conventions(reduced_as=declared)
    first = first_mismatch("dtypes.reduced", story)
    assert (first is not None) is named
    if first is not None:
        assert first.cause is Cause.DTYPE_ROUND_TRIP
        wanted = "float32" if declared == "parameter" else declared
        assert f"reduce_scatter of 8 gradient elements in {dtype}, declared {wanted}" in (
            first.sentence
        )
        gradients = next(m for what, _, _, m in story.seen if what == "gradients")
        assert first.moment < gradients  # told before any value that it has made wrong


def test_parameters_of_two_dtypes_have_gradients_of_two() -> None:
    story = reducing(dtype="bfloat16")
    story.seen = [
        (what, at, [{**v, "kept": v["kept"].bfloat16()} for v in values], m)
        if what == "parameters"
        else (what, at, values, m)
        for what, at, values, m in story.seen
    ]
    assert cause("dtypes.reduced", story) is None


@pytest.mark.parametrize(
    ("label", "fields"),
    [
        ("step 0/micro 0", {"numel": 1}),  # bookkeeping
        ("step 0/micro 0", {"group_ranks": (0,)}),  # stays where it is
        ("step 0/micro 0", {"backward": False, "module": "norm"}),  # of a forward
        ("step 0/micro 0", {"judged": False}),  # the suite's own
        ("step 0/clip", {}),
        ("build", {}),
    ],
    ids=["a number", "one rank", "in forward", "a side door", "a norm", "outside steps"],
)
def test_what_is_no_gradient_has_no_declared_dtype(label: str, fields: dict[str, Any]) -> None:
    assert cause("dtypes.reduced", reducing(label, dtype="bfloat16", **fields)) is None


def test_who_reduces_by_other_means_is_judged_by_values() -> None:
    story = training(steps=1)
    story.collectives = [[], []]
    assert cause("dtypes.reduced", story) is None
