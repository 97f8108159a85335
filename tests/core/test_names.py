"""Cases, findings and adapter labels as strings, and what the exit status follows from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import names
from conformance.case import Case
from conformance.checks import CHECKS
from conformance.cli import options
from conformance.errors import UsageError
from conformance.models import cases
from conformance.mutants import MUTANTS
from conformance.plan import select_checks, select_models
from conformance.verdicts import Verdict, exit_status, finding_id, parse_finding_id

WORD = st.from_regex(r"[a-z][a-z_.0-9]{0,8}", fullmatch=True)


@given(WORD, WORD, st.dictionaries(WORD, WORD, max_size=3))
def test_a_case_is_what_its_string_says(model: str, scenario: str, options: dict[str, str]) -> None:
    case = Case.of(model, scenario, **options)
    assert Case.parse(str(case)) == case


@given(WORD, WORD, st.sampled_from(["default", "a=1,b", "use_orig_params,HYBRID"]), st.integers(0))
def test_a_finding_id_names_its_parts(check: str, adapter: str, variant: str, seed: int) -> None:
    case = str(Case.of("mlp", "train", accumulation=3))
    text = finding_id(check, adapter, variant, case, seed)
    assert parse_finding_id(text) == (check, adapter, variant, case, seed)


@pytest.mark.parametrize("text", ["", "mlp", "a/b/c/d", "mlp/train/x", "mlp/train/x=", "a/b/"])
def test_a_malformed_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a case"):
        Case.parse(text)


@pytest.mark.parametrize(
    "text", ["", "a@b", "losses.value@x/mlp/train", "@x/mlp/train#0", "a@b[c/d#0"]
)
def test_a_malformed_finding_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"finding id|bracket"):
        parse_finding_id(text)


@pytest.mark.parametrize(
    ("verdicts", "stale", "status"),
    [
        ([Verdict.PASS], 0, 0),
        ([Verdict.PASS, Verdict.XFAIL, Verdict.UNSUPPORTED], 0, 0),
        ([Verdict.PASS], 1, 1),
        ([Verdict.PASS, Verdict.FAIL], 0, 1),
        ([Verdict.PASS, Verdict.XPASS], 0, 1),
        ([Verdict.HANG, Verdict.BLOCKED], 0, 1),
        ([Verdict.CRASH], 0, 1),
        ([Verdict.DESYNC], 0, 1),
        ([Verdict.PASS, Verdict.VACUOUS], 0, 2),
        ([Verdict.PASS, Verdict.NO_POWER], 0, 2),
        ([Verdict.PASS, Verdict.ERROR], 0, 2),
        ([], 0, 2),
        ([Verdict.UNSUPPORTED], 0, 2),
    ],
)
def test_the_exit_status_follows_from_the_verdicts(
    verdicts: list[Verdict], stale: int, status: int
) -> None:
    assert exit_status(verdicts, stale_expectations=stale) == status


def test_a_misspelt_check_is_refused_with_the_near_match() -> None:
    with pytest.raises(UsageError, match=r"no check 'losses.valeu'; did you mean losses.value"):
        select_checks(patterns=["losses.valeu"])


def test_a_misspelt_model_is_refused_with_the_near_match() -> None:
    with pytest.raises(UsageError, match="no model 'transfomer'; did you mean transformer"):
        select_models(["transfomer"])


def test_a_misspelt_profile_is_refused_with_the_near_match() -> None:
    with pytest.raises(UsageError, match="no profile 'cores'; did you mean core"):
        select_checks(profiles=["cores"])


@pytest.mark.parametrize(
    ("read", "registered"),
    [(names.check_ids, CHECKS), (names.model_names, cases()), (names.mutant_names, MUTANTS)],
    ids=["checks", "models", "mutants"],
)
def test_names_that_are_read_from_modules_are_those_that_these_register(read, registered) -> None:
    assert read() == set(registered)


def test_names_that_cannot_be_read_are_left_to_the_command(monkeypatch) -> None:
    for read in ("check_ids", "model_names", "mutant_names"):
        monkeypatch.setattr(options, read, frozenset)
    options.matching("check", options.check_ids)("losses.value")
    options._is_mutant("summed")
    options._of_a_model("mlp/train")
