"""A misspelt name or pattern is answered with what it may have meant, or with nothing."""

from __future__ import annotations

import pytest

from conformance.checks import CHECKS
from conformance.globs import matches
from conformance.models import cases
from conformance.near import FEW, near_matches, offer
from conformance.plan import every_case

NAMES = ["losses.value", "gradients.value", "gradients.scale", "clip.norm", "clip.gradients"]
CASES = [
    f"{model}/{scenario}/accumulation={micro},optimizer={optimizer}"
    for model in ("mlp", "tiny")
    for scenario in ("train", "unused")
    for micro in (1, 3)
    for optimizer in ("sgd", "adamw")
]
UNUSED_SGD = [f"tiny/unused/accumulation={micro},optimizer=sgd" for micro in (1, 3)]


@pytest.mark.parametrize(
    ("got", "near"),
    [
        ("losses.valeu", ["losses.value"]),
        ("lossse.*", ["losses.value"]),
        ("clip", ["clip.norm", "clip.gradients"]),
        ("*.gradient", ["clip.gradients"]),
        ("value", ["losses.value", "gradients.value"]),
        ("Clip.Norm", ["clip.norm"]),
        ("clp_norm", ["clip.norm"]),
        ("gradient", ["clip.gradients", "gradients.value", "gradients.scale"]),
        ("gradints*", ["gradients.value", "gradients.scale"]),
        ("nope", []),
        ("zzz*", []),
        ("", []),
    ],
)
def test_a_pattern_is_mended_word_by_word(got: str, near: list[str]) -> None:
    assert near_matches(got, NAMES, patterns=True) == near


@pytest.mark.parametrize(
    ("got", "near"),
    [
        ("*trian*", ["*train*"]),
        ("train", ["*train*"]),
        ("mlp/train", ["*mlp/train*"]),
        ("*/trai", ["*/trai*"]),
        ("mpl/*adamW", ["mlp/*adamw"]),
        ("tiny/unused/optimizer=sgd", UNUSED_SGD),
        ("tiny/unsued/*=sdg", UNUSED_SGD),
        ("*/nope/*", []),
    ],
)
def test_more_than_a_few_names_are_answered_with_a_pattern_for_them(
    got: str, near: list[str]
) -> None:
    assert near_matches(got, CASES, patterns=True) == near


@pytest.mark.parametrize("got", ["gradient", "train", "clip"])
def test_where_a_name_is_asked_for_no_pattern_is_offered(got: str) -> None:
    near = near_matches(got, [*NAMES, *CASES])
    assert 0 < len(near) <= FEW
    assert set(near) <= {*NAMES, *CASES}


@pytest.mark.parametrize("names", [list(CHECKS), list(cases()), list(every_case())])
def test_what_is_offered_leads_to_something(names: list[str]) -> None:
    for name in names:
        slip = name[1] + name[0] + name[2:]
        offered = near_matches(slip, names, patterns=True)
        assert any(matches(name, pattern) for pattern in offered), (slip, offered)


def test_an_offer_can_be_typed_into_a_shell() -> None:
    assert offer(["clip.norm", "hybrid,replicas=2"]) == (
        "did you mean clip.norm or hybrid,replicas=2?"
    )
    assert offer(["*train*"]) == "did you mean '*train*'?"
    assert offer([]) == ""
