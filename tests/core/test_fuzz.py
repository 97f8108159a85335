"""The search, on wrappers that exist only as a function: what is met, and how small it gets."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from conformance.adapter import Adapter, Conventions
from conformance.adapters import make_adapter
from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.checks.sharding import needed
from conformance.cli.fuzzing import Judged
from conformance.drawing import LEAST_NORMALISED, Example, examples
from conformance.expectations import Expectations
from conformance.fuzz import ROUND, Judge, Search, is_refusal, kind_of
from conformance.matrix import Matrix
from conformance.models import case
from conformance.names import CAPABILITIES
from conformance.plan import judges
from conformance.report.lines import Reported
from conformance.scenarios.sequence import ACTS
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import Finding, Verdict, adapter_label

NAME = "torch.fully_shard"
PAIRS = "conformance.adapters.torch_fsdp2:PairsAdapter"
SUBJECTS = (
    Subject(adapter=NAME),
    Subject(adapter=NAME, variant="hybrid"),
    Subject(adapter=NAME, variant="hybrid,replicas=2"),
    Subject(adapter=PAIRS, variant="reshard_after_forward=1,hybrid"),
)


def claiming(claims: frozenset[str] | None = None, subject: Subject = SUBJECTS[0]) -> Adapter:
    """An adapter with all claims, or with these."""
    adapter = make_adapter(subject.adapter, subject.variant)[0]
    adapter.capabilities = frozenset(CAPABILITIES) if claims is None else claims
    return adapter


def search(judge: Judge, number: int = 150, claims: frozenset[str] | None = None) -> Search:
    subjects = [(subject, claiming(claims, subject)) for subject in SUBJECTS]
    strategy = examples(subjects, list(CHECKS.values()), [1, 2, 4])
    return Search(judge=judge, strategy=strategy, examples=number)


def finding(item: Example, verdict: Verdict, **more: object) -> Finding:
    wanted = {"check": "losses.value", "cause": Cause.STALE} | more
    subject, case_run = item.subject, str(item.planned.case)
    address = {"adapter": subject.adapter, "variant": subject.variant, "case": case_run}
    return Finding(seed=0, verdict=verdict, **address, **wanted)  # type: ignore[arg-type]


def wrong_if(*rules: tuple[str, dict[str, object]]) -> Judge:
    """A wrapper that is wrong whenever a word of the example says so."""

    def judge(item: Example) -> Sequence[Finding]:
        text = str(item)
        return [finding(item, Verdict.FAIL, **more) for word, more in rules if word in text] or [
            finding(item, Verdict.PASS)
        ]

    return judge


def test_a_right_wrapper_is_judged_as_often_as_was_asked_for() -> None:
    judged: list[str] = []

    def judge(item: Example) -> Sequence[Finding]:
        judged.append(str(item))
        return [finding(item, Verdict.PASS)]

    found = search(judge, 200)
    assert not list(found.deviations())
    assert found.tried == len(judged) == 200
    assert len(set(judged)) > 130
    for word in ("sequence", "checkpoint", "(", ")r", ")f", "d."):
        assert any(word in each for each in judged), word
    normalised = {int(n) for each in judged for n in re.findall(r"[.(:](\d)[a-z]*n", each)}
    assert min(normalised) == LEAST_NORMALISED
    # two replicas need two ranks; every other variant meets every world
    worlds = ("of 1 rank", "of 2 ranks", "of 4 ranks")
    labels = [adapter_label(subject.adapter, subject.variant) for subject in SUBJECTS]
    met = {(label, w) for label in labels for w in worlds if _is_met(f"{label}/", w, judged)}
    assert met == set(product(labels, worlds)) - {(f"{NAME}[hybrid,replicas=2]", "of 1 rank")}
    acts = {a for each in judged for a in each.partition("acts=")[2].partition(",")[0]}
    assert acts == set(ACTS)


def _is_met(label: str, world: str, judged: Sequence[str]) -> bool:
    return any(each.startswith(label) and each.endswith(world) for each in judged)


def test_a_deviation_is_made_as_small_as_it_gets() -> None:
    (found,) = search(wrong_if((")r", {}))).deviations()
    case_found = found.example.planned.case
    assert case_found.model == "drawn:1.(1)r.1"
    assert (case_found.scenario, case_found.option("acts")) == ("sequence", "ss")
    assert (found.example.subject, found.example.world) == (SUBJECTS[0], 1)
    assert found.finding.case == str(case_found)
    assert ")r" in str(found.met)
    assert len(str(found.met)) >= len(str(found.example))
    assert found.steady


@pytest.mark.parametrize(
    ("word", "subject", "world"),
    [
        ("of 4 ranks", SUBJECTS[0], 4),
        ("ranks", SUBJECTS[0], 2),
        ("hybrid]", SUBJECTS[1], 1),
        ("replicas=2", SUBJECTS[2], 2),
        ("PairsAdapter", SUBJECTS[3], 1),
    ],
)
def test_a_deviation_goes_to_the_fewest_ranks_and_the_first_variant_that_show_it(
    word: str, subject: Subject, world: int
) -> None:
    (found,) = search(wrong_if((word, {})), 40).deviations()
    assert (found.example.subject, found.example.world) == (subject, world)
    assert found.example.planned.case.model == "drawn:1.1"


def drawn(number: int) -> list[str]:
    judged: list[str] = []

    def judge(item: Example) -> Sequence[Finding]:
        judged.append(str(item))
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
    assert found["frozen.kept"].example.planned.case.model in ("drawn:1.(1)f.1", "drawn:1.(1)fr.1")
    assert found["resume.model"].example.planned.case.scenario == "checkpoint"
    for check, deviation in found.items():  # none has become another one while it was made smaller
        first_met = next(more["check"] for word, more in rules if word in str(deviation.met))
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
    seen: list[Example] = []

    def judge(item: Example) -> Sequence[Finding]:
        seen.append(item)
        wrong = len(seen) == 5
        return [finding(item, Verdict.FAIL if wrong else Verdict.PASS)]

    (found,) = search(judge, 30).deviations()
    assert not found.steady
    assert found.example is seen[4]
    assert found.tried == 5


def test_what_is_wrong_once_only_hides_nothing_of_its_kind() -> None:
    seen: list[Example] = []

    def judge(item: Example) -> Sequence[Finding]:
        seen.append(item)
        wrong = len(seen) == 5 or (len(seen) > 20 and ")r" in str(item))
        return [finding(item, Verdict.FAIL if wrong else Verdict.PASS)]

    first, second = search(judge, 200).deviations()
    assert (first.steady, second.steady) == (False, True)
    assert kind_of(first.finding) == kind_of(second.finding)
    assert second.example.planned.case.model == "drawn:1.(1)r.1"


@pytest.mark.parametrize("steady", [False, True])
def test_the_command_runs_again_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, steady: bool
) -> None:
    runs: list[Example] = []

    def report(_: Matrix, item: Example) -> list[Reported]:
        runs.append(item)
        wrong = len(runs) >= 5 if steady else len(runs) == 5
        return [Reported(finding=finding(item, Verdict.FAIL if wrong else Verdict.PASS))]

    monkeypatch.setattr(Matrix, "report", report)
    settings = {world: Setting(world=world, directory=tmp_path / str(world)) for world in (1, 2, 4)}
    with Judged(settings, Expectations(), with_control=False) as judged:
        (found,) = search(judged, 5).deviations()
    assert found.steady is steady


def test_each_world_has_ranks_of_its_own_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[Session, Subject, str]] = []

    def run(session: Session, subject: Subject, what: Case, **_: object) -> Path:
        ran.append((session, subject, str(what)))
        raise RuntimeError("no ranks here")

    monkeypatch.setattr(Session, "run", run)
    asked: list[Example] = []
    assert not list(search(lambda item: asked.append(item) or [], 12).deviations())
    asked = [replace(one, world=world) for one in asked for world in (1, 2, 4)]
    settings = {world: Setting(world=world, directory=tmp_path / str(world)) for world in (1, 2, 4)}
    with Judged(settings, Expectations(), with_control=False) as judged:
        for one in (*asked, *asked):
            judged(one)
    due = dict.fromkeys((one.world, one.subject, str(one.planned.case)) for one in asked)
    assert [(session.setting.world, *what) for session, *what in ran] == list(due)
    assert {(s.setting.world, s.setting.directory) for s, *_ in ran} == {
        (world, setting.directory) for world, setting in settings.items()
    }
    assert len({id(session) for session, *_ in ran}) == 3
    assert judged.faults


def test_refused_examples_are_counted_but_not_those_of_shrinking() -> None:
    refused: list[Example] = []

    def judge(item: Example) -> Sequence[Finding]:
        if ")f" in str(item):
            return [finding(item, Verdict.FAIL)]
        refused.append(item)
        return [finding(item, Verdict.UNSUPPORTED, check="run.completed", cause=None)]

    looking = search(judge, 40)
    (met,) = looking.deviations()
    assert (met.tried - 1) <= looking.refused < looking.tried == 40
    assert looking.refused < len(refused)
    assert not any(map(is_refusal, [finding(met.example, Verdict.UNSUPPORTED)]))


def tells(item: Example) -> bool:
    """Whether a copy on every rank takes more bytes than shards."""
    parameters = list(case(item.planned.case.model).build().parameters())
    size = parameters[0].element_size()
    whole = size * sum(parameter.numel() for parameter in parameters)
    shapes = [tuple(parameter.shape) for parameter in parameters]
    return needed(shapes, size, item.world) < item.world * whole


def test_a_short_search_has_examples_that_tell_what_is_not_sharded() -> None:
    """Measured: 3 to 14 of 25, of the seeds from 0 to 19."""
    met: list[int] = []
    for seed in range(3):
        judged: list[Example] = []
        strategy = examples([(SUBJECTS[0], claiming())], list(CHECKS.values()), [1, 2, 4])

        def judge(item: Example, judged: list[Example] = judged) -> Sequence[Finding]:
            judged.append(item)
            return []

        list(Search(judge=judge, strategy=strategy, examples=25, seed=seed).deviations())
        bytes_are_judged = [
            item for item in judged if CHECKS["sharding.bytes"] in item.planned.checks
        ]
        met.append(sum(tells(item) for item in bytes_are_judged))
    assert min(met) > 2


def test_a_drawn_sequence_is_judged_by_what_judges_a_training() -> None:
    model = case("drawn:6.(7b.5n).3")
    acts = Case.of(model.name, "sequence", acts="dess", accumulation=3)
    training = Case.of(model.name, "train", accumulation=3)
    assert set(judges(training, model, [*CHECKS.values()])) == set(
        judges(acts, model, [*CHECKS.values()])
    )


@pytest.mark.parametrize("declared", ["parameter", "float64", "bfloat16"])
def test_models_in_float64_are_for_who_is_told_no_dtypes(declared: str) -> None:
    adapter = claiming()
    adapter.conventions = Conventions(reduced_as=declared)  # type: ignore[arg-type]
    drawn: set[bool] = set()

    def judge(item: Example) -> Sequence[Finding]:
        drawn.add(case(item.planned.case.model).dtype == torch.float64)
        return []

    strategy = examples([(SUBJECTS[0], adapter)], list(CHECKS.values()), [1])
    list(Search(judge=judge, strategy=strategy, examples=60).deviations())
    assert drawn == ({False, True} if declared == "parameter" else {False})


def test_what_is_wrong_in_float64_alone_is_shown_in_it_and_all_else_in_float32() -> None:
    (double,) = search(wrong_if(("d.", {}))).deviations()
    assert double.example.planned.case.model == "drawn:1d.1"
    (any_dtype,) = search(wrong_if(("drawn:", {}))).deviations()
    assert any_dtype.example.planned.case.model == "drawn:1.1"


def test_only_what_is_claimed_is_asked_for() -> None:
    asked: set[str] = set()

    def judge(item: Example) -> Sequence[Finding]:
        asked.add(item.planned.case.scenario)
        acts = item.planned.case.option("acts")
        assert not set(acts) & set("imdnw"), acts
        assert case(item.planned.case.model).units
        return [finding(item, Verdict.PASS)]

    assert not list(search(judge, 80, frozenset()).deviations())
    assert asked == {"sequence", "train", "eval_first"}
