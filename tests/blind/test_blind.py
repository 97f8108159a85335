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
    """Where a wrapper is found.

    Attributes:
        name: of the class.
        base: the adapter without the defect.
        case: the smallest one that finds it.
        check: that says so.
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
        case="wide/memory",
        check="memory.live_bytes",
    ),
    Killed(
        name="OffloadsThroughTwoBuffersPerShape",
        base=OURS,
        case="transformer/train/accumulation=1,optimizer=sgd",
        check="gradients.value",
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
        check="tied.one",
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
        case="batchnorm/train/accumulation=1,optimizer=sgd",
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
        check="parameters.end",
    ),
    Killed(
        name="EarlierMicroBatchesStayInTheirReplica",
        base=f"{HERE}ReplicatedByHand",
        world=4,
        case="mlp/train/accumulation=3,optimizer=sgd",
        check="accumulation.big_batch",
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


def failed(findings: list[Finding]) -> set[str]:
    """Ids of the checks that say FAIL."""
    return {finding.check for finding in findings if finding.verdict is Verdict.FAIL}


def test_there_are_twenty_each_with_reports_and_a_cause_of_the_list() -> None:
    reports = {json.loads(line)["id"].lower() for line in CATALOGUE.read_text().splitlines()}
    found = [c for c in vars(wrappers).values() if "Cause: " in (getattr(c, "__doc__", "") or "")]
    assert len(found) == 20
    for each in found:
        like, _, rest = each.__doc__.partition("Like ")[2].partition("Cause: ")
        assert any(word.strip(",.\n").lower() in reports for word in like.split()), each
        assert Cause(rest.split()[0].rstrip(".")) is not Cause.UNEXPLAINED


@pytest.mark.long
@pytest.mark.parametrize("row", KILLED, ids=[row.name for row in KILLED])
def test_a_defect_is_found_where_its_base_has_none(
    sessions: dict[int, Session], row: Killed
) -> None:
    assert row.check in failed(judged(sessions, HERE + row.name, row))
    assert row.check not in failed(judged(sessions, row.base, row))
