"""Several micro-batches per step."""

from __future__ import annotations

import pytest
from torch import Tensor

from conformance.adapter import Conventions
from conformance.causes import Cause
from conformance.checks import CHECKS, Ledger
from tests.checks.literal import Story, cause, first_mismatch, training


def scaled(factor: float, conventions: Conventions | None = None) -> Story:
    """Every gradient times `factor`, under the given conventions."""
    story = training(accumulation=3)
    story.conventions = conventions or Conventions()
    for step in range(2):
        tree = story.value("gradients", step=step)
        changed = {n: g * factor for n, g in tree.items() if isinstance(g, Tensor)}
        story.instead("gradients", changed, step=step)
    return story


def test_the_last_micro_batch_is_not_the_big_batch() -> None:
    story = training(accumulation=3)
    story.instead("gradients", story.value("gradients_last_micro", step=0), step=0)
    first = first_mismatch("accumulation.big_batch", story)
    assert first is not None
    assert first.cause is Cause.LAST_MICRO_BATCH_ONLY
    gradients = next(m for w, at, _, m in story.seen if (w, dict(at)) == ("gradients", {"step": 0}))
    assert first.moment == gradients


@pytest.mark.parametrize(
    ("conventions", "factor", "words"),
    [
        (Conventions(), 2.0, "summed over ranks"),
        (Conventions(gradients="sum"), 0.5, "averaged over ranks"),
        (Conventions(), 1 / 3, "divided the loss by the micro-batches as well"),
        (Conventions(loss_divided_by_accumulation=True), 3.0, "left the loss undivided"),
        (Conventions(), 2 / 3, "summed over ranks, and the wrapper divided"),
    ],
)
def test_the_other_convention_is_told(conventions: Conventions, factor: float, words: str) -> None:
    first = first_mismatch("conventions.kept", scaled(factor, conventions))
    assert first is not None
    assert first.cause is Cause.CONVENTION_BROKEN
    assert words in first.sentence


@pytest.mark.parametrize("factor", [0.77, -1.0, 0.0])
def test_a_factor_that_no_convention_gives_is_judged_by_others(factor: float) -> None:
    ledger = Ledger()
    CHECKS["conventions.kept"].judge(scaled(factor).evidence(), ledger)  # type: ignore[misc]
    assert ledger.first() is None
    assert ledger.comparisons == 0
    assert cause("gradients.value", scaled(factor)) is not None
