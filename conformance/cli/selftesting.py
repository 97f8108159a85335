"""The command ``selftest``: the kill diagonal at the caller's world and device."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from conformance.cli.interrupt import telling
from conformance.cli.kill_page import counted, kills_page
from conformance.cli.show import complain, note
from conformance.machine import CPU, cores, default_jobs, device_for, notes
from conformance.report.words import indented, number
from conformance.room import temporary_folder, told
from conformance.selftest import GOOD, LEFT_OUT, Diagonal, Kill, diagonal, select_mutants
from conformance.session import Setting
from conformance.verdicts import EXIT_BAD, EXIT_OK, EXIT_UNDECIDED
from conformance.versions import versions


def selftest_command(
    patterns: Sequence[str],
    *,
    world: int,
    device: str,
    jobs: int | None,
    timeout: float,
    page: Path | None,
) -> int:
    """Measure the diagonal, one line per mutant as it comes; returns the exit status.

    With `page` what every check said of every mutant is written there.

    Raises:
        UsageError: a pattern that matches no mutant, or a setting that does not fit this machine.
    """
    mutants = select_mutants(patterns)
    here = notes(device, world)
    device = device_for(device, world)
    note(here)
    jobs = jobs or default_jobs(world, device)
    started = time.monotonic()
    where = f"{number(world, 'rank')} on {device}"
    results: list[Diagonal] = []

    def done(result: Diagonal) -> None:
        results.append(result)
        _show(result)

    def known() -> str:
        return diagonal_text(results, where, time.monotonic() - started, planned=len(mutants))

    with temporary_folder() as folder, telling(known):
        setting = Setting(world=world, device=device, timeout=timeout, directory=folder)
        diagonal(setting, mutants, jobs=jobs, done=done)
    seconds = time.monotonic() - started
    sys.stdout.write(known())
    status = diagonal_status(results)
    if page is not None:
        text = kills_page(results, _circumstances(world, device, seconds))
        try:
            page.write_text(text, encoding="utf-8")
        except OSError as error:
            lost, elsewhere = "the page is not whole", "name another file by --page"
            complain(told(error, lost, page, elsewhere=elsewhere))
            return EXIT_UNDECIDED if status == EXIT_OK else status
    return status


def diagonal_status(results: Sequence[Diagonal]) -> int:
    """0 if every mutant that shows in this world is killed as stated and there is one."""
    if any(result.kill not in GOOD for result in results):
        return EXIT_BAD
    return EXIT_OK if any(r.kill is Kill.KILLED for r in results) else EXIT_UNDECIDED


def mutant_text(result: Diagonal) -> str:
    """One plain line."""
    return f"{result.kill.upper():<15} {result.mutant} ({result.check}: {result.cause})"


def diagonal_text(
    results: Sequence[Diagonal], where: str, seconds: float, *, planned: int = 0
) -> str:
    """The mutants that were not killed as stated, then those left out and why, then the counts.

    Fewer results than were `planned` are those of a command that was ended.
    """
    lines: list[str] = []
    for result in results:
        if result.kill not in GOOD:
            lines += ["", mutant_text(result), *indented(result.sentence, 6)]
            if result.first is not None:
                lines.append(f"      {result.first.repro}")
    left_out: dict[str, list[str]] = {}
    for result in results:
        if result.kill in LEFT_OUT:
            left_out.setdefault(f"{result.kill}: {result.sentence}", []).append(result.mutant)
    for reason, names in left_out.items():
        lines += ["", f"not measured, {reason}", *indented(", ".join(names), 6)]
    total = counted(results) or "nothing measured"
    if len(results) < planned:
        total = f"PARTIAL: {len(results)} of {number(planned, 'mutant')}; {total}"
    lines += ["", f"{total} in {seconds:.1f} s ({where})", ""]
    return "\n".join(lines)


def _circumstances(world: int, device: str, seconds: float) -> str:
    own, where = versions(), f"{number(world, 'rank')} on {device}"
    if device != CPU:
        where += f" ({torch.get_device_module(device).get_device_name()})"
    return (
        f"{datetime.now(UTC).date()}: {where}, {number(cores(), 'core')}, torch {own['torch']},"
        f" Python {own['python']}, {seconds:.0f} s."
    )


def _show(result: Diagonal) -> None:
    sys.stdout.write(mutant_text(result) + "\n")
    sys.stdout.flush()
