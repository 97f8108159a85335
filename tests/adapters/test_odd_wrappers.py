"""Wrappers that do the right thing in a way of their own raise no alarm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.adapters import make_adapter
from conformance.adapters.odd import ODD
from conformance.checks import CHECKS
from conformance.false_alarms import ALARM
from conformance.item import Item
from conformance.matrix import Matrix
from conformance.models import case
from conformance.names import Depth
from conformance.plan import plan
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import Finding, Verdict

pytestmark = pytest.mark.usefixtures("forkserver")

SHARDED = "conformance.adapters.odd.interleaved:InterleavedShards"
LATE = "conformance.adapters.odd.reductions:FinishedInTheStep"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two ranks and a seed that is not the usual one; who agrees in conventions shares oracles."""
    with Session(Setting(seed=3, directory=tmp_path_factory.mktemp("odd"))) as shared:
        yield shared


def judged(session: Session, name: str, models: tuple[str, ...], depth: Depth) -> list[Finding]:
    """Everything found about an odd wrapper on some models."""
    subject = Subject(adapter=name)
    claims = make_adapter(name)[0].capabilities
    matrix = Matrix(
        histories=lambda item: session.run(item.subject, item.planned.case),
        root=session.setting.directory,
        world=session.setting.world,
        seed=session.setting.seed,
        with_control=False,
    )
    planned = plan(claims, list(CHECKS.values()), [case(model) for model in models], depth=depth)
    return [one.finding for p in planned for one in matrix.report(Item(subject=subject, planned=p))]


def no_alarm(findings: list[Finding]) -> None:
    assert [f"{f.id}: {f.sentence}" for f in findings if f.verdict in ALARM] == []
    assert sum(f.verdict is Verdict.PASS for f in findings) > len(findings) / 2


@pytest.mark.parametrize("name", [SHARDED, LATE])
def test_two_of_them_train_a_model_without_alarm(session: Session, name: str) -> None:
    no_alarm(judged(session, name, ("uneven",), Depth.NARROW))


@pytest.mark.long
@pytest.mark.parametrize("name", ODD)
def test_none_raises_an_alarm_on_models_of_every_kind(session: Session, name: str) -> None:
    models = ("mlp", "transformer", "batchnorm", "unused", "varying", "frozen", "tiny", "strided")
    no_alarm(judged(session, name, models, Depth.WIDE))
