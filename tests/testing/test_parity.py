"""The parity helper passes a right wrapper and names what is off with a wrong one."""

from __future__ import annotations

import pytest

from tests.testing.parities import Parities
from tests.testing.running import run_one


@pytest.mark.parametrize(
    "method",
    [
        "ddp",
        "ddp_with_accumulation_and_clipping",
        "ddp_in_low_precision",
        "low_precision_is_not_full_precision",
    ],
)
def test_parity_holds(method: str) -> None:
    ran = run_one(Parities, method)
    assert ran.verdict == "pass", ran.text


def test_a_wrong_gradient_scale_is_found_in_the_parameters() -> None:
    ran = run_one(Parities, "wrong_parameters")
    assert ran.verdict == "failure"
    assert "Summing does not train mlp like the unsharded model: parameter " in ran.text
    assert " after step 0: off by " in ran.text
    assert "gradient of" not in ran.text.split("after step 0")[0]
