"""Tensor-aware equality, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.testing import FSDPTest

case = FSDPTest()
ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ONE, torch.ones(2)),
        (ONE, ONE + 1e-8),
        (0.1 + 0.2, 0.3),
        (torch.tensor(2), 2),
        ({"a": [ONE, 1, "x"]}, {"a": [torch.ones(2), 1, "x"]}),
        ([1, 2], [1, 2]),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
        (3, 3.0),
    ],
)
def test_equal(first: Any, second: Any) -> None:
    case.assertEqual(first, second)
    with pytest.raises(AssertionError):
        case.assertNotEqual(first, second)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (ONE, torch.zeros(2), "not close"),
        (ONE, torch.ones(3), "shape"),
        (ONE, ONE.double(), "dtype"),
        (ONE, None, "NoneType"),
        ({"a": ONE}, {"b": ONE}, "keys on one side only"),
        ([ONE], [ONE, ONE], "1 elements against 2"),
        ({"a": [ONE, "x"]}, {"a": [ONE, "y"]}, r"at \['a'\]\[1\]"),
        (1.0, 1.1, "not close"),
        ([1, 2], [1, 3], "differ"),
    ],
)
def test_different(first: Any, second: Any, text: str) -> None:
    case.assertNotEqual(first, second)
    with pytest.raises(AssertionError, match=text):
        case.assertEqual(first, second)


def test_tolerances_come_in_pairs() -> None:
    case.assertEqual(ONE, ONE + 0.1, atol=0.2, rtol=0.0)
    with pytest.raises(ValueError, match="both atol and rtol or neither"):
        case.assertEqual(ONE, ONE, atol=0.1)
    case.assertEqual(ONE, ONE.double(), exact_dtype=False)
