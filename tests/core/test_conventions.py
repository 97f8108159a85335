"""Conventions are one of the choices that there are, said where they are made."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

from conformance import Conventions

CHOICES = {
    name: get_args(hint) or (False, True) for name, hint in get_type_hints(Conventions).items()
}


@pytest.mark.parametrize(
    ("name", "choice"), [(name, choice) for name, all_ in CHOICES.items() for choice in all_]
)
def test_every_choice_can_be_made(name: str, choice: Any) -> None:
    assert getattr(Conventions(**{name: choice}), name) == choice


@pytest.mark.parametrize("name", [field.name for field in fields(Conventions)])
@pytest.mark.parametrize("wrong", [None, 1, "rank1", ["mean"], ""])
def test_no_other_choice_can_be_made(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Conventions(**{name: wrong})


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("buffers", "rank1", "no choice 'rank1' of Conventions.buffers; did you mean rank0?"),
        ("unused_grad", "nonne", "did you mean none? known: none, unit, zero"),
        ("gradients", None, "Conventions: gradients must be 'mean' or 'sum'; got None"),
        (
            "loss_divided_by_accumulation",
            "yes",
            "Conventions: loss_divided_by_accumulation must be False or True; got 'yes'",
        ),
    ],
)
def test_a_wrong_choice_is_answered_with_those_that_there_are(
    name: str, wrong: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        Conventions(**{name: wrong})
    assert message in str(refused.value)
