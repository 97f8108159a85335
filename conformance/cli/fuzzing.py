"""The command ``fuzz``: examples that nobody wrote, and the smallest that goes wrong."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis.configuration import set_hypothesis_home_dir

from conformance.checks import CHECKS
from conformance.cli.interrupt import telling
from conformance.cli.options import worlds_of
from conformance.cli.show import Ticker, note
from conformance.drawing import Example, examples
from conformance.errors import UsageError
from conformance.expectations import Expectations, read_expectations
from conformance.fuzz import Deviation, Search
from conformance.machine import device_for, notes
from conformance.matrix import Matrix
from conformance.mutants import mutant_named
from conformance.report.text import about_text
from conformance.report.words import indented, number
from conformance.room import temporary_folder
from conformance.session import Session, Setting
from conformance.subject import Subject
from conformance.verdicts import BAD, EXIT_BAD, EXIT_OK, EXIT_UNDECIDED, Finding, Verdict
from conformance.work import variants_of


@dataclass(frozen=True, kw_only=True)
class FuzzOptions:
    """Options of ``fuzz``; see the command's help."""

    variants: tuple[str, ...]
    examples: int
    worlds: str
    device: str
    mutant: str | None
    expect: Path | None
    timeout: float
    seed: int
    quiet: bool


def fuzz_command(adapters: Sequence[str], options: FuzzOptions) -> int:
    """Search, and show every deviation when it is as small as it gets; returns the exit status.

    Raises:
        UsageError: before anything is started.
    """
    if options.mutant is not None:
        mutant_named(options.mutant)
    planted = [
        replace(subject, mutant=options.mutant)
        for adapter in dict.fromkeys(adapters)
        for subject in variants_of(adapter, options.variants)
    ]
    subjects = [(subject, subject.make()) for subject in planted]
    expectations = read_expectations(options.expect) if options.expect else Expectations()
    worlds = worlds_of(options.worlds)
    devices = {world: device_for(options.device, world) for world in worlds}
    if not any(world % adapter.replicas == 0 for world in worlds for _, adapter in subjects):
        raise UsageError(
            f"--world {options.worlds!r}: too few ranks for the replicas of any variant"
        )
    if not options.quiet:
        note(notes(options.device, worlds[-1]))
    with temporary_folder() as folder:
        # what Hypothesis remembers from run to run would lie in the user's folder
        set_hypothesis_home_dir(folder / "hypothesis")
        settings = {
            world: Setting(
                world=world,
                device=device,
                seed=options.seed,
                timeout=options.timeout,
                directory=folder / f"histories-{world}",
            )
            for world, device in devices.items()
        }
        with Judged(settings, expectations, with_control=options.mutant is None) as judged:
            search = Search(
                judge=judged,
                strategy=examples(subjects, list(CHECKS.values()), worlds),
                examples=options.examples,
                seed=options.seed,
            )
            hunt = Hunt(search, judged, where(devices), Ticker(quiet=options.quiet))
            with telling(hunt.rest):
                return hunt.follow()


def where(devices: Mapping[int, str]) -> str:
    """With which ranks, such as ``1 or 2 ranks on cpu``; each kind of device by itself."""
    kinds = dict.fromkeys(devices.values())
    worlds = {kind: [w for w, device in devices.items() if device == kind] for kind in kinds}
    return ", ".join(
        f"{' or '.join(map(str, own[:-1]))} or {ranks}" if own[:-1] else ranks
        for kind, own in worlds.items()
        for ranks in [f"{number(own[-1], 'rank')} on {kind}"]
    )


class Judged:
    """Runs and judges examples, and counts what came of them; keeps no history.

    What went wrong is run again when it is asked for again, so that a search sees whether it does
    so every time. As a context manager, ends its ranks.
    """

    def __init__(
        self, settings: Mapping[int, Setting], expectations: Expectations, *, with_control: bool
    ) -> None:
        """Nothing is run yet.

        Args:
            settings: where and how, by number of ranks.
            expectations: see `Matrix`.
            with_control: see `Matrix`.
        """
        self.checks = 0
        self.faults: dict[str, Finding] = {}
        self._known: dict[tuple[int, Subject, str], list[Finding]] = {}
        self._settings, self._expectations = settings, expectations
        self._with_control = with_control
        self._matrices: dict[int, Matrix] = {}
        self._sessions = ExitStack()

    def __enter__(self) -> Judged:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sessions.close()

    def __call__(self, example: Example) -> Sequence[Finding]:
        """The findings of one example."""
        key = (example.world, example.subject, str(example.planned.case))
        if key in self._known:
            return self._known[key]
        matrix = self._matrix(example.world)
        found = [one.finding for one in matrix.report(example)]
        if all(finding.verdict not in BAD for finding in found):
            self._known[key] = found
        self.checks += sum(f.verdict is Verdict.PASS for f in found)
        for finding in found:
            if finding.verdict is Verdict.ERROR:
                self.faults.setdefault(finding.sentence, finding)
        for folder in matrix.root.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def _matrix(self, world: int) -> Matrix:
        """Judges examples of so many ranks, which are kept from one to the next."""
        if world not in self._matrices:
            setting = self._settings[world]
            setting.directory.mkdir(exist_ok=True)
            session = self._sessions.enter_context(Session(setting))
            self._matrices[world] = Matrix(
                histories=lambda i: session.run(i.subject, i.planned.case, probe=i.planned.probe),
                root=setting.directory,
                world=world,
                seed=setting.seed,
                expectations=self._expectations,
                with_control=self._with_control,
            )
        return self._matrices[world]


class Hunt:
    """A search as it is shown."""

    def __init__(self, search: Search, judged: Judged, where: str, ticker: Ticker) -> None:
        """Begins now; `where` says with which ranks."""
        self._search = replace(search, judge=self._judge)
        self._judged, self._where, self._ticker = judged, where, ticker
        self._started, self._found = time.monotonic(), 0

    def follow(self) -> int:
        """Show every deviation as it is found, then the summary; returns the exit status."""
        for deviation in self._search.deviations():
            self._ticker.clear()
            self._found += 1
            sys.stdout.write(deviation_text(deviation))
            sys.stdout.flush()
        self._ticker.clear()
        sys.stdout.write(self.rest())
        if self._found:
            return EXIT_BAD
        return EXIT_OK if self._judged.checks and not self._judged.faults else EXIT_UNDECIDED

    def rest(self) -> str:
        """What is known, as far as the search is, and was not shown when it was found."""
        search, seconds = self._search, time.monotonic() - self._started
        unfinished, found = search.unfinished, self._found
        text = ""
        if unfinished is not None:
            text, found = deviation_text(unfinished), found + 1
        for fault in list(self._judged.faults.values()):
            lines = "\n".join(indented(fault.sentence, 6))
            text += f"ERROR  {fault.id}\n{lines}\n\n"
        refused = f" ({search.refused} refused)" if search.refused else ""
        summary = (
            f"{number(search.tried, 'example')}{refused}, {number(found, 'deviation')},"
            f" {number(self._judged.checks, 'check')} passed in {seconds:.1f} s,"
            f" {_rate(search.tried / seconds)} examples a second"
            f" ({self._where}, seed {search.seed})"
        )
        return text + "".join(f"{line}\n" for line in indented(summary, 0))

    def _judge(self, example: Example) -> Sequence[Finding]:
        search, seconds = self._search, time.monotonic() - self._started
        found = self._found + bool(search.unfinished)
        smaller = "; making the last one smaller" if search.unfinished else ""
        self._ticker.show(
            f"{search.tried} of {number(search.examples, 'example')},"
            f" {number(found, 'deviation')} in {seconds:.0f} s{smaller}"
        )
        return self._judged(example)


def _rate(rate: float) -> str:
    """Two digits where it is slow, and never an exponent of ten where it is fast."""
    return f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


def deviation_text(deviation: Deviation) -> str:
    """The smallest example, what is wrong with it, and how to repeat it."""
    finding = deviation.finding
    lines = [f"{finding.verdict}  {finding.id}", *indented(finding.sentence, 6)]
    lines += about_text(finding)
    if deviation.met != deviation.example:
        lines.append(f"      first met after {number(deviation.tried, 'example')}: {deviation.met}")
    if not deviation.smallest:
        lines.append("      the search was ended before this was as small as it gets")
    if not deviation.steady:
        lines.append("      when it was repeated, it passed")
    return "\n".join([*lines, f"      {finding.repro}", "", ""])
