"""From raw findings to reported ones: control, power, probes, and faults of our own. No ranks."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import matrix as matrix_module
from conformance import power
from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.control import weigh
from conformance.expectations import Expectation, Expectations
from conformance.item import Item
from conformance.matrix import Matrix, NotStored
from conformance.mutants import MUTANTS
from conformance.power import without_power
from conformance.probes import claim_finding, probed_capabilities
from conformance.report.lines import Role
from conformance.room import no_room
from conformance.session import OracleFailed
from conformance.subject import Subject
from conformance.verdicts import REFUSED, Finding, Verdict
from conformance.work import planned_again
from tests.cli.literal import ADAPTER, CASE, finding

CHOSEN = [CHECKS["losses.value"], CHECKS["gradients.value"]]


SEQUENCE = "drawn:1.1/sequence/accumulation=1,acts=css,optimizer=sgd"


def item(role: Role = Role.JUDGED, probe: Sequence[str] = (), case: str = CASE) -> Item:
    planned = planned_again(case, probe, CHOSEN)
    return Item(subject=Subject(adapter=ADAPTER), planned=planned, role=role)


def matrix(**fields: object) -> Matrix:
    content = {
        "histories": lambda item: Path("history"),
        "root": Path("root"),
        "world": 2,
        "seed": 0,
    }
    return Matrix(**{**content, **fields})  # type: ignore[arg-type]


# -- control ----------------------------------------------------------------------------------

WRONG = finding("FAIL", "losses.value", cause=Cause.STALE, sentence="loss is stale")


def weighed(found: Finding, of_control: str, case: str = CASE) -> Finding:
    asked: list[Item] = []

    def judge(same: Item) -> list[Finding]:
        asked.append(same)
        return [finding(of_control, "losses.value", adapter=same.subject.adapter)]

    (result,) = weigh(item(case=case), [found], judge)
    assert [str(one.planned.case) for one in asked] == [case] * len(asked)
    return result


@pytest.mark.parametrize("case", [CASE, SEQUENCE])
def test_a_failure_that_the_baseline_shares_is_an_error_of_ours(case: str) -> None:
    result = weighed(WRONG, "FAIL", case)
    assert result.verdict is Verdict.ERROR
    assert result.sentence.startswith("torch.DistributedDataParallel fails here too")
    assert result.sentence.endswith("loss is stale")


def test_a_failure_that_the_baseline_does_not_share_stays() -> None:
    assert weighed(WRONG, "PASS") == WRONG


def test_the_baseline_is_not_asked_for_what_it_does_not_claim() -> None:
    claimed_by_none = SEQUENCE.replace("css", "wss")  # two forwards before two backwards
    assert weighed(WRONG, "FAIL", claimed_by_none) == WRONG


@pytest.mark.parametrize(
    "found",
    [finding("PASS"), finding("HANG", cause=Cause.HUNG), finding("FAIL", cause=Cause.EXCEPTION)],
    ids=lambda found: str(found.verdict),
)
@pytest.mark.parametrize("case", [CASE, SEQUENCE])
def test_the_baseline_is_asked_only_about_wrong_results(found: Finding, case: str) -> None:
    def never(same: Item) -> list[Finding]:
        pytest.fail(f"asked about {same}")

    assert weigh(item(case=case), [found], never) == [found]


# -- faults of ours ---------------------------------------------------------------------------


def test_a_case_without_room_on_the_disk_names_the_file_and_the_remedy() -> None:
    def full(same: Item) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "histories/case.json")

    (found,) = matrix(histories=full).judge(item())
    assert found.verdict is Verdict.ERROR
    assert found.sentence == no_room("histories/case.json", "the case was not run to its end")


# -- power ------------------------------------------------------------------------------------


def test_a_pass_without_a_mutant_that_shows_here_has_no_power(monkeypatch) -> None:
    some = next(iter(MUTANTS.values()))
    large = {
        name: replace(some, name=name, check="losses.value", world=world)
        for name, world in (("b", 4), ("a", 3))
    }
    monkeypatch.setattr(power, "MUTANTS", large)
    found = without_power(finding("PASS"), 2)
    assert found.verdict is Verdict.NO_POWER
    assert found.sentence == ("cannot fail with 2 ranks: its mutants (a, b) show from 3 ranks on")
    assert without_power(finding("PASS"), 3).verdict is Verdict.PASS
    assert without_power(finding("FAIL"), 2).verdict is Verdict.FAIL
    assert without_power(finding("PASS", "gradients.value"), 2).verdict is Verdict.PASS


# -- probes -----------------------------------------------------------------------------------


def claimed(*verdicts: str, first: str = "check.number0", told: str = "sentence") -> Finding:
    planned = planned_again(CASE, ("gradients", "no_sync"), CHOSEN)
    findings = [
        finding(verdict, f"check.number{n}" if n else first, sentence=f"{told} {n}")
        for n, verdict in enumerate(verdicts)
    ]
    return claim_finding(planned, findings)


def test_a_probe_whose_checks_pass_may_be_claimed() -> None:
    found = claimed("PASS", "PASS")
    assert found.verdict is Verdict.UNSUPPORTED
    assert found.where["works"] is True
    assert found.sentence.endswith("you may claim gradients and no_sync")
    assert found.check == "claim.gradients+no_sync"
    assert found.check in found.repro


@pytest.mark.parametrize("verdict", ["FAIL", "HANG", "CRASH", "VACUOUS", "ERROR"])
def test_a_probe_that_goes_wrong_is_no_failure(verdict: str) -> None:
    found = claimed("PASS", verdict)
    assert found.verdict is Verdict.UNSUPPORTED
    assert found.where["works"] is False
    assert found.sentence == "not claimed, and it does not work here: check.number1: sentence 1"


def test_a_check_that_needs_another_claim_says_nothing_of_a_probe() -> None:
    found = claimed("PASS", "PASS", "UNSUPPORTED", first="run.completed")
    assert found.where["works"] is True
    assert "(run.completed, check.number1 pass): you may claim" in found.sentence
    found = claimed("PASS", "UNSUPPORTED", first="run.completed")
    assert found.where["works"] is False
    assert found.sentence == (
        "not claimed, and nothing judged whether it works here: check.number1: sentence 1"
    )


def test_a_probe_that_the_wrapper_refuses_to_build_does_not_work() -> None:
    found = claimed("UNSUPPORTED", "UNSUPPORTED", first="run.completed", told=REFUSED)
    assert found.where["works"] is False
    assert found.sentence == f"not claimed, and it does not work here: run.completed: {REFUSED} 0"


def test_a_probe_that_this_machine_is_too_small_for_is_not_judged() -> None:
    found = claimed("UNSUPPORTED", "UNSUPPORTED", first="run.completed", told="needs 4 devices")
    assert found.where["works"] is False
    assert found.sentence == (
        "not claimed, and nothing judged whether it works here: run.completed: needs 4 devices 0"
    )


def test_the_id_of_a_probe_names_its_capabilities() -> None:
    assert probed_capabilities(claimed("PASS").check) == ("gradients", "no_sync")
    assert probed_capabilities("losses.value") == ()


# -- expectations -----------------------------------------------------------------------------


def test_expectations_are_applied_to_what_is_judged_and_not_to_the_control(monkeypatch) -> None:
    crash = finding("CRASH", cause=Cause.CRASHED)
    monkeypatch.setattr(matrix_module, "judge_stored", lambda d, root, checks: [crash])
    lines = Expectations([Expectation(pattern="losses.value@*", reason="known")])
    (expected,) = matrix(expectations=lines).report(item())
    assert (expected.finding.verdict, expected.reason) == (Verdict.XFAIL, "known")
    (control,) = matrix(expectations=lines).report(item(Role.CONTROL))
    assert control.finding.verdict is Verdict.CRASH


# -- faults of our own --------------------------------------------------------------------------


def test_a_failing_oracle_is_an_error_of_its_case_only() -> None:
    def failing(item: Item) -> Path:
        raise OracleFailed("the oracle failed on mlp\nTraceback")

    (found,) = matrix(histories=failing).judge(item())
    assert (found.check, found.verdict) == ("run.completed", Verdict.ERROR)
    assert found.sentence == "the oracle failed on mlp"
    assert found.where["traceback"] == "Traceback"


def test_a_check_that_raises_does_not_silence_the_others(monkeypatch) -> None:
    def stored(directory: Path, root: Path, checks: Sequence[object]) -> list[Finding]:
        if CHECKS["losses.value"] in checks:
            raise ZeroDivisionError("by zero")
        return [finding("PASS", "run.completed"), *(finding("PASS", c.id) for c in checks)]

    monkeypatch.setattr(matrix_module, "judge_stored", stored)
    found = {f.check: f for f in matrix().judge(item())}
    assert {check: str(f.verdict) for check, f in found.items()} == {
        "run.completed": "PASS",
        "losses.value": "ERROR",
        "gradients.value": "PASS",
    }
    assert found["losses.value"].sentence == "the check itself raised ZeroDivisionError: by zero"


def test_a_missing_history_is_not_taken_for_a_finding() -> None:
    def missing(item: Item) -> Path:
        raise NotStored("no history")

    with pytest.raises(NotStored):
        matrix(histories=missing).report(item())


def test_every_item_is_judged_once_whatever_the_number_of_threads(monkeypatch) -> None:
    judged: list[str] = []

    def histories(item: Item) -> Path:
        judged.append(item.subject.variant)
        return Path(item.subject.variant)

    monkeypatch.setattr(matrix_module, "judge_stored", lambda d, root, checks: [finding("PASS")])
    items = [replace(item(), subject=Subject(adapter=ADAPTER, variant=str(n))) for n in range(20)]
    done = [one.subject.variant for one, _ in matrix(histories=histories).run(items, jobs=3)]
    assert sorted(done) == sorted(judged) == sorted(str(n) for n in range(20))


def models_by_thread(monkeypatch, models: Sequence[str]) -> list[list[str]]:
    """Judge a case of each of `models` in two threads that go step by step: the models of either.

    A thread that gets nothing breaks the barrier of the other one.
    """
    taken: dict[int, set[str]] = {}
    both = threading.Barrier(2)

    def histories(item: Item) -> Path:
        both.wait(timeout=120)
        taken.setdefault(threading.get_ident(), set()).add(item.planned.case.model)
        return Path("history")

    monkeypatch.setattr(matrix_module, "judge_stored", lambda d, root, checks: [finding("PASS")])
    items = [item(case=CASE.replace("mlp", model)) for model in models]
    reported = [one for _, found in matrix(histories=histories).run(items, jobs=2) for one in found]
    assert [str(one.finding.verdict) for one in reported] == ["PASS"] * len(models)
    return sorted(sorted(own) for own in taken.values())


def test_the_cases_of_a_model_are_one_threads(monkeypatch) -> None:
    models = ["mlp", "mlp", "tiny", "tiny", "mlp", "mlp", "tiny", "tiny"]
    assert models_by_thread(monkeypatch, models) == [["mlp"], ["tiny"]]


def test_a_thread_without_models_of_its_own_helps(monkeypatch) -> None:
    models = ["mlp", "tiny", "mlp", "mlp", "mlp", "mlp"]
    assert models_by_thread(monkeypatch, models) == [["mlp"], ["mlp", "tiny"]]
