"""The controller of a run: oracles and wrappers run in rank pools, histories lie in one folder.

Knows processes and folders; what the numbers mean is `conformance.judge`'s business.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock

from conformance import execute, models
from conformance.adapter import Adapter, Conventions
from conformance.case import Case
from conformance.checks import Check
from conformance.checks.registry import TRAINING
from conformance.execute import (
    CaseRequest,
    OracleRequest,
    run_case,
)
from conformance.judge import Ran
from conformance.names import BASELINES
from conformance.oracle_precision import LOWERED, Precision
from conformance.preload import PRELOAD
from conformance.ranks import Job, Outcome, RankPool, RankVerdict
from conformance.ranks.leases import leases_of
from conformance.report.words import number
from conformance.room import is_full, no_room
from conformance.scenarios.resume import second_world
from conformance.stored import Stored, judge_stored
from conformance.subject import Subject
from conformance.verdicts import Finding


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


class Session:
    """Runs cases and judges them; the oracle's histories are shared between subjects.

    Safe to use from several threads; each thread has rank pools of its own. As a context manager
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
        self._adapters: dict[Subject, Adapter] = {}
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
        adapter, setting = self._adapter(subject), self.setting
        stored = Stored(
            subject=subject,
            case=str(case),
            probe=probe,
            ran=Ran(verdict=RankVerdict.SKIP),
            conventions=adapter.conventions,
            capabilities=adapter.capabilities | set(probe),
            replicas=adapter.replicas,
            oracle="",
            world=setting.world,
            device=setting.device,
            seed=setting.seed,
            baseline=setting.baseline,
            second_world=second_world(case, setting.world),
            unsupported=self.beyond(case) or self._too_low(adapter.conventions),
        )
        if not stored.unsupported:
            oracle = self._oracle(case, stored.conventions, stored.capabilities)
            stored = replace(stored, oracle=str(oracle.relative_to(setting.directory)))
            stored = self._jobs(stored, directory, timeout or setting.timeout)
        stored.write(directory)

    def _adapter(self, subject: Subject) -> Adapter:
        """What says the claims and conventions of `subject`; made once, as that takes a while."""
        if subject not in self._adapters:
            self._adapters[subject] = subject.make()
        return self._adapters[subject]

    def beyond(self, case: Case) -> str:
        """Why this machine cannot run a case; empty if it can."""
        world, leases = second_world(case, self.setting.world), leases_of(self.setting.device)
        if world is None or leases is None or world <= len(leases):
            return ""
        kind = self.setting.device
        return f"its second job needs {world} {kind} devices, of which {len(leases)} are here"

    def _too_low(self, conventions: Conventions) -> str:
        """Why the baseline cannot say what is right for low dtypes; empty if it can."""
        baseline = self.setting.baseline
        if baseline == "oracle" or not Precision.of(conventions).lowers:
            return ""
        return f"the {baseline} baseline computes in float32; use --baseline oracle"

    def _jobs(self, stored: Stored, directory: Path, timeout: float) -> Stored:
        """`stored` after its job, or both of them; the second one needs that the first went well.

        Ranks of a second job have never run the first job of any case: it is about what a process
        does not have any more.
        """
        subject = stored.subject
        request = CaseRequest(
            adapter=subject.adapter,
            variant=subject.variant,
            mutant=subject.mutant,
            case=stored.case,
            seed=stored.seed,
            directory=str(directory),
            probe=stored.probe,
            source=subject.source(),
        )
        job = Job.of(run_case, request=request)
        fresh = subject.mutant is not None
        first = self._pool(stored.world).run(job, timeout=timeout, fresh=fresh)
        if stored.second_world is None or first.verdict is not RankVerdict.OK:
            return replace(stored, ran=ran(first, directory))
        job = Job.of(run_case, request=replace(request, second=True))
        same = stored.second_world == stored.world
        second = self._pool(stored.second_world).run(job, timeout=timeout, fresh=fresh or same)
        then = ran(second, directory)
        told = f"in the second job, of {number(stored.second_world, 'rank')}: {then.sentence}"
        both = replace(
            then,
            sentence=told if then.sentence else "",
            seconds=first.seconds + second.seconds,
        )
        return replace(stored, ran=both, second_ran=True)

    def _oracle(self, case: Case, conventions: Conventions, capabilities: frozenset[str]) -> Path:
        """Folder of the oracle's histories of a case; runs them if they are not there."""
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
                    second_world=second_world(case, setting.world),
                )
                self._run_truth(request)
                (directory / "done").write_text(key)
        return directory

    def _run_truth(self, request: OracleRequest) -> None:
        """Run what says what is right, on ranks that the wrapper has too: none is started for it.

        Raises:
            OracleFailed: it did not come to its end.
        """
        setting = self.setting
        baseline = BASELINES[setting.baseline]
        for one in request.jobs() if baseline.job_by_job else (request,):
            job = Job.of(getattr(execute, baseline.program), request=one)
            outcome = self._pool(one.ranks).run(job, timeout=setting.timeout)
            if outcome.verdict is not RankVerdict.OK:
                detail = next((r.traceback for r in outcome.reports if r and r.traceback), "")
                failed = f"the {setting.baseline} baseline failed on {request.case}"
                raise OracleFailed(f"{failed}: {outcome.sentence}\n{detail}")

    def _pool(self, world: int) -> RankPool:
        """This thread's pool of `world` ranks."""
        pools: dict[int, RankPool] = self._local.__dict__.setdefault("pools", {})
        if world not in pools:
            with self._lock:
                turn = sum(pool.world == world for pool in self._pools)
                pools[world] = RankPool(
                    world=world,
                    device=self.setting.device,
                    preload=PRELOAD,
                    devices=devices_of(turn, world, self._shared),
                )
                self._pools.append(pools[world])
        return pools[world]


def devices_of(pool: int, world: int, shared: Sequence[int]) -> tuple[int, ...] | None:
    """The devices of the pool numbered `pool` among those that pools take in turns."""
    if not shared:
        return None
    return tuple(shared[(pool * world + rank) % len(shared)] for rank in range(world))


def ran(outcome: Outcome, folder: Path) -> Ran:
    """How the ranks of a job fared that writes into `folder`.

    What went wrong on a full disk says so: a rank that it kills does not, nor do all exceptions.
    """
    sentence = outcome.sentence
    if outcome.verdict not in (RankVerdict.OK, RankVerdict.SKIP):
        full = [str(f) for f in (folder, Path(tempfile.gettempdir())) if is_full(f)]
        sentence += f"; {no_room(full[0], 'what the ranks recorded is partial')}" if full else ""
    return Ran(
        verdict=outcome.verdict,
        sentence=sentence,
        seconds=outcome.seconds,
        reported=all(report is not None for report in outcome.reports),
    )


def relevant(conventions: Conventions, model: models.ModelCase) -> Conventions:
    """`conventions` without those that make no difference to what the oracle does with `model`.

    Adapters with different conventions then share the oracle's runs of most models.
    """
    plain = Conventions()
    if Precision.of(conventions).lowers:
        dtypes = (*LOWERED, "casts_inputs")
        plain = replace(plain, **{name: getattr(conventions, name) for name in dtypes})
    return replace(
        plain,
        gradients=conventions.gradients,
        buffers=conventions.buffers if "buffers" in model.traits else plain.buffers,
        unused_grad=conventions.unused_grad if model.leaves_out else plain.unused_grad,
    )


class OracleFailed(RuntimeError):
    """The unsharded run of a case failed: a fault of the model case or of the suite."""


def slug(case: Case, probe: Sequence[str] = ()) -> str:
    """A folder name for a case."""
    return "+".join([str(case).replace("/", "~"), *probe])
