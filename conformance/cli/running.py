"""The command ``run``: from options to a log, its derived files and an exit status."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.cli.interrupt import telling
from conformance.cli.options import HISTORIES, is_new
from conformance.cli.show import Progress, complain, note, progress_for
from conformance.errors import UsageError
from conformance.expectations import Expectations, read_expectations
from conformance.header import header
from conformance.item import Item
from conformance.machine import default_jobs, device_for, notes
from conformance.matrix import Matrix
from conformance.names import BASELINES
from conformance.report.junit import write_junit
from conformance.report.lines import LOG_NAME, Role
from conformance.report.log import RunLog
from conformance.report.text import report_text
from conformance.room import temporary_folder, told
from conformance.session import Session, Setting
from conformance.verdicts import EXIT_OK, EXIT_UNDECIDED
from conformance.work import Selection, Work, work_of

JUNIT_NAME = "junit.xml"
PROBE_TIMEOUT = 20.0
"""Seconds; a capability that is tried out unasked must not hold up a run."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``run`` that do not select what is judged; see the command's help."""

    world: int
    device: str
    baseline: str
    expect: Path | None
    out: Path | None
    jobs: int | None
    timeout: float
    seed: int
    quiet: bool


def run_command(selection: Selection, options: RunOptions, command: Sequence[str]) -> int:
    """Judge a selection; returns the exit status.

    Raises:
        UsageError: before anything is written or started.
    """
    device = device_for(options.device, options.world)
    expectations = read_expectations(options.expect) if options.expect else Expectations()
    work = work_of(selection, without=BASELINES[options.baseline].cannot)
    jobs = options.jobs or default_jobs(options.world, device)
    with _folder(options.out) as folder:
        setting = Setting(
            world=options.world,
            device=device,
            seed=options.seed,
            timeout=options.timeout,
            directory=folder / HISTORIES,
            baseline=options.baseline,
        )
        if not options.quiet:
            note(notes(options.device, options.world))
        fields = header(work, selection, setting, expectations, command)
        kept = options.out is not None
        partial = f"{folder / LOG_NAME} is partial" if kept else ""
        apart = "" if options.quiet else "\n"  # from what was shown of each case
        started = time.monotonic()
        with (
            # full, a folder that goes at the end anyway must not end the run
            RunLog(folder if kept else None, fields) as log,
            telling(lambda: apart + report_text(log.log), partial),
            progress_for(len(work.items), quiet=options.quiet) as progress,
        ):
            judge_all(work, setting, expectations, log, progress, jobs)
            whole = not (selection.narrowed or log.fault)
            stale = expectations.stale(selection.adapters) if whole else []
            status = log.finish(stale=stale, seconds=time.monotonic() - started)
        fault = log.fault
        if kept and not fault:
            try:
                write_junit(log.log, folder / JUNIT_NAME)
            except OSError as error:
                fault = told(error, f"{JUNIT_NAME} is partial", folder / JUNIT_NAME)
        sys.stdout.write(report_text(log.log))
    if fault:
        complain(fault)
    return EXIT_UNDECIDED if fault and status == EXIT_OK else status


def judge_all(
    work: Work,
    setting: Setting,
    expectations: Expectations,
    log: RunLog,
    progress: Progress,
    jobs: int,
) -> None:
    """Judge every item and write what was found as it is found, as long as that can be written."""
    with Session(setting, jobs=jobs) as session:

        def histories(item: Item) -> Path:
            planned = item.planned
            short = min(PROBE_TIMEOUT, setting.timeout)
            timeout = short if item.role is Role.PROBE else None
            return session.run(item.subject, planned.case, probe=planned.probe, timeout=timeout)

        matrix = Matrix(
            histories=histories,
            root=setting.directory,
            world=setting.world,
            seed=setting.seed,
            expectations=expectations,
        )
        for item, reported in matrix.run(work.items, jobs=jobs):
            for one in reported:
                log.add(one)
            progress.judged(item, reported)
            if log.fault:
                break


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The folder of a run: a new one that is kept, or a temporary one.

    Raises:
        UsageError: `out` holds anything already, or is no folder.
    """
    if out is None:
        with temporary_folder() as folder:
            yield folder
        return
    is_new(out)
    try:
        (out / HISTORIES).mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--out {str(out)!r}: cannot make the folder: {error.strerror}") from error
    yield out.resolve()
