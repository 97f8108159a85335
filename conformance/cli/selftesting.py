"""The command ``selftest``: the kill diagonal at the caller's world and device."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from conformance.cli.interrupt import leaving_on_interrupt
from conformance.cli.running import check_limits
from conformance.cli.show import note
from conformance.machine import default_jobs, device_for, notes
from conformance.report.text import indented, number
from conformance.selftest import GOOD, LEFT_OUT, Diagonal, Kill, diagonal, select_mutants
from conformance.session import Setting
from conformance.verdicts import EXIT_BAD, EXIT_OK, EXIT_UNDECIDED


def selftest_command(
    patterns: Sequence[str], *, world: int, device: str, jobs: int | None, timeout: float
) -> int:
    """Measure the diagonal, one line per mutant as it comes; returns the exit status.

    Raises:
        UsageError: a pattern that matches no mutant, a limit under which nothing runs, or a setting
            that does not fit this machine.
    """
    check_limits(timeout, jobs)
    mutants = select_mutants(patterns)
    told = notes(device, world)
    device = device_for(device, world)
    note(told)
    jobs = jobs or default_jobs(world, device)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-") as name:
        setting = Setting(world=world, device=device, timeout=timeout, directory=Path(name))
        with leaving_on_interrupt(Path(name)):
            results = diagonal(setting, mutants, jobs=jobs, done=_show)
    where = f"{number(world, 'rank')} on {device}"
    sys.stdout.write(diagonal_text(results, where, time.monotonic() - started))
    return diagonal_status(results)


def diagonal_status(results: Sequence[Diagonal]) -> int:
    """0 if every mutant that shows in this world is killed as stated and there is one."""
    if any(result.kill not in GOOD for result in results):
        return EXIT_BAD
    return EXIT_OK if any(r.kill is Kill.KILLED for r in results) else EXIT_UNDECIDED


def mutant_text(result: Diagonal) -> str:
    """One plain line."""
    return f"{result.kill.upper():<15} {result.mutant} ({result.check}: {result.cause})"


def diagonal_text(results: Sequence[Diagonal], where: str, seconds: float) -> str:
    """The mutants that were not killed as stated, then those left out and why, then the counts."""
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
    counts = Counter(result.kill for result in results)
    shown = ", ".join(f"{counts[kill]} {kill}" for kill in Kill if counts[kill])
    lines += ["", f"{shown} in {seconds:.1f} s ({where})", ""]
    return "\n".join(lines)


def _show(result: Diagonal) -> None:
    sys.stdout.write(mutant_text(result) + "\n")
    sys.stdout.flush()
