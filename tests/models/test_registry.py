"""The list of cases and how it is searched."""

from __future__ import annotations

import dataclasses

import pytest

from conformance.models import TRAITS, case, cases

CASES = (
    "mlp",
    "transformer",
    "uneven",
    "tiny",
    "unused",
    "frozen",
    "batchnorm",
    "nested_io",
    "reused",
    "strided",
    "recomputed",
    "adapted",
    "scalar",
    "varying",
    "routed",
    "wide",
)


def test_the_cases_are_listed_in_a_fixed_order() -> None:
    assert tuple(cases()) == CASES
    assert [one.name for one in cases().values()] == list(CASES)


def test_a_case_is_found_by_its_name() -> None:
    assert case("tiny") is cases()["tiny"]


def test_the_list_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        cases()["mlp"] = case("tiny")  # type: ignore[index]


@pytest.mark.parametrize(("wrong", "near"), [("mpl", "mlp"), ("transformers", "transformer")])
def test_a_misspelt_name_is_answered_with_the_near_match(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"named '{wrong}'; did you mean '{near}'[?] known: mlp, "):
        case(wrong)


def test_a_name_like_no_other_is_answered_with_the_list() -> None:
    with pytest.raises(ValueError, match="named 'zzz'; known: mlp, transformer, "):
        case("zzz")


@pytest.mark.parametrize("name", CASES)
def test_a_reason_is_one_sentence_and_is_nobody_elses(name: str) -> None:
    why = case(name).why
    assert why.endswith(".")
    assert why.count(". ") == 0
    assert [one.name for one in cases().values() if one.why == why] == [name]


def test_unknown_traits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'mlp': unknown traits \['tyed'\]; known: \['batchnorm'"):
        dataclasses.replace(case("mlp"), traits=frozenset({"tyed", "tied"}))


def test_every_trait_has_a_case() -> None:
    assert set().union(*(one.traits for one in cases().values())) == set(TRAITS)
