"""The protocol carries engines: one that owns backward and step conforms, and lies are reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.case import Case
from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import Finding, Verdict

pytestmark = pytest.mark.usefixtures("forkserver")

ENGINE = "tests.engine.adapter"
LINES_OF_CODE = 40


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two ranks; the oracle's runs are shared by the tests of this folder."""
    with Session(Setting(directory=tmp_path_factory.mktemp("histories"))) as running:
        yield running


def findings(session: Session, adapter: str, case: str) -> list[Finding]:
    subject = Subject(adapter=f"{ENGINE}:{adapter}")
    return session.judge_case(subject, Case.parse(case), list(CHECKS.values()))


@pytest.mark.parametrize(
    "case",
    [
        "mlp/train/accumulation=1,optimizer=adamw",
        "mlp/train/accumulation=3,optimizer=sgd",
        "batchnorm/train/accumulation=1,optimizer=sgd",
        "unused/unused/accumulation=3,optimizer=adamw",
        "mlp/checkpoint/kind=full,options=default",
        "batchnorm/checkpoint/kind=save",
    ],
)
def test_all_that_the_engine_claims_holds(session: Session, case: str) -> None:
    found = findings(session, "EngineAdapter", case)
    bad = [f"{f.verdict} {f.check}: {f.sentence}" for f in found if f.verdict is not Verdict.PASS]
    assert [line for line in bad if not line.startswith("UNSUPPORTED")] == []
    passed = {f.check for f in found if f.verdict is Verdict.PASS}
    assert {"run.completed", "losses.value", "parameters.end"} <= passed


@pytest.mark.parametrize(
    ("adapter", "case", "causes"),
    [
        (
            "DeclaresTheMean",
            "mlp/train/accumulation=1,optimizer=sgd",
            {Cause.SUMMED_NOT_AVERAGED, Cause.CONVENTION_BROKEN},
        ),
        (
            "DeclaresNoDivision",
            "mlp/train/accumulation=3,optimizer=sgd",
            {Cause.DIVIDED_TWICE, Cause.CONVENTION_BROKEN},
        ),
        (
            "DeclaresNoGradient",
            "unused/unused/accumulation=1,optimizer=adamw",
            {Cause.UNEXPECTED_GRADIENT, Cause.CONVENTION_BROKEN},
        ),
    ],
)
def test_a_broken_convention_is_reported(
    session: Session, adapter: str, case: str, causes: set[Cause]
) -> None:
    failed = [f for f in findings(session, adapter, case) if f.verdict is Verdict.FAIL]
    assert failed, f"{adapter} passed"
    assert failed[0].cause in causes, failed[0].sentence


def test_the_engine_is_as_short_as_it_says() -> None:
    source = Path(__file__).with_name("engine.py").read_text()
    code = source[source.index("class Engine") :]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= LINES_OF_CODE
