"""What is shown while a run goes on: a progress bar, or plain lines for every case.

The bar stands on standard output's terminal and goes when the report comes.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from conformance.cli.interrupt import START_OF_LINE
from conformance.item import Item
from conformance.report.lines import Reported, Role
from conformance.report.plain import case_lines
from conformance.verdicts import BAD, Verdict

EVERY = 10.0
"""Seconds between two lines that say how far something is."""


class Progress:
    """Shows nothing."""

    def judged(self, item: Item, reported: Sequence[Reported]) -> None:
        """Called once per item."""


class Lines(Progress):
    """Plain lines: one for what passes in a case, one for each reason why something does not."""

    def judged(self, item: Item, reported: Sequence[Reported]) -> None:
        """Print what was found in the item's case."""
        sys.stdout.writelines(f"{line}\n" for line in case_lines(reported))
        sys.stdout.flush()


class Live(Progress):
    """A bar that says how far the run is and how it goes."""

    def __init__(self, bar: Bar, total: int) -> None:
        """Count up to `total` items on `bar`."""
        self._bar = bar
        self._counts: Counter[Verdict] = Counter()
        self._task = bar.add_task("", total=total, verdicts="", now="")

    def judged(self, item: Item, reported: Sequence[Reported]) -> None:
        """Advance; the first bad finding of the item is named above the bar at once."""
        judged = [one.finding for one in reported if one.role is Role.JUDGED]
        self._counts.update(finding.verdict for finding in judged)
        bad = next((finding for finding in judged if finding.verdict in BAD), None)
        if bad is not None:
            line = f"{bad.verdict}  {bad.id}"
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        shown = ", ".join(f"{self._counts[v]} {v}" for v in Verdict if self._counts[v])
        now = f"{item.subject.adapter}/{item.planned.case}"
        self._bar.update(self._task, advance=1, verdicts=shown, now=now)


class Ticker:
    """One line that says how far something is, beside the results, not among them.

    On a terminal it is written over and over, elsewhere there is one every `EVERY` seconds.
    """

    def __init__(self, *, quiet: bool) -> None:
        """Nothing is shown yet; nothing ever, if it is to be quiet."""
        self._quiet, self._last = quiet, time.monotonic()

    def show(self, text: str) -> None:
        """Say how far it is now."""
        now = time.monotonic()
        if self._quiet:
            return
        if sys.stderr.isatty():
            self.clear()
            sys.stderr.write(text[: shutil.get_terminal_size().columns - 1])
        elif now - self._last >= EVERY:
            self._last = now
            sys.stderr.write(f"fsdp-conformance: {text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Make room for what comes on the same terminal."""
        if not self._quiet and sys.stderr.isatty():
            sys.stderr.write(START_OF_LINE)
            sys.stderr.flush()


def complain(sentence: str) -> None:
    """Say in one line what went wrong; beside the results, not among them."""
    sys.stderr.write(f"fsdp-conformance: {' '.join(sentence.split())}\n")
    sys.stderr.flush()


def note(lines: Iterable[str]) -> None:
    """Tell what is worth knowing before the work starts; beside the results, not among them."""
    for line in lines:
        sys.stderr.write(f"fsdp-conformance: note: {line}\n")
    sys.stderr.flush()


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note([record.getMessage()])


@contextmanager
def noting(*, quiet: bool) -> Iterator[None]:
    """Inside, what rooms that print nothing log as a warning is told as a note, or not at all."""
    logger = logging.getLogger("conformance")
    handler = logging.NullHandler() if quiet else _Notes()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def progress_for(total: int, *, quiet: bool) -> Iterator[Progress]:
    """What to show for `total` items on the terminal, or without one."""
    console = Console()
    if quiet:
        yield Progress()
    elif not console.is_terminal:
        yield Lines()
        sys.stdout.write("\n")  # the report follows
    else:
        columns = (
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[verdicts]}", markup=False),
        )
        with Bar(*columns, console=console, transient=True) as bar:
            yield Live(bar, total)
