"""False alarms: wrappers that are right, judged again and again; every finding against one counts.

Runs the reference, the baseline wrapper and the odd wrappers over many seeds, and the reference's
options in a table in which every two of them meet. Seeds are shared out among processes where there
are cores for several. What is done is written to a file as it is done, so a second call goes on
from there. An alarm is a fault of the suite, of the wrapper, or of the tolerance that was measured;
it is printed with the line that repeats it.

`python -m conformance.false_alarms` runs it; status 0 without alarms, 1 with one, 2 if there was
not enough time for all of it.
"""

from __future__ import annotations

if __name__ == "__main__":
    from conformance.cli.interrupt import leave_with

    leave_with("conformance.false_alarms")

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import resource_tracker
from pathlib import Path

from conformance.adapters import make_adapter
from conformance.adapters.covering import at_four_ranks
from conformance.adapters.odd import ODD
from conformance.cli.interrupt import leaving_on_signals
from conformance.control import CONTROL
from conformance.errors import UsageError
from conformance.globs import matches
from conformance.item import Item
from conformance.machine import CPU, default_jobs
from conformance.matrix import Matrix
from conformance.names import Depth
from conformance.plan import plan, select_checks, select_models
from conformance.ranks.orphans import die_with_parent
from conformance.report.repeated import Done, line_of, page, recorded, summary
from conformance.report.words import number
from conformance.room import temporary_folder, told
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import (
    BAD,
    EXIT_BAD,
    EXIT_OK,
    EXIT_UNDECIDED,
    EXIT_USAGE,
    Finding,
    Verdict,
    adapter_label,
)
from conformance.work import variants_of

ALARM = BAD | {Verdict.ERROR}
REFERENCE = ("fsdp.fully_shard", "fsdp.FullyShardedDataParallel")
OPTIONS = "conformance.adapters.fsdp_wrapper:PairsAdapter"
PLAIN_MODELS = ("mlp", "transformer")
JOBS_OF_ONE = 4
"""Cases at once in one process: what it can judge, one after another, while their ranks work."""
LONGEST_LINE = 2**20
"""Bytes; others add to the record, too, and a longer line could be torn by one of theirs."""
RECORD = "runs.jsonl"
PAGE = "false-alarms.md"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Runs of one kind.

    Attributes:
        name: what a reader calls them.
        subjects: adapters with their variants.
        seeds: one run of every subject with each.
        world: ranks.
        profiles: of which the checks judge; empty takes all.
        models: patterns of names; empty takes all.
        depth: how many cases each model takes.
    """

    name: str
    subjects: tuple[Subject, ...]
    seeds: tuple[int, ...]
    world: int = 2
    profiles: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    depth: Depth = Depth.WIDE

    def items(self, subject: Subject) -> list[Item]:
        """What one run consists of."""
        claims = make_adapter(subject.adapter, subject.variant)[0].capabilities
        checks, models = select_checks(self.profiles), select_models(self.models)
        return [
            Item(subject=subject, planned=planned)
            for planned in plan(claims, checks, models, depth=self.depth)
        ]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run: a subject, a seed and a world."""

    block: Block
    subject: Subject
    seed: int

    @property
    def key(self) -> str:
        """What it is known by in the record."""
        label = adapter_label(self.subject.adapter, self.subject.variant)
        return f"{self.block.name}/{label}/world={self.block.world}#{self.seed}"


def blocks(seeds: int, seeds_elsewhere: int) -> tuple[Block, ...]:
    """All runs: core on two plain models, everything else, and options at two and four ranks."""
    right = tuple(
        Subject(adapter=name, variant=next(iter(make_adapter(name)[0].variants)))
        for name in (*REFERENCE, CONTROL.adapter, *ODD)
    )
    four = set(at_four_ranks())
    options = tuple(variants_of(OPTIONS, ()))
    return (
        Block(
            name="core",
            subjects=right,
            seeds=tuple(range(seeds)),
            profiles=("core",),
            models=PLAIN_MODELS,
        ),
        Block(name="everything", subjects=right, seeds=tuple(range(seeds_elsewhere))),
        Block(name="options", subjects=options, seeds=(0,), depth=Depth.NARROW),
        Block(
            name="options",
            subjects=tuple(s for s in options if s.variant in four),
            seeds=(0,),
            world=4,
            depth=Depth.NARROW,
        ),
    )


def planned_runs(chosen: Iterable[Block], patterns: Sequence[str]) -> list[Planned]:
    """The runs of `chosen`, those of one world and seed together, which share oracles and ranks.

    Raises:
        UsageError: one of `patterns` matches no adapter.
    """
    runs = [
        Planned(block=block, subject=subject, seed=seed)
        for block in chosen
        for seed in block.seeds
        for subject in block.subjects
    ]
    for pattern in patterns:
        if not any(matches(run.subject.adapter, pattern) for run in runs):
            raise UsageError(f"--adapter {pattern}: matches none of the wrappers that are right")
    kept = [
        run
        for run in runs
        if not patterns or any(matches(run.subject.adapter, pattern) for pattern in patterns)
    ]
    return sorted(kept, key=_together)


def _together(run: Planned) -> tuple[int, int]:
    """Groups with most to do come first: none is to be waited for alone."""
    return -run.block.world, run.seed


def judged(runs: Sequence[Planned], *, jobs: int, until: float) -> Iterator[Done]:
    """Judge the runs until the clock, `time.monotonic`, says `until`.

    Runs of one world and seed share one session: its ranks, and the oracle's histories.
    """
    for _, group in groupby(runs, key=_together):
        if time.monotonic() >= until:
            return
        first, *others = group
        with temporary_folder() as folder:
            setting = Setting(
                world=first.block.world, device=CPU, seed=first.seed, directory=folder
            )
            with Session(setting, jobs=jobs) as session, ThreadPoolExecutor(jobs) as threads:
                for run in (first, *others):
                    if time.monotonic() >= until:
                        return
                    yield _judged(run, session, threads)


def _judged(run: Planned, session: Session, threads: ThreadPoolExecutor) -> Done:
    started, setting = time.monotonic(), session.setting
    matrix = Matrix(
        histories=lambda item: session.run(item.subject, item.planned.case),
        root=setting.directory,
        world=setting.world,
        seed=setting.seed,
        with_control=False,
    )
    items = run.block.items(run.subject)
    waiting = [threads.submit(matrix.report, item) for item in items]
    found = [one.finding for future in as_completed(waiting) for one in future.result()]
    return Done(
        key=run.key,
        block=run.block.name,
        adapter=adapter_label(run.subject.adapter, run.subject.variant),
        world=setting.world,
        seed=setting.seed,
        cases=len(items),
        verdicts=dict(Counter(str(finding.verdict) for finding in found)),
        alarms=[_told(finding) for finding in found if finding.verdict in ALARM],
        seconds=round(time.monotonic() - started, 1),
    )


def _told(finding: Finding) -> dict[str, str]:
    return {"id": finding.id, "sentence": finding.sentence, "repro": finding.repro}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing in the record, then write the page; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m conformance.false_alarms")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record and the page")
    parser.add_argument("--seeds", type=int, default=20, help="of core on the plain models")
    parser.add_argument("--seeds-elsewhere", type=int, default=3, help="of everything else")
    parser.add_argument("--adapter", action="append", default=[], help="pattern; all by default")
    parser.add_argument("--block", action="append", default=[], help="core, everything, options")
    parser.add_argument("--jobs", type=int, default=0, help="cases at once")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins after that")
    options = parser.parse_args(arguments)
    until = time.monotonic() + 60.0 * options.minutes
    try:
        every = blocks(options.seeds, options.seeds_elsewhere)
        chosen = [b for b in every if not options.block or b.name in options.block]
        runs = planned_runs(chosen, options.adapter)
        mine = _kept(runs, options.out, jobs=options.jobs, until=until)
        missing = len(runs) - len(mine)
        (options.out / PAGE).write_text(page(mine, missing), encoding="utf-8")
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except OSError as error:
        lost = f"{RECORD} has the runs so far, {PAGE} is not whole"
        sys.stderr.write(f"{told(error, lost, options.out)}\n")
        return EXIT_UNDECIDED
    sys.stdout.write(f"{summary(mine, missing)}\n")
    if any(run.alarms for run in mine):
        return EXIT_BAD
    return EXIT_UNDECIDED if missing else EXIT_OK


def _kept(runs: Sequence[Planned], out: Path, *, jobs: int, until: float) -> list[Done]:
    """What came of the runs, as far as there was time; each is on disk before the next begins."""
    out.mkdir(parents=True, exist_ok=True)
    path, staged = out / RECORD, out / f"{RECORD}.part"
    done = recorded(path)
    staged.write_text("".join(line_of(run) for run in done.values()), encoding="utf-8")
    staged.replace(path)  # half a line of a run that was cut off is gone
    todo = [run for run in runs if run.key not in done]
    count = jobs or default_jobs(max((run.block.world for run in todo), default=1), CPU)
    if count < 2 * JOBS_OF_ONE:
        _record(todo, path, jobs=count, until=until)
    else:
        _share_out(todo, path, processes=count // JOBS_OF_ONE, until=until)
    done = recorded(path)
    return [done[run.key] for run in runs if run.key in done]


def _record(runs: Sequence[Planned], path: Path, *, jobs: int, until: float) -> None:
    """Judge the runs and add each to the record, to which others may be adding."""
    with path.open("a", encoding="utf-8", buffering=LONGEST_LINE) as record:  # one write each
        for finished in judged(runs, jobs=jobs, until=until):
            record.write(line_of(finished))
            record.flush()
            _show(finished)


def _share_out(runs: Sequence[Planned], path: Path, *, processes: int, until: float) -> None:
    """The same in several processes, one for each group of runs: in one, judging takes turns.

    What a process fails at is not done; that it failed stands on the standard error.
    """
    spawn = multiprocessing.get_context("spawn")  # sessions have threads, which are not forked

    def judge_apart(group: list[Planned]) -> None:
        if time.monotonic() >= until:
            return
        apart = spawn.Process(target=_record_apart, args=(group, path, until, os.getpid()))
        apart.start()
        apart.join()
        if apart.exitcode:  # one that was killed has said nothing itself
            place = f"{number(group[0].block.world, 'rank')}, seed {group[0].seed}"
            what = f"the process for {place} ended with status {apart.exitcode}"
            sys.stderr.write(f"{what}: what it has not recorded is not done\n")

    groups = [list(group) for _, group in groupby(runs, key=_together)]
    # an interrupt goes to the whole group, and would find processes that still import: they inherit
    # what the thread that starts them blocks; starting the tracker unblocks it, so that comes first
    resource_tracker.ensure_running()
    block = (signal.SIG_BLOCK, {signal.SIGINT})
    with ThreadPoolExecutor(processes, "", signal.pthread_sigmask, block) as threads:
        list(threads.map(judge_apart, groups))


def _record_apart(runs: Sequence[Planned], path: Path, until: float, parent: int) -> None:
    """Record the runs, and end with `parent`, which tells why."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also in its ranks
    sys.__stderr__ = None  # type: ignore[misc]
    with leaving_on_signals():
        die_with_parent(parent, signal.SIGTERM)
        _record(runs, path, jobs=JOBS_OF_ONE, until=until)


def _show(run: Done) -> None:
    place = f"{number(run.world, 'rank')}, seed {run.seed}"
    checks = f"{number(sum(run.verdicts.values()), 'check')} judged"
    counts = f"{number(run.cases, 'case')}, {checks}, {number(len(run.alarms), 'alarm')}"
    sys.stdout.write(f"{run.block}: {run.adapter}, {place}: {counts}, {run.seconds:.1f} s\n")
    for alarm in run.alarms:
        sys.stdout.write(f"  {alarm['sentence']}\n  {alarm['repro']}\n")
    sys.stdout.flush()
