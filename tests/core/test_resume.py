"""A case of two jobs: which ranks they have, what each leaves, and how both are judged as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance import session as module
from conformance.case import Case
from conformance.checks import CHECKS
from conformance.errors import UsageError
from conformance.history import History, Observation, Phase, RankHistory
from conformance.per_rank import PerRank
from conformance.scenarios.carriers import Held, InFile
from conformance.scenarios.resume import second_world
from conformance.session import Session, Setting
from conformance.stored import Stored, judge_stored
from conformance.subject import Subject
from conformance.verdicts import COMPLETED, Finding, Verdict
from tests.core.resuming import Troubled
from tests.ranks.leasing import fake_leases

ADAPTER = f"{Troubled.__module__}:{Troubled.__name__}"
DOUBLE = Case.of("mlp", "resume", kind="full", ranks="double")
HALF = Case.of("mlp", "resume", kind="full", ranks="half")


@pytest.mark.parametrize(
    ("case", "worlds"),
    [(DOUBLE, (2, 4, 6, 8)), (HALF, (1, 1, 1, 2)), (Case.of("mlp", "checkpoint"), (None,) * 4)],
    ids=str,
)
def test_the_second_job_has_twice_or_half_the_ranks(case: Case, worlds) -> None:
    assert tuple(second_world(case, world) for world in (1, 2, 3, 4)) == worlds


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mlp/resume/kind=full,ranks=dubble", "ranks= .*dubble.*; did you mean double"),
        ("mlp/resume/kind=sharded,ranks=half", "kind= .*sharded"),
        ("mlp/resume", "kind= "),
    ],
)
def test_another_second_job_is_refused_by_name(case: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        second_world(Case.parse(case), 2)


def test_a_file_carries_what_rank_0_put(tmp_path: Path) -> None:
    first, second = (InFile(path=tmp_path / "states", rank=rank) for rank in (0, 1))
    second.put(({"w": torch.ones(3)}, {}))
    first.put(({"w": torch.arange(3.0)}, {"step": 2}))
    second.put(({"w": torch.ones(3)}, {}))
    model, optimizer = second.take()
    assert torch.equal(model["w"], torch.arange(3.0))
    assert optimizer == {"step": 2}


def test_the_oracle_carries_rank_0s_state_to_every_rank() -> None:
    carrier = Held(world=2)
    carrier.put((PerRank(("of 0", "of 1")), "optimizer"))
    model, optimizer = Held(world=3, states=carrier.states).take()
    assert model.values == ("of 0",) * 3
    assert optimizer == "optimizer"


def history(phases: str, world: int, *, virtual: bool = False) -> History:
    """Each rank has seen its own number in each phase; virtual ranks also a zero in common."""
    return History(
        ranks=tuple(
            RankHistory(
                rank=rank,
                phases=tuple(Phase(ordinal=i, name=n, ended=True) for i, n in enumerate(phases)),
                observations=tuple(
                    Observation(what=what, where={"in": name}, value=value, moment=(i, 0))
                    for i, name in enumerate(phases)
                    for what, value in (("own", rank), ("common", 0))
                    if what == "own" or not virtual or not rank
                ),
                collectives=({"phases": phases},),
            )
            for rank in range(world)
        ),
        virtual=virtual,
    )


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (3, 3)])
@pytest.mark.parametrize("virtual", [False, True])
def test_two_jobs_are_one_history(before: int, after: int, virtual) -> None:
    first = history("ab", before, virtual=virtual)
    both = first.then(history("c", after, virtual=virtual), world=after)
    assert both.world == after
    assert both.jobs == (0, 2)
    for rank, of_rank in enumerate(both.ranks):
        assert both.get(rank, "own", **{"in": "c"}) == rank
        assert both.get(rank, "own", **{"in": "a"}) == (rank if rank < before else 0)
        assert both.get(rank, "common", **{"in": "b"}) == 0
        assert of_rank.find("own", {"in": "c"}).moment == (2, 0)  # type: ignore[union-attr]
        assert of_rank.phases[-1].ordinal == 2
        assert of_rank.collectives == ({"phases": "c"},)


def test_the_ranks_of_the_first_job_stay_where_they_are_asked_for() -> None:
    both = history("ab", 3, virtual=True).then(history("c", 1, virtual=True), world=3)
    assert both.world == 3
    assert both.get(2, "own", **{"in": "a"}) == 2
    assert [seen.value for seen in both.every("own", 2)] == [2, 2]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, forkserver: None) -> Iterator[Session]:
    directory = tmp_path_factory.mktemp("resume")
    with Session(Setting(directory=directory, world=1, timeout=240.0)) as made:
        yield made


def judged(session: Session, subject: Subject, case: Case) -> dict[str, Finding]:
    directory = session.run(subject, case)
    findings = judge_stored(directory, session.setting.directory, list(CHECKS.values()))
    assert findings == judge_stored(directory, session.setting.directory, list(CHECKS.values()))
    return {finding.check: finding for finding in findings}


@pytest.mark.parametrize("case", [DOUBLE, HALF], ids=str)
def test_the_second_job_is_judged_and_runs_in_other_processes(session: Session, case: Case) -> None:
    subject = Subject(adapter=ADAPTER)
    found = judged(session, subject, case)
    assert {finding.verdict for finding in found.values()} == {Verdict.PASS}
    assert found.keys() >= {"resume.model", "resume.options", "resume.optimizer", "parameters.end"}
    assert f"{case}#0" in found["resume.model"].repro
    processes = found[COMPLETED].where["remarks"]
    assert len(processes) == len(set(processes)) == 2


def test_the_oracles_second_job_goes_on_where_the_first_ended(session: Session) -> None:
    directory = session.run(Subject(adapter=ADAPTER), HALF)
    stored = Stored.read(directory)
    oracle = session.setting.directory / stored.oracle / "reference"
    both = History.read(oracle, 1).then(History.read(oracle / "second", 1), world=1)
    again = session.run(Subject(adapter=ADAPTER), Case.of("mlp", "checkpoint", kind="full"))
    alone = History.read(session.setting.directory / Stored.read(again).oracle / "reference", 1)
    for step in (2, 3):
        expected = alone.get(0, "parameters", step=step)
        got = both.get(0, "parameters", step=step)
        assert all(torch.equal(got[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("variant", "completed", "resumed", "tells"),
    [
        ("refuses", Verdict.UNSUPPORTED, {Verdict.UNSUPPORTED}, "two ranks are one too many"),
        ("raises", Verdict.FAIL, {Verdict.FAIL}, "'load' raised on rank"),
        # whether the other rank says so before it is ended decides between the two
        ("dies", Verdict.CRASH, {Verdict.FAIL, Verdict.BLOCKED}, "in the second job, of 2 ranks: "),
        ("cannot save", Verdict.FAIL, {Verdict.BLOCKED}, "'save' raised on rank 0 (resuming.py:"),
    ],
)
def test_a_trouble_has_its_verdict(
    session: Session, variant: str, completed: Verdict, resumed: set[Verdict], tells: str
) -> None:
    found = judged(session, Subject(adapter=ADAPTER, variant=variant), DOUBLE)
    assert found[COMPLETED].verdict is completed
    assert tells in found[COMPLETED].sentence
    assert found["resume.model"].verdict in resumed


@pytest.mark.parametrize(
    ("variant", "completed", "tells"),
    [
        ("cannot build", Verdict.FAIL, "): ValueError: my wrapper wants a config file"),
        ("leaves", Verdict.CRASH, "died without a report (exit 3)"),
        ("is gone", Verdict.CRASH, "died without a report (exit 3)"),
    ],
)
def test_what_ends_while_it_is_built_has_shown_nothing(
    session: Session, variant: str, completed: Verdict, tells: str
) -> None:
    case = Case.of("mlp", "train", accumulation=1, optimizer="sgd")
    found = judged(session, Subject(adapter=ADAPTER, variant=variant), case)
    end = found.pop(COMPLETED)
    assert end.verdict is completed
    assert tells in end.sentence
    if completed is Verdict.FAIL:
        assert "phase 'build' raised on rank " in end.sentence
        place = end.sentence.partition("(")[2].partition(")")[0]
        file, _, line = place.partition(":")
        assert file == "resuming.py"
        assert f'resuming.py", line {line}, in build' in end.where["traceback"]
        assert "scenarios" not in end.where["traceback"]
    claimed = [f for f in found.values() if f.verdict is not Verdict.UNSUPPORTED]
    assert {f.verdict for f in claimed} == {Verdict.BLOCKED}
    assert {"parameters.first_step", "collectives.order"} <= {f.check for f in claimed}


def test_more_ranks_than_devices_are_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "leases_of", lambda kind: fake_leases(tmp_path, "a,b,c"))
    with Session(Setting(directory=tmp_path, device="fake", world=2)) as session:
        found = judged(session, Subject(adapter=ADAPTER), DOUBLE)
        assert not session._pools
    assert {finding.verdict for finding in found.values()} == {Verdict.UNSUPPORTED}
    assert found.keys() >= {COMPLETED, "resume.model", "losses.value"}
    assert "needs 4 fake devices, of which 3 are here" in found["resume.model"].sentence
    setting = replace(session.setting, world=1)
    assert not Session(setting).beyond(DOUBLE)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "save"])
@pytest.mark.parametrize("baseline", ["oracle", "ddp"])
@pytest.mark.parametrize("ranks", ["double", "half"])
@pytest.mark.parametrize("adapter", ["fsdp.fully_shard", "fsdp.FullyShardedDataParallel"])
def test_both_faces_resume_with_other_ranks(
    tmp_path: Path, adapter: str, kind: str, ranks: str, baseline: str
) -> None:
    with Session(Setting(directory=tmp_path, baseline=baseline, timeout=240)) as session:
        case = Case.of("uneven", "resume", kind=kind, ranks=ranks)
        found = judged(session, Subject(adapter=adapter), case)
    assert {finding.verdict for finding in found.values()} == {Verdict.PASS}
