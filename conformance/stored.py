"""A case that was run, as it lies in a folder, and its judgement from there.

Knows folders, histories and the judge. Must not know ranks: judging again needs none.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from conformance import models
from conformance.adapter import Conventions
from conformance.case import Case
from conformance.checks import Check, Evidence
from conformance.execute import baseline_runs, of_job, oracle_runs
from conformance.history import History
from conformance.judge import Judgement, Ran, all_unsupported, judge
from conformance.ranks import RankVerdict
from conformance.subject import Subject
from conformance.tolerance import Oracle
from conformance.verdicts import Finding, finding_id

ORACLES_KEPT = 128
"""Cases whose oracle stays read, with the bounds measured so far: the variants of an adapter take
the same cases one after the other. A megabyte each, of the models that there are."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A case that was run: everything that judging it again needs, as ``case.json``.

    Attributes:
        subject: what was run.
        case: its case.
        probe: capabilities that were tried out although they are not claimed.
        ran: how the ranks fared.
        conventions: the adapter's.
        capabilities: the adapter's, with the probe.
        replicas: ranks that hold the same shard.
        oracle: folder of the oracle's histories, relative to the run's.
        world: ranks, of the first job if there are two.
        device: device type.
        seed: of every random number.
        baseline: name of what says what is right.
        second_world: ranks of the second job; ``None`` if the case has one job.
        second_ran: whether it came to the second job.
        unsupported: why the case cannot be run here; nothing was run if there is a reason.
    """

    subject: Subject
    case: str
    probe: tuple[str, ...]
    ran: Ran
    conventions: Conventions
    capabilities: frozenset[str]
    replicas: int
    oracle: str
    world: int
    device: str
    seed: int
    baseline: str = "oracle"
    second_world: int | None = None
    second_ran: bool = False
    unsupported: str = ""

    @property
    def truths(self) -> tuple[str, ...]:
        """Names of the runs of what says what is right."""
        dtype = models.case(Case.parse(self.case).model).dtype
        if self.baseline != "oracle":
            return tuple(baseline_runs(dtype=dtype))
        world = max(self.world, self.second_world or 0)
        return tuple(oracle_runs(self.conventions, world, dtype=dtype))

    def write(self, directory: Path) -> None:
        """Write ``case.json``; it comes last, so a folder that has it is complete."""
        content = asdict(self) | {"capabilities": sorted(self.capabilities)}
        staged = directory / "case.json.part"
        staged.write_text(json.dumps(content))
        staged.replace(directory / "case.json")

    @classmethod
    def read(cls, directory: Path) -> Stored:
        """Read what `write` wrote."""
        content = json.loads((directory / "case.json").read_text())
        ran = content["ran"]
        return cls(
            **{
                **content,
                "subject": Subject(**content["subject"]),
                "probe": tuple(content["probe"]),
                "ran": Ran(**{**ran, "verdict": RankVerdict(ran["verdict"])}),
                "conventions": Conventions(**content["conventions"]),
                "capabilities": frozenset(content["capabilities"]),
            }
        )


def judge_stored(directory: Path, root: Path, checks: Iterable[Check]) -> list[Finding]:
    """Judge the case whose history lies in `directory`; needs no ranks."""
    stored = Stored.read(directory)
    case = Case.parse(stored.case)
    model = models.case(case.model)
    if stored.unsupported:
        judged = all_unsupported(
            (check for check in checks if check.judges(case, model)), stored.unsupported
        )
        return [_finding(stored, judgement) for judgement in judged]
    first = history = History.read(directory, stored.world)
    if stored.second_ran and stored.second_world is not None:
        world = stored.second_world
        history = first.then(History.read(of_job(directory, second=True), world), world=world)
    evidence = Evidence(
        case=case,
        model=model,
        history=history,
        oracle=_read_oracle(
            root / stored.oracle,
            stored.truths,
            stored.world,
            stored.second_world,
        ),
        conventions=stored.conventions,
        capabilities=stored.capabilities,
        replicas=stored.replicas,
        first=first if stored.second_ran else None,
    )
    return [_finding(stored, judgement) for judgement in judge(evidence, stored.ran, checks)]


@lru_cache(maxsize=ORACLES_KEPT)
def _read_oracle(
    directory: Path, runs: tuple[str, ...], world: int, second_world: int | None
) -> Oracle:
    read = {name: _read_truth(directory / name, world, second_world) for name in runs}
    return Oracle(**{"reversed": read["reference"], **read})


def _read_truth(directory: Path, world: int, second_world: int | None) -> History:
    first = History.read(directory, world)
    if second_world is None:
        return first
    second = History.read(of_job(directory, second=True), second_world)
    # a wrapper may not have come further than the first job: its ranks must be there
    return first.then(second, world=max(world, second_world))


def _finding(stored: Stored, judgement: Judgement) -> Finding:
    subject = stored.subject
    variant = subject.variant
    return Finding(
        adapter=subject.adapter,
        variant=variant,
        case=stored.case,
        seed=stored.seed,
        seconds=stored.ran.seconds,
        repro=repro_line(stored, judgement.check),
        **asdict(judgement),
    )


def repro_line(stored: Stored, check: str) -> str:
    """The shell line that repeats one finding."""
    subject = stored.subject
    id = finding_id(check, subject.adapter, subject.variant, stored.case, stored.seed)
    where = f"--world {stored.world} --device {stored.device}"
    if stored.baseline != "oracle":
        where += f" --baseline {stored.baseline}"
    planted = f" --mutant {subject.mutant}" if subject.mutant else ""
    return f"fsdp-conformance repro {shlex.quote(id)} {where}{planted}"
