"""What is said of a key that is missing or one too many, and what a wrapper put into it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.causes import Cause
from conformance.checks.names import inserted, key_text, nearest_key, one_sided

PART = st.from_regex(r"[a-z_0-9]{1,6}", fullmatch=True)
NAMES = ["first.linear.weight", "first.linear.bias", "head.bias"]
PREFIXED = [f"module.{name}" for name in NAMES]


@given(st.lists(PART, min_size=1, max_size=4), st.lists(PART, min_size=1, max_size=2), st.data())
def test_what_was_put_in_takes_the_name_there(
    plain: list[str], added: list[str], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(plain) - 1))
    wrapped = ".".join(plain[:at] + added + plain[at:])
    found = inserted(".".join(plain), wrapped)
    assert found.count(".") == len(added)
    assert ".".join(plain) in {
        wrapped[:i] + wrapped[i + len(found) :]
        for i in range(len(wrapped))
        if wrapped.startswith(found, i)
    }


@pytest.mark.parametrize(
    ("plain", "wrapped"),
    [("a.b", "a.b"), ("a.b", "a"), ("a.b", "a.b.c"), ("a.b", "x.a.y.b"), ("a.b", "xa.b")],
)
def test_names_that_differ_otherwise_have_nothing_put_in(plain: str, wrapped: str) -> None:
    assert inserted(plain, wrapped) == ""


def test_a_missing_key_names_the_prefixed_one_and_the_verb_that_takes_it_off() -> None:
    assert key_text(Cause.MISSING_KEY, "first.linear.bias", PREFIXED) == (
        "a key is missing; module.first.linear.bias is there: let the adapter's bare() return a"
        " module whose names are without 'module.'"
    )


def test_a_key_too_many_names_the_one_that_is_due() -> None:
    assert key_text(Cause.UNEXPECTED_KEY, "module.head.bias", NAMES) == (
        "a key too many; head.bias is due: let the adapter's bare() return a module whose names"
        " are without 'module.'"
    )


def test_what_stands_in_the_middle_of_a_name_is_told_too() -> None:
    text = key_text(Cause.MISSING_KEY, "a.linear.bias", ["a._wrapped.linear.bias"])
    assert text.endswith(
        "a._wrapped.linear.bias is there: let the adapter's bare() return a module"
        " whose names are without '_wrapped.'"
    )


def test_without_a_remedy_only_the_key_is_named() -> None:
    text = key_text(Cause.MISSING_KEY, "head.bias", PREFIXED, remedy="")
    assert text == "a key is missing; module.head.bias is there"


def test_a_key_of_another_spelling_is_named_without_a_remedy() -> None:
    text = key_text(Cause.MISSING_KEY, "head.bias", ["first.linear.weight", "head.biases"])
    assert text == "a key is missing; head.biases is there"


@pytest.mark.parametrize("others", [[], ["zzz"]])
def test_a_key_unlike_all_others_is_only_missing(others: list[str]) -> None:
    assert nearest_key("head.bias", others) == ""
    assert key_text(Cause.MISSING_KEY, "head.bias", others) == "a key is missing"


def test_a_name_with_only_a_prefix_more_is_nearer_than_one_that_looks_alike() -> None:
    assert nearest_key("a.bias", ["b.bias", "some.long.prefix.a.bias"]) == "some.long.prefix.a.bias"


def test_the_side_that_has_the_key_decides_what_it_is() -> None:
    assert one_sided("a", got={"a": 1}, due={"b": 1})[0] is Cause.UNEXPECTED_KEY
    assert one_sided("b", got={"a": 1}, due={"b": 1})[0] is Cause.MISSING_KEY
    assert "; b.w is due" in one_sided("m.b.w", got={"m.b.w": 1}, due={"b.w": 1})[1]
    assert "; m.b.w is there" in one_sided("b.w", got={"m.b.w": 1}, due={"b.w": 1})[1]
