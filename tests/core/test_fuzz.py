"""The search, on wrappers that exist only as a function: what is met, and how small it gets."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from conformance.adapter import CAPABILITIES
from conformance.adapters import make_adapter
from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.cli.fuzzing import Judged
from conformance.drawing import examples
from conformance.expectations import Expectations
from conformance.fuzz import ROUND, Judge, Search, kind_of
from conformance.item import Item
from conformance.matrix import Matrix
from conformance.models import case
from conformance.report.lines import Reported
from conformance.scenarios.sequence import ACTS
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import Finding, Verdict

NAME = "torch.fully_shard"


def search(judge: Judge, number: int = 150, claims: frozenset[str] | None = None) -> Search:
    adapter = make_adapter(NAME, "default")[0]
    adapter.capabilities = frozenset(CAPABILITIES) if claims is None else claims
    subjects = [(Subject(adapter=NAME, variant=v), adapter) for v in ("default", "hybrid")]
    return Search(judge=judge, strategy=examples(subjects, list(CHECKS.values())), examples=number)


def finding(item: Item, verdict: Verdict, **more: object) -> Finding:
    wanted = {"check": "losses.value", "cause": Cause.STALE} | more
    address = {"adapter": NAME, "variant": item.subject.variant, "case": str(item.planned.case)}
    return Finding(seed=0, verdict=verdict, **address, **wanted)  # type: ignore[arg-type]


def wrong_if(*rules: tuple[str, dict[str, object]]) -> Judge:
    """A wrapper that is wrong whenever a word of the case says so."""

    def judge(item: Item) -> Sequence[Finding]:
        text = f"{item.subject.variant} {item.planned.case}"
        return [finding(item, Verdict.FAIL, **more) for word, more in rules if word in text] or [
            finding(item, Verdict.PASS)
        ]

    return judge


def test_a_right_wrapper_is_judged_as_often_as_was_asked_for() -> None:
    judged: list[str] = []

    def judge(item: Item) -> Sequence[Finding]:
        judged.append(f"{item.subject.variant} {item.planned.case}")
        return [finding(item, Verdict.PASS)]

    found = search(judge, 200)
    assert not list(found.deviations())
    assert found.tried == len(judged) == 200
    assert len(set(judged)) > 130
    for word in ("default", "hybrid", "sequence", "checkpoint", "(", ")r", ")f"):
        assert any(word in each for each in judged), word
    acts = {a for each in judged for a in each.partition("acts=")[2].partition(",")[0]}
    assert acts == set(ACTS)


def test_a_deviation_is_made_as_small_as_it_gets() -> None:
    (found,) = search(wrong_if((")r", {}))).deviations()
    case_found = found.item.planned.case
    assert case_found.model == "drawn:1.(1)r.1"
    assert (case_found.scenario, case_found.option("acts")) == ("sequence", "ss")
    assert found.item.subject.variant == "default"
    assert found.finding.case == str(case_found)
    assert ")r" in found.met
    assert len(found.met) >= len(found.finding.case)
    assert found.steady


def drawn(number: int) -> list[str]:
    judged: list[str] = []

    def judge(item: Item) -> Sequence[Finding]:
        judged.append(f"{item.subject.variant} {item.planned.case}")
        return [finding(item, Verdict.PASS)]

    assert not list(search(judge, number).deviations())
    return judged


def test_a_seed_draws_the_same_whatever_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn(60)
    # Hypothesis takes constants from the source of what is imported, where they may be drawn
    words = ["".join(letters) for letters in product(ACTS, repeat=3)]
    (tmp_path / "full_of_constants.py").write_text(f"W = {words}\nN = {list(range(-200, 300))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("full_of_constants")
    assert drawn(60) == before


def test_a_longer_search_begins_with_the_examples_of_a_shorter_one() -> None:
    whole = drawn(ROUND + 20)
    assert whole[:3] == drawn(3)
    assert whole[: ROUND + 5] == drawn(ROUND + 5)
    assert len(set(whole[ROUND:])) > 10, "a second round draws others"
    assert not set(whole[ROUND + 10 :]) <= set(whole[:ROUND])


def test_several_deviations_are_told_apart() -> None:
    rules = (
        (")f", {"check": "frozen.kept", "cause": Cause.FROZEN_CHANGED}),
        ("s.", {"check": "gradients.value"}),
        ("checkpoint", {"check": "resume.model"}),
    )
    found = {d.finding.check: d for d in search(wrong_if(*rules), 500).deviations()}
    assert set(found) == {"frozen.kept", "gradients.value", "resume.model"}
    assert found["frozen.kept"].item.planned.case.model in ("drawn:1.(1)f.1", "drawn:1.(1)fr.1")
    assert found["resume.model"].item.planned.case.scenario == "checkpoint"
    for check, deviation in found.items():  # none has become another one while it was made smaller
        first_met = next(more["check"] for word, more in rules if word in deviation.met)
        assert first_met == check


def test_an_exception_is_another_one_if_it_says_something_else() -> None:
    def told(sentence: str) -> tuple[str, ...]:
        return kind_of(
            Finding(
                check="run.completed",
                adapter=NAME,
                variant="default",
                case="mlp/train",
                seed=0,
                verdict=Verdict.FAIL,
                cause=Cause.EXCEPTION,
                sentence=sentence,
            )
        )

    one = told("phase 'step 2' raised on rank 1: ValueError: size 7 of [3, 4] is 0.5")
    assert one == told("phase 'step 0' raised on rank 0: ValueError: size 9 of [1] is 1.5e-08")
    assert one != told("phase 'step 2' raised on rank 1: KeyError: size 7 of [3, 4] is 0.5")


def test_what_is_wrong_once_only_is_said_to_be() -> None:
    seen: list[Item] = []

    def judge(item: Item) -> Sequence[Finding]:
        seen.append(item)
        wrong = len(seen) == 5
        return [finding(item, Verdict.FAIL if wrong else Verdict.PASS)]

    (found,) = search(judge, 30).deviations()
    assert not found.steady
    assert found.item is seen[4]
    assert found.tried == 5


@pytest.mark.parametrize("steady", [False, True])
def test_the_command_runs_again_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, steady: bool
) -> None:
    runs: list[Item] = []

    def report(_: Matrix, item: Item) -> list[Reported]:
        runs.append(item)
        wrong = len(runs) >= 5 if steady else len(runs) == 5
        return [Reported(finding=finding(item, Verdict.FAIL if wrong else Verdict.PASS))]

    monkeypatch.setattr(Matrix, "report", report)
    session = Session(Setting(directory=tmp_path))
    judged = Judged(session, Expectations(), with_control=False)
    (found,) = search(judged, 5).deviations()
    assert found.steady is steady


def test_only_what_is_claimed_is_asked_for() -> None:
    asked: set[str] = set()

    def judge(item: Item) -> Sequence[Finding]:
        asked.add(item.planned.case.scenario)
        acts = item.planned.case.option("acts")
        assert not set(acts) & set("imdnw"), acts
        assert case(item.planned.case.model).units
        return [finding(item, Verdict.PASS)]

    assert not list(search(judge, 80, frozenset()).deviations())
    assert asked == {"sequence", "train", "eval_first"}
