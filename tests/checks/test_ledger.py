"""What a ledger keeps of the comparisons that are written into it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks import Ledger

ERRORS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 2.0]), max_size=6)
BOUNDS = st.sampled_from([0.0, 0.5, 1.0])


def compare(ledger: Ledger, error: float, bound: object) -> None:
    expected = torch.ones(3)
    ledger.number(expected + error, expected, bound, name="it", moment=(0, 0))  # type: ignore[arg-type]


@given(ERRORS, st.data())
def test_a_bound_that_is_called_for_judges_as_one_that_is_given(
    errors: list[float], data: st.DataObject
) -> None:
    given_, called = Ledger(), Ledger()
    for error in errors:
        bound = data.draw(BOUNDS)
        compare(given_, error, bound)
        compare(called, error, lambda bound=bound: bound)
    assert called == given_


def test_a_bound_is_not_measured_for_what_is_right_to_the_last_bit() -> None:
    ledger = Ledger()
    compare(ledger, 0.0, 0.5)
    compare(ledger, 0.0, lambda: pytest.fail("measured"))
    assert (ledger.comparisons, ledger.error, ledger.bound, ledger.mismatches) == (2, 0.0, 0.5, [])


def test_a_check_that_passes_says_what_its_bound_was() -> None:
    ledger = Ledger()
    compare(ledger, 0.0, lambda: 0.5)
    assert (ledger.error, ledger.bound) == (0.0, 0.5)
