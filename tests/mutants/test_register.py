"""The laws of the register of mutants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import conformance
from conformance import models
from conformance.adapter import Adapter
from conformance.adapters import make_adapter
from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.errors import UsageError
from conformance.mutants import MUTANTS
from conformance.mutants.registry import mutant, mutant_named
from conformance.optimizers import OPTIMIZERS, WHOLE_TENSOR
from conformance.scenarios import SCENARIOS
from conformance.selftest import select_mutants

CATALOGUE = Path(conformance.__file__).parent / "mutants" / "catalogue.jsonl"
ALL = pytest.mark.parametrize("name", MUTANTS)


def catalogued() -> set[str]:
    return {json.loads(line)["id"] for line in CATALOGUE.read_text().splitlines()}


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_has_a_mutant(check: str) -> None:
    assert [m.name for m in MUTANTS.values() if m.check == check]


@ALL
def test_a_mutant_names_what_exists(name: str) -> None:
    row = MUTANTS[name]
    assert row.check in CHECKS
    assert row.cause in Cause
    assert set(row.bugs) <= catalogued()
    assert row.why.endswith(".")
    adapter, _ = make_adapter(row.base, row.variant)
    assert isinstance(adapter, Adapter)


@ALL
def test_a_mutants_case_can_be_run_and_is_judged_by_its_check(name: str) -> None:
    row = MUTANTS[name]
    case, check = Case.parse(row.case), CHECKS[row.check]
    assert case.optimizer in {**OPTIMIZERS, **WHOLE_TENSOR}
    model = models.case(case.model)
    assert case.scenario in SCENARIOS
    if check.judge is None:
        return
    assert case.scenario in check.scenarios
    assert check.applies(case, model)
    adapter, _ = make_adapter(row.base, row.variant)
    with row.planted(adapter) as planted:
        claims = planted.capabilities
    assert check.needs <= claims
    assert SCENARIOS[case.scenario].needs <= claims


@ALL
def test_a_mutant_leaves_its_base_as_it_was(name: str) -> None:
    row = MUTANTS[name]
    adapter, _ = make_adapter(row.base, row.variant)
    before = (type(adapter), dict(vars(adapter)), adapter.capabilities, adapter.conventions)
    with row.planted(adapter) as planted:
        assert isinstance(planted, row.defect)
        assert isinstance(planted, type(adapter))
    assert (type(adapter), vars(adapter), adapter.capabilities, adapter.conventions) == before


def test_a_name_cannot_be_registered_twice() -> None:
    name = next(iter(MUTANTS))
    twin = type("".join(part.title() for part in name.split("_")), (Adapter,), {"__doc__": "x."})
    with pytest.raises(ValueError, match=f"{name!r} is registered twice"):
        mutant(check="losses.value", cause=Cause.ZERO, case="mlp/train")(twin)


def test_a_misspelt_mutant_is_answered_with_the_near_match() -> None:
    with pytest.raises(UsageError, match="did you mean rank_killed"):
        mutant_named("rank_kiled")
    with pytest.raises(UsageError, match="no mutant 'xyz"):
        select_mutants(["xyz*"])


def test_mutants_are_selected_by_pattern() -> None:
    chosen = [row.name for row in select_mutants(["rank_*", "key_lost"])]
    assert set(chosen) == {
        "rank_killed",
        "rank_never_comes",
        "rank_exits_with_status_zero",
        "key_lost",
    }
