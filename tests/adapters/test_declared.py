"""What an adapter says of itself is looked at once, and what is right in its own way passes."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapter import Adapter, Conventions
from conformance.adapters.declared import check_declarations
from conformance.errors import UsageError


def adapter(**own: Any) -> Adapter:
    """One with these attributes, of a module that is nowhere: nothing else asks for them."""

    def build(self: Adapter, model: Any, make_optimizer: Any, config: Any) -> Any:
        raise AssertionError

    return type("Mine", (Adapter,), {"__module__": "nowhere", "build": build, **own})()


def verb(self: Adapter, w: Any) -> None:
    """As `zero_grad` is called."""


def test_a_helper_called_nearly_as_a_verb_that_is_defined_is_no_slip() -> None:
    check_declarations("mine", adapter(zero_grad=verb, zero_grads=verb))
    with pytest.raises(UsageError, match=r"nothing asks for 'zero_grads'; did you mean zero_grad"):
        check_declarations("mine", adapter(zero_grads=verb))


def test_what_init_sets_is_looked_at_too() -> None:
    mine = adapter()
    mine.conventons = Conventions(gradients="sum")  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"nothing asks for 'conventons'; did you mean convention"):
        check_declarations("mine", mine)
    mine.conventions = Conventions()
    check_declarations("mine", mine)


def test_a_static_method_is_called_without_self() -> None:
    check_declarations("mine", adapter(zero_grad=staticmethod(lambda w: None)))
    told = r"zero_grad\(self, w\) is called as zero_grad\(w\): missing a required argument: 'w'$"
    with pytest.raises(UsageError, match=told):
        check_declarations("mine", adapter(zero_grad=staticmethod(verb)))


@pytest.mark.parametrize("claims", [frozenset({1}), frozenset({"gradients", None}), ("gradients",)])
def test_claims_are_a_set_of_names(claims: Any) -> None:
    with pytest.raises(UsageError, match=r"capabilities must be a frozenset of names; got "):
        check_declarations("mine", adapter(capabilities=claims))
