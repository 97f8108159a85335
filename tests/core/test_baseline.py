"""DDP on the ranks of the run says the same as the oracle, and serves in its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from conformance.adapter import Conventions
from conformance.case import Case
from conformance.checks import CHECKS
from conformance.execute import (
    OracleRequest,
    baseline_runs,
    oracle_runs,
    run_baseline,
    run_oracle,
)
from conformance.history import History, as_tensor
from conformance.names import BASELINES
from conformance.preload import PRELOAD
from conformance.ranks import Job, RankPool, RankVerdict
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.tolerance import Oracle, distance
from conformance.verdicts import Finding, Verdict

pytestmark = pytest.mark.usefixtures("forkserver")

CLIPS = ("clip.p1", "clip.p2", "clip.pinf", "clip.gradients")


@pytest.fixture(scope="module")
def pool():
    with RankPool(world=2, device="cpu", preload=PRELOAD) as running:
        yield running


def further(case: str, conventions: Conventions) -> Any:
    """A row that is left out of a quick run: its scenario stands in another."""
    return pytest.param(case, conventions, marks=pytest.mark.long)


def truths(pool: RankPool, directory: Path, case: str, conventions: Conventions) -> list[Oracle]:
    """What the oracle and the baseline recorded of one case."""
    found = []
    for name, program in (("oracle", run_oracle), ("baseline", run_baseline)):
        request = OracleRequest(
            world=2,
            conventions=conventions,
            capabilities=CLIPS,
            case=case,
            seed=0,
            directory=str(directory / name),
        )
        outcome = pool.run(Job.of(program, request=request), timeout=120)
        assert outcome.verdict is RankVerdict.OK, [r and r.traceback for r in outcome.reports]
        runs = oracle_runs(conventions, 2) if program is run_oracle else baseline_runs()
        histories = {run: History.read(directory / name / run, 2) for run in runs}
        found.append(Oracle(**{"reversed": histories["reference"], **histories}))
    return found


def measured(what: str, where: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Of what the oracle measures its noise where `what` is what a defect would have given."""
    suspects = {"gradients_of_rank", "gradients_last_micro", "gradients_doubled"}
    if what in suspects | {"gradients_of_micro"}:
        return "gradients", {name: value for name, value in where.items() if name != "micro"}
    places = {name: value for name, value in where.items() if name != "unit"}
    return what.removeprefix("stale_").removesuffix("_of_unit"), places


@pytest.mark.parametrize(
    ("case", "conventions"),
    [
        ("mlp/train/accumulation=3,optimizer=adamw", Conventions()),
        further("mlp/train/accumulation=3,optimizer=sgd", Conventions(gradients="sum")),
        further("batchnorm/train/accumulation=3,optimizer=adamw", Conventions(buffers="rank0")),
        ("batchnorm/eval_first", Conventions(buffers="local")),
        ("unused/unused/accumulation=3,optimizer=adamw", Conventions(unused_grad="unit")),
        further("unused/unused/accumulation=3,optimizer=adamw", Conventions(unused_grad="zero")),
        further("frozen/train/accumulation=1,optimizer=sgd", Conventions()),
        ("mlp/checkpoint/kind=full,options=explicit", Conventions()),
        further("batchnorm/checkpoint/kind=save", Conventions()),
    ],
    ids=str,
)
def test_the_baseline_observes_what_the_oracle_observes(
    pool: RankPool, tmp_path: Path, case: str, conventions: Conventions
) -> None:
    oracle, baseline = truths(pool, tmp_path, case, conventions)
    compared = 0
    for rank in range(2):
        names = {seen.what for seen in oracle.reference.ranks[0].observations}
        for seen in (s for name in sorted(names) for s in oracle.reference.every(name, rank)):
            got = baseline.reference.get(rank, seen.what, **seen.where)
            tree = seen.value if isinstance(seen.value, dict) else {None: seen.value}
            mine = got if isinstance(seen.value, dict) else {None: got}
            assert mine.keys() == tree.keys(), (seen.what, seen.where)
            for key, value in tree.items():
                if not isinstance(value, Tensor):
                    assert mine[key] == value, (seen.what, seen.where, key)
                    continue
                bound = oracle.bound(rank, *measured(seen.what, seen.where), key)
                error = distance(as_tensor(mine[key]), as_tensor(value))
                assert error <= bound, (seen.what, seen.where, key, rank)
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("case", ["batchnorm/train/accumulation=1,optimizer=sgd"])
def test_the_noise_of_the_baseline_is_that_of_the_oracle(
    pool: RankPool, tmp_path: Path, case: str
) -> None:
    conventions = Conventions(buffers="rank0")
    bounds = [
        [
            truth.bound(rank, "parameters", dict(seen.where), key)
            for rank in range(2)
            for seen in truth.reference.every("parameters", rank)
            for key in seen.value
        ]
        for truth in truths(pool, tmp_path, case, conventions)
    ]
    for of_oracle, of_baseline in zip(*bounds, strict=True):
        assert of_baseline <= 8 * of_oracle


def test_the_reversed_run_adds_the_ranks_in_another_order(tmp_path: Path) -> None:
    request = OracleRequest(
        world=3,  # of two numbers both orders give the same sum
        conventions=Conventions(),
        capabilities=(),
        case="mlp/train/accumulation=1,optimizer=sgd",
        seed=0,
        directory=str(tmp_path),
    )
    with RankPool(world=3, device="cpu", preload=PRELOAD) as running:
        outcome = running.run(Job.of(run_baseline, request=request), timeout=120)
    assert outcome.verdict is RankVerdict.OK
    reference, other = (History.read(tmp_path / name, 3) for name in ("reference", "reversed"))
    errors = [
        distance(other.get(rank, "gradients", step=0)[key], value)
        for rank in range(3)
        for key, value in reference.get(rank, "gradients", step=0).items()
    ]
    assert 0.0 < max(errors) < 1e-6


def judged(directory: Path, adapter: str, case: str, mutant: str | None = None) -> list[Finding]:
    setting = Setting(directory=directory, baseline="ddp", timeout=120)
    with Session(setting) as session:
        subject = Subject(adapter=adapter, mutant=mutant)
        return session.judge_case(subject, Case.parse(case), list(CHECKS.values()))


def test_a_wrapper_is_judged_by_it(tmp_path: Path) -> None:
    findings = judged(tmp_path, "torch.fully_shard", "mlp/train/accumulation=3,optimizer=adamw")
    assert {finding.verdict for finding in findings} == {Verdict.PASS}
    assert len(findings) > 12
    assert findings[0].repro.endswith("--device cpu --baseline ddp")


def test_a_defect_is_caught_with_its_cause_by_it(tmp_path: Path) -> None:
    case = "mlp/train/optimizer=sgd"
    ddp = "torch.DistributedDataParallel"
    first, *_ = judged(tmp_path, ddp, case, mutant="summed_not_averaged")
    assert (first.verdict, first.check) == (Verdict.FAIL, "gradients.scale")


def test_only_what_ddp_is_wrong_in_is_left_out() -> None:
    assert BASELINES["ddp"].cannot == {"two_forwards"}
    assert not BASELINES["oracle"].cannot
