"""The command ``fuzz``: examples that nobody wrote, and the smallest that goes wrong."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis.configuration import set_hypothesis_home_dir

from conformance.adapters import make_adapter
from conformance.checks import CHECKS
from conformance.cli.interrupt import leaving_on_interrupt
from conformance.cli.running import check_limits
from conformance.cli.show import note
from conformance.drawing import examples
from conformance.errors import UsageError
from conformance.expectations import Expectations, read_expectations
from conformance.fuzz import Deviation, Search
from conformance.item import Item
from conformance.machine import device_for, notes
from conformance.matrix import Matrix
from conformance.mutants import mutant_named
from conformance.report.text import indented, number
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import BAD, EXIT_BAD, EXIT_OK, EXIT_UNDECIDED, Finding, Verdict
from conformance.work import variants_of


@dataclass(frozen=True, kw_only=True)
class FuzzOptions:
    """Options of ``fuzz``; see the command's help."""

    variants: tuple[str, ...]
    examples: int
    world: int
    device: str
    mutant: str | None
    expect: Path | None
    timeout: float
    seed: int


def fuzz_command(adapter: str, options: FuzzOptions) -> int:
    """Search, and show every deviation when it is as small as it gets; returns the exit status.

    Raises:
        UsageError: before anything is started.
    """
    check_limits(options.timeout, seed=options.seed)
    if options.examples < 1:
        raise UsageError(f"--examples {options.examples}: at least 1")
    subjects = [
        (Subject(adapter=s.adapter, variant=s.variant, mutant=options.mutant), driver)
        for s in variants_of(adapter, options.variants)
        for driver in [make_adapter(s.adapter, s.variant)[0]]
    ]
    if options.mutant is not None:
        mutant_named(options.mutant)
    expectations = read_expectations(options.expect) if options.expect else Expectations()
    told = notes(options.device, options.world)
    device = device_for(options.device, options.world)
    note(told)
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-") as name:
        # what Hypothesis remembers from run to run would lie in the user's folder
        set_hypothesis_home_dir(Path(name) / "hypothesis")
        setting = Setting(
            world=options.world,
            device=device,
            seed=options.seed,
            timeout=options.timeout,
            directory=Path(name) / "histories",
        )
        with Session(setting) as session:
            judged = Judged(session, expectations, with_control=options.mutant is None)
            search = Search(
                judge=judged,
                strategy=examples(subjects, list(CHECKS.values())),
                examples=options.examples,
                seed=options.seed,
            )
            hunt = Hunt(search, judged, f"{number(options.world, 'rank')} on {device}")
            with leaving_on_interrupt(Path(name), hunt.summary):
                return hunt.follow()


class Judged:
    """Runs and judges examples, and counts what came of them; keeps no history.

    What went wrong is run again when it is asked for again, so that a search sees whether it does
    so every time.
    """

    def __init__(self, session: Session, expectations: Expectations, *, with_control: bool) -> None:
        """Nothing is run yet; see `Matrix` for the arguments."""
        self.checks = 0
        self.faults: dict[str, Finding] = {}
        self._known: dict[tuple[Subject, str], list[Finding]] = {}
        self._directory = session.setting.directory
        self._matrix = Matrix(
            histories=lambda i: session.run(i.subject, i.planned.case, probe=i.planned.probe),
            root=session.setting.directory,
            world=session.setting.world,
            seed=session.setting.seed,
            expectations=expectations,
            with_control=with_control,
        )

    def __call__(self, item: Item) -> Sequence[Finding]:
        """The findings of one example."""
        key = (item.subject, str(item.planned.case))
        if key in self._known:
            return self._known[key]
        found = [one.finding for one in self._matrix.report(item)]
        if all(finding.verdict not in BAD for finding in found):
            self._known[key] = found
        self.checks += sum(f.verdict is Verdict.PASS for f in found)
        for finding in found:
            if finding.verdict is Verdict.ERROR:
                self.faults.setdefault(finding.sentence, finding)
        for folder in self._directory.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        return found


class Hunt:
    """A search as it is shown."""

    def __init__(self, search: Search, judged: Judged, where: str) -> None:
        """Begins now; `where` says with which ranks."""
        self._search, self._judged, self._where = search, judged, where
        self._started, self._found = time.monotonic(), 0

    def follow(self) -> int:
        """Show every deviation as it is found, then the summary; returns the exit status."""
        for deviation in self._search.deviations():
            self._found += 1
            sys.stdout.write(deviation_text(deviation))
            sys.stdout.flush()
        faults = self._judged.faults.values()
        for fault in faults:
            lines = "\n".join(indented(fault.sentence, 6))
            sys.stdout.write(f"ERROR  {fault.id}\n{lines}\n\n")
        sys.stdout.write(self.summary() + "\n")
        if self._found:
            return EXIT_BAD
        return EXIT_OK if self._judged.checks and not faults else EXIT_UNDECIDED

    def summary(self) -> str:
        """How far the search is, in one line."""
        seconds, tried = time.monotonic() - self._started, self._search.tried
        return (
            f"{number(tried, 'example')}, {number(self._found, 'deviation')},"
            f" {number(self._judged.checks, 'check')} passed in {seconds:.1f} s,"
            f" {tried / seconds:.1f} examples a second ({self._where}, seed {self._search.seed})"
        )


def deviation_text(deviation: Deviation) -> str:
    """The smallest example, what is wrong with it, and how to repeat it."""
    finding = deviation.finding
    lines = [f"{finding.verdict}  {finding.id}", *indented(finding.sentence, 6)]
    if finding.cause is not None:
        lines.append(f"      cause: {finding.cause}")
    if deviation.met != finding.case:
        lines.append(f"      first met after {number(deviation.tried, 'example')}: {deviation.met}")
    if not deviation.steady:
        lines.append("      when it was repeated, it passed")
    return "\n".join([*lines, f"      {finding.repro}", "", ""])
