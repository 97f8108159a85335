"""Wrappers with a defect that nobody told the suite of are found, and their bases are not blamed.

`docs/results/blind-mutants.md` has the whole table: what was found first, and which survive.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance import mutants
from conformance.adapters import make_adapter
from conformance.causes import Cause
from conformance.checks import CHECKS
from conformance.item import Item
from conformance.matrix import Matrix
from conformance.models import case
from conformance.plan import plan
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import Finding, Verdict
from tests.blind import wrappers

OURS, OUR_WRAPPER = "fsdp.fully_shard", "fsdp.FullyShardedDataParallel"
TORCH, TORCH_WRAPPER = "torch.fully_shard", "torch.FullyShardedDataParallel"
DDP, ZERO = "torch.DistributedDataParallel", "torch.ZeroRedundancyOptimizer"
HERE = "tests.blind.wrappers:"
CATALOGUE = Path(mutants.__file__).with_name("catalogue.jsonl")


@dataclass(frozen=True, kw_only=True)
class Killed:
    """Where a wrapper is found, for the cause that its docstring expects.

    Attributes:
        name: of the class.
        base: the adapter without the defect.
        case: the smallest one that finds it.
        check: that says so first.
        variant: of both.
        world: ranks.
    """

    name: str
    base: str
    case: str
    check: str
    variant: str = "default"
    world: int = 2


KILLED = (
    Killed(
        name="NoSyncHoldsInTheFirstStepOnly",
        base=OUR_WRAPPER,
        case="mlp/train/accumulation=3,optimizer=sgd",
        check="no_sync.collectives",
    ),
    Killed(
        name="DividesTinyGradientsTwice",
        base=TORCH,
        case="mlp/train/accumulation=1,optimizer=sgd",
        check="gradients.value",
    ),
    Killed(
        name="AccumulatesInHalfPrecision",
        base=DDP,
        case="mlp/train/accumulation=3,optimizer=sgd",
        check="accumulation.big_batch",
    ),
    Killed(
        name="StaleGradientWhereNoneTookPart",
        base=TORCH,
        case="varying/checkpoint/kind=sharded,options=default",
        check="gradients.value",
    ),
    Killed(
        name="OffloadsThroughTwoBuffersPerShape",
        base=OURS,
        case="transformer/train/accumulation=3,optimizer=sgd",
        check="accumulation.big_batch",
    ),
    Killed(
        name="ClipsByTheMaximumOfItsShard",
        base=OURS,
        case="mlp/train/accumulation=1,optimizer=sgd",
        check="clip.gradients",
    ),
    Killed(
        name="UntiesAtTheLoad",
        base=DDP,
        case="transformer/checkpoint/kind=full,options=explicit",
        check="resume.optimizer",
    ),
    Killed(
        name="ShiftsMomentsOfUnevenParameters",
        base=TORCH,
        case="uneven/checkpoint/kind=save",
        check="resume.optimizer",
    ),
    Killed(
        name="LoadsMomentsByGlobalRank",
        base=OURS,
        variant="hybrid,replicas=2",
        world=4,
        case="mlp/checkpoint/kind=full,options=default",
        check="resume.optimizer",
    ),
    Killed(
        name="LeavesTheLastUnitInEvalMode",
        base=TORCH_WRAPPER,
        case="batchnorm/train/accumulation=3,optimizer=sgd",
        check="losses.value",
    ),
    Killed(
        name="KeepsTheLastUnitAfterEvaluation",
        base=TORCH,
        case="wide/memory",
        check="memory.live_bytes",
    ),
    Killed(
        name="PrefetchesTheFirstUnitBeforeTheStep",
        base=TORCH,
        variant="reshard_after_forward=False",
        case="mlp/train/accumulation=1,optimizer=sgd",
        check="losses.value",
    ),
    Killed(
        name="LastParameterArrivesAtTheNextForward",
        base=ZERO,
        case="mlp/train/accumulation=1,optimizer=sgd",
        check="parameters.first_step",
    ),
    Killed(
        name="EarlierMicroBatchesStayInTheirReplica",
        base=f"{HERE}ReplicatedByHand",
        world=4,
        case="mlp/train/accumulation=3,optimizer=sgd",
        check="accumulation.big_batch",
    ),
    Killed(
        name="ScalesSmallGradientsUp",
        base=DDP,
        case="mlp/train/accumulation=1,optimizer=sgd",
        check="clip.gradients",
    ),
    Killed(
        name="DecaysFrozenNeighbours",
        base=OURS,
        case="adapted/train/accumulation=3,optimizer=sgd",
        check="frozen.kept",
    ),
    Killed(
        name="SecondSaveWritesTheFirst",
        base=OURS,
        case="mlp/checkpoint/kind=save",
        check="resume.model",
    ),
    Killed(
        name="LoadsMomentsInAlphabeticalOrder",
        base=TORCH_WRAPPER,
        case="uneven/checkpoint/kind=full,options=default",
        check="resume.optimizer",
    ),
    Killed(
        name="LoadedMomentsKeepWholeTensorsAlive",
        base=OURS,
        case="mlp/checkpoint/kind=full,options=default",
        check="sharding.loaded",
    ),
    Killed(
        name="EvaluatesFromACacheOfBeforeTheLoad",
        base=DDP,
        case="mlp/checkpoint/kind=full,options=explicit",
        check="losses.value",
    ),
)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Session]]:
    """By number of ranks; what does not agree in conventions has oracles of its own."""
    with (
        Session(Setting(directory=tmp_path_factory.mktemp("two"))) as two,
        Session(Setting(directory=tmp_path_factory.mktemp("four"), world=4)) as four,
    ):
        yield {2: two, 4: four}


def judged(sessions: dict[int, Session], adapter: str, row: Killed) -> list[Finding]:
    """What is found about an adapter in the row's case."""
    session = sessions[row.world]
    matrix = Matrix(
        histories=lambda item: session.run(item.subject, item.planned.case),
        root=session.setting.directory,
        world=row.world,
        seed=session.setting.seed,
        with_control=False,
    )
    claims = make_adapter(adapter, row.variant)[0].capabilities
    model = case(row.case.partition("/")[0])
    (planned,) = (
        p for p in plan(claims, list(CHECKS.values()), [model]) if str(p.case) == row.case
    )
    subject = Subject(adapter=adapter, variant=row.variant)
    return [one.finding for one in matrix.report(Item(subject=subject, planned=planned))]


def failed(findings: list[Finding]) -> list[Finding]:
    """Those that say FAIL, the earliest first."""
    return [finding for finding in findings if finding.verdict is Verdict.FAIL]


def expected_cause(name: str) -> Cause:
    """What the docstring of a wrapper asks for."""
    told: str = getattr(wrappers, name).__doc__
    return Cause(told.partition("Cause: ")[2].split()[0].rstrip("."))


def test_there_are_twenty_each_with_reports_and_a_cause_of_the_list() -> None:
    reports = {json.loads(line)["id"].lower() for line in CATALOGUE.read_text().splitlines()}
    found = [c for c in vars(wrappers).values() if "Cause: " in (getattr(c, "__doc__", "") or "")]
    assert len(found) == 20
    for each in found:
        like = each.__doc__.partition("Like ")[2].partition("Cause: ")[0]
        assert any(word.strip(",.\n").lower() in reports for word in like.split()), each
        assert expected_cause(each.__name__) is not Cause.UNEXPLAINED
    assert {each.__name__ for each in found} == {row.name for row in KILLED}


@pytest.mark.long
@pytest.mark.parametrize("row", KILLED, ids=[row.name for row in KILLED])
def test_a_defect_is_found_first_and_named_where_its_base_has_none(
    sessions: dict[int, Session], row: Killed
) -> None:
    known = {finding.check for finding in failed(judged(sessions, row.base, row))}
    new = [f for f in failed(judged(sessions, HERE + row.name, row)) if f.check not in known]
    assert (new[0].check, new[0].cause) == (row.check, expected_cause(row.name))
