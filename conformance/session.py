"""The controller of a run: oracles and wrappers run in rank pools, histories lie in one folder.

Knows processes and folders; what the numbers mean is `conformance.judge`'s business.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from conformance import models
from conformance.adapter import Adapter, Conventions
from conformance.adapters import make_adapter
from conformance.case import Case
from conformance.checks import Check, Evidence
from conformance.checks.registry import TRAINING
from conformance.execute import (
    ORACLE_RUNS,
    CaseRequest,
    OracleRequest,
    run_baseline,
    run_case,
    run_oracle,
)
from conformance.history import History
from conformance.judge import Judgement, Ran, judge
from conformance.mutants import mutant_named
from conformance.ranks import Job, RankPool, RankVerdict
from conformance.ranks.leases import leases_of
from conformance.tolerance import Oracle
from conformance.verdicts import Finding, finding_id

PRELOAD = ("conformance.execute", "torch._dynamo", "conformance.adapters.torch_fsdp2")
"""Imported once, before ranks are forked; the first optimizer of a process imports dynamo, which
alone would cost every fresh rank two seconds."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What says what is right.

    Attributes:
        program: job that writes its three histories of a case.
        cannot: scenarios that it is itself wrong in.
    """

    program: Callable[..., None]
    cannot: frozenset[str] = frozenset()


BASELINES: Mapping[str, Baseline] = {
    "oracle": Baseline(program=run_oracle),
    # docs/findings/ddp-two-forwards.md
    "ddp": Baseline(program=run_baseline, cannot=frozenset({"two_forwards"})),
}
"""By name: all ranks in one process, or DDP on the ranks of the run for what one cannot train."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how a run takes place.

    Attributes:
        world: ranks.
        device: device type, such as cpu.
        seed: of every random number.
        timeout: seconds after which one case is ended from outside.
        directory: where histories are kept.
        baseline: name of what says what is right, one of `BASELINES`.
    """

    world: int = 2
    device: str = "cpu"
    seed: int = 0
    timeout: float = 60.0
    directory: Path
    baseline: str = "oracle"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is judged: an adapter's variant, perhaps with a mutant planted."""

    adapter: str
    variant: str = "default"
    mutant: str | None = None

    def make(self) -> Adapter:
        """The adapter as the ranks will have it, for its claims and conventions."""
        adapter, _ = make_adapter(self.adapter, self.variant)
        if self.mutant is None:
            return adapter
        with mutant_named(self.mutant).planted(adapter) as planted:
            return planted

    def source(self) -> str | None:
        """File of the module of an adapter named ``module:Class``, once it is imported here."""
        module, colon, _ = self.adapter.partition(":")
        return getattr(sys.modules.get(module), "__file__", None) if colon else None

    @property
    def folder(self) -> str:
        """A folder name for it."""
        plain = f"{self.adapter}[{self.variant}]{'+' + self.mutant if self.mutant else ''}"
        return plain.replace("/", "_").replace(":", "_")


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
        setting: world, device and seed.
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


class Session:
    """Runs cases and judges them; the oracle's histories are shared between subjects.

    Safe to use from several threads; each thread has a rank pool of its own. As a context manager
    it also takes care that more threads than accelerators allow share these: it leases them for
    all its pools at once, where a pool alone would have each job wait for devices of its own.
    """

    def __init__(self, setting: Setting, *, jobs: int = 1) -> None:
        """Nothing is started before the first case.

        Args:
            setting: where and how.
            jobs: threads that will run cases at a time.
        """
        self.setting = setting
        self.jobs = jobs
        self._local = threading.local()
        self._pools: list[RankPool] = []
        self._lock = threading.Lock()
        self._lease = ExitStack()
        self._shared: tuple[int, ...] = ()

    def __enter__(self) -> Session:
        leases, world = leases_of(self.setting.device), self.setting.world
        if leases is not None and world <= len(leases) < self.jobs * world:
            count = len(leases) // world * world
            self._shared = self._lease.enter_context(leases.hold(count))
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._lease.close()

    def close(self) -> None:
        """End every rank."""
        for pool in self._pools:
            pool.close()
        self._pools.clear()

    def judge_case(
        self, subject: Subject, case: Case, checks: Sequence[Check], *, probe: Sequence[str] = ()
    ) -> list[Finding]:
        """Run one case, unless its history is there already, and judge it."""
        return judge_stored(self.run(subject, case, probe=probe), self.setting.directory, checks)

    def run(
        self,
        subject: Subject,
        case: Case,
        *,
        probe: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Path:
        """Run one case with its oracle; returns the folder of its history.

        Processes that share the folder run each case once: the others wait for the first.
        `timeout` replaces the setting's.
        """
        directory = self.setting.directory / subject.folder / slug(case, probe)
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(str(directory) + ".lock"):
            if not (directory / "case.json").exists():
                self._run(subject, case, tuple(probe), directory, timeout)
        return directory

    def _run(
        self,
        subject: Subject,
        case: Case,
        probe: tuple[str, ...],
        directory: Path,
        timeout: float | None,
    ) -> None:
        adapter = subject.make()
        capabilities = adapter.capabilities | set(probe)
        oracle = self._oracle(case, adapter.conventions, capabilities)
        setting = self.setting
        request = CaseRequest(
            adapter=subject.adapter,
            variant=subject.variant,
            mutant=subject.mutant,
            case=str(case),
            seed=setting.seed,
            directory=str(directory),
            probe=probe,
            source=subject.source(),
        )
        fresh = subject.mutant is not None
        job = Job.of(run_case, request=request)
        outcome = self._pool().run(job, timeout=timeout or setting.timeout, fresh=fresh)
        Stored(
            subject=subject,
            case=str(case),
            probe=probe,
            ran=Ran(
                verdict=outcome.verdict,
                sentence=outcome.sentence,
                seconds=outcome.seconds,
                reported=all(report is not None for report in outcome.reports),
            ),
            conventions=adapter.conventions,
            capabilities=capabilities,
            replicas=adapter.replicas,
            oracle=str(oracle.relative_to(setting.directory)),
            world=setting.world,
            device=setting.device,
            seed=setting.seed,
            baseline=setting.baseline,
        ).write(directory)

    def _oracle(self, case: Case, conventions: Conventions, capabilities: frozenset[str]) -> Path:
        """Folder of the oracle's three histories of a case; runs them if they are not there."""
        setting = self.setting
        # the only claims that change what is run; others share the oracle's runs
        clips = case.scenario in TRAINING or "c" in case.option("acts")
        shown = sorted(c for c in capabilities if clips and c.startswith("clip."))
        conventions = relevant(conventions, models.case(case.model))
        key = json.dumps(
            [
                *(str(case), setting.baseline, setting.world, setting.device, setting.seed),
                *(asdict(conventions), shown),
            ]
        )
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        directory = setting.directory / "oracle" / f"{slug(case)}-{digest}"
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(str(directory) + ".lock"):
            if not (directory / "done").exists():
                request = OracleRequest(
                    world=setting.world,
                    conventions=conventions,
                    capabilities=tuple(shown),
                    case=str(case),
                    seed=setting.seed,
                    directory=str(directory),
                )
                job = Job.of(BASELINES[setting.baseline].program, request=request)
                # the ranks of the wrapper: a pool of its own would import torch once more
                outcome = self._pool().run(job, timeout=setting.timeout)
                if outcome.verdict is not RankVerdict.OK:
                    detail = next((r.traceback for r in outcome.reports if r and r.traceback), "")
                    failed = f"the {setting.baseline} baseline failed on {case}"
                    raise OracleFailed(f"{failed}: {outcome.sentence}\n{detail}")
                (directory / "done").write_text(key)
        return directory

    def _pool(self) -> RankPool:
        """This thread's pool."""
        pool: RankPool | None = getattr(self._local, "pool", None)
        if pool is None:
            setting = self.setting
            with self._lock:
                pool = RankPool(
                    world=setting.world,
                    device=setting.device,
                    preload=PRELOAD,
                    devices=devices_of(len(self._pools), setting.world, self._shared),
                )
                self._pools.append(pool)
            self._local.pool = pool
        return pool


def devices_of(pool: int, world: int, shared: Sequence[int]) -> tuple[int, ...] | None:
    """The devices of the pool numbered `pool` among those that pools take in turns."""
    if not shared:
        return None
    first = pool * world % len(shared)
    return tuple(shared[first : first + world])


def relevant(conventions: Conventions, model: models.ModelCase) -> Conventions:
    """`conventions` without those that make no difference to what the oracle does with `model`.

    Adapters with different conventions then share the oracle's runs of most models.
    """
    plain = Conventions()
    return replace(
        plain,
        gradients=conventions.gradients,
        buffers=conventions.buffers if "buffers" in model.traits else plain.buffers,
        unused_grad=conventions.unused_grad if "unused" in model.traits else plain.unused_grad,
    )


class OracleFailed(RuntimeError):
    """The unsharded run of a case failed: a fault of the model case or of the suite."""


def judge_stored(directory: Path, root: Path, checks: Iterable[Check]) -> list[Finding]:
    """Judge the case whose history lies in `directory`; needs no ranks."""
    stored = Stored.read(directory)
    case = Case.parse(stored.case)
    evidence = Evidence(
        case=case,
        model=models.case(case.model),
        history=History.read(directory, stored.world),
        oracle=_read_oracle(root / stored.oracle, stored.world),
        conventions=stored.conventions,
        capabilities=stored.capabilities,
        replicas=stored.replicas,
    )
    return [_finding(stored, judgement) for judgement in judge(evidence, stored.ran, checks)]


@lru_cache(maxsize=4)
def _read_oracle(directory: Path, world: int) -> Oracle:
    return Oracle(**{name: History.read(directory / name, world) for name in ORACLE_RUNS})


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


def slug(case: Case, probe: Sequence[str] = ()) -> str:
    """A folder name for a case."""
    return "+".join([str(case).replace("/", "~"), *probe])
