"""One pytest test per check and case, for the test file of a project that has a wrapper.

    from conformance import parametrize_with_checks

    @parametrize_with_checks("my_package.adapter:MyAdapter")
    def test_conforms(check):
        check()

The ids are those of the findings. Every case is run once, whoever asks first, and its history is
shared by all workers of ``pytest -n``; each test judges it and turns the verdict into an outcome:

| verdict | outcome |
|---|---|
| PASS | passed |
| FAIL, DESYNC, HANG, CRASH, XPASS | failed; says what the case does, and the line that repeats it |
| ERROR, VACUOUS | failed: nothing was proven, and nobody would look at a skip |
| XFAIL | xfailed, with the reason of the expectation |
| UNSUPPORTED, NO_POWER | skipped: not claimed, or it needs more ranks or digits |
| BLOCKED | skipped: ``run.completed`` of the same case fails and says why |

The control of ``fsdp-conformance run`` and the trial of unclaimed capabilities are not part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from conformance.adapter import Adapter
from conformance.adapters import BUILT_IN
from conformance.errors import UsageError
from conformance.expectations import Expectations, read_expectations
from conformance.item import Item
from conformance.machine import AUTO, device_for
from conformance.matrix import Matrix
from conformance.names import depth_named
from conformance.report.lines import Reported, Role
from conformance.report.text import about_text
from conformance.report.words import indented
from conformance.session import Session, Setting
from conformance.verdicts import COMPLETED, Verdict, finding_id
from conformance.work import Selection, work_of

FIXTURE = "conformance_histories"
"""The session fixture of `conformance.pytest_plugin` that opens and closes `Histories`."""

SKIPPED = frozenset({Verdict.UNSUPPORTED, Verdict.NO_POWER, Verdict.BLOCKED})

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the cases of one decorated test run; cases of one place share ranks and histories."""

    world: int
    device: str
    seed: int
    timeout: float


@dataclass(frozen=True)
class ConformanceTest:
    """What a decorated test receives: call it to judge one check on one case.

    Attributes:
        id: of the finding.
        check: id of the check.
        item: the case with all checks that judge it.
        place: where it runs.
        expectations: applied to the verdict.
    """

    id: str
    check: str
    item: Item
    place: Place
    expectations: Expectations

    def __call__(self) -> None:
        """Run the case unless its history is there, judge it, and settle the test's outcome.

        Raises:
            pytest's own outcomes: failed, skipped, xfailed; see the module's table.
        """
        __tracebackhide__ = True
        found = Histories.opened().report(self.place, self.item)
        settle(next(one for one in found if one.finding.check == self.check), self.expectations)

    def __repr__(self) -> str:
        """The id, which is what a failing test's arguments should show."""
        return self.id


def parametrize_with_checks(  # noqa: PLR0913 - the options of `run`, by name
    adapter: str | type[Adapter],
    *,
    variant: str | None = None,
    world: int = 2,
    device: str = AUTO,
    profiles: str | Sequence[str] = (),
    checks: str | Sequence[str] = (),
    models: str | Sequence[str] = (),
    cases: str | Sequence[str] = (),
    depth: str | None = None,
    expect: Path | str | None = None,
    seed: int = 0,
    timeout: float = 60.0,
) -> Callable[[Function], Function]:
    """Decorate ``def test_…(check): check()``: one test per check and case of an adapter.

    Args:
        adapter: name of an adapter, or a class of a module that ranks can import, such as the
            test's own.
        variant: pattern over its variants; ``None`` takes all.
        world: ranks.
        device: auto, cpu, or the type of the accelerator.
        profiles: names of profiles, or one name; empty takes all.
        checks: patterns over checks, or one; empty takes all.
        models: patterns over models, or one; empty takes all.
        cases: patterns over cases, such as ``*/train/*``, or one; empty takes all.
        depth: narrow, wide or full; ``None`` takes the first variant, or what `variant` names, wide
            and the others narrow.
        expect: a file of expected findings.
        seed: of every random number.
        timeout: seconds after which one case is ended.

    Raises:
        UsageError: a name that leads to nothing, or a setting that does not fit this machine.
    """
    __tracebackhide__ = True
    try:
        selection = Selection(
            adapters=(adapter if isinstance(adapter, str) else name_of(adapter),),
            variants=() if variant is None else (variant,),
            profiles=_several(profiles),
            checks=_several(checks),
            models=_several(models),
            cases=_several(cases),
            depth=None if depth is None else depth_named(depth),
        )
        place = Place(world=world, device=device_for(device, world), seed=seed, timeout=timeout)
        expectations = Expectations() if expect is None else read_expectations(Path(expect))
        tests = [
            ConformanceTest(
                finding_id(check, item.subject.adapter, item.subject.variant, str(case), seed),
                check,
                item,
                place,
                expectations,
            )
            for item in work_of(selection).items
            if item.role is Role.JUDGED
            for case in [item.planned.case]
            for check in dict.fromkeys((COMPLETED, *(c.id for c in item.planned.checks)))
        ]
    except UsageError as error:
        # nothing but the caller's line stands above it
        raise UsageError(_as_keywords(str(error))) from None

    def decorate(function: Function) -> Function:
        parametrized = pytest.mark.parametrize("check", tests, ids=[test.id for test in tests])
        marked: Function = pytest.mark.usefixtures(FIXTURE)(parametrized(function))
        return marked

    return decorate


_OPTION = re.compile(r"(?<![\w/.-])--(\w+)(?: (?P<number>\d+)\b| (?P<word>\w+)$)?")


def _as_keywords(message: str) -> str:
    """A message about options of the command in the words of who calls a function."""

    def keyword(found: re.Match[str]) -> str:
        value = found["number"] or (found["word"] and repr(found["word"]))
        return f"{found[1]}={value}" if value else found[1]

    return _OPTION.sub(keyword, message)


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def name_of(adapter: type[Adapter]) -> str:
    """The name by which ranks find an adapter class.

    Raises:
        UsageError: it is not a module-level class.
    """
    name = f"{adapter.__module__}:{adapter.__qualname__}"
    if "." in adapter.__qualname__:
        raise UsageError(f"adapter {name}: ranks cannot import it; define it at module level")
    return next((known for known, target in BUILT_IN.items() if target == name), name)


def settle(reported: Reported, expectations: Expectations) -> None:
    """Turn a verdict into a test outcome."""
    __tracebackhide__ = True
    finding, reason = expectations.apply(reported.finding)
    if finding.verdict is Verdict.PASS:
        return
    if finding.verdict is Verdict.XFAIL:
        pytest.xfail(f"{reason} ({finding.sentence})")
    if finding.verdict in SKIPPED:
        pytest.skip(f"{finding.verdict}: {finding.sentence}")
    lines = [f"{finding.verdict}  {finding.id}", *indented(finding.sentence, 6)]
    lines += about_text(finding)
    lines += indented(f"expected to fail: {reason}", 6) if reason else []
    lines += [f"      {finding.repro}"] if finding.repro else []
    pytest.fail("\n".join(lines), pytrace=False)


class Histories:
    """The sessions of one test process; their folder is shared with its sibling workers."""

    _opened: Histories | None = None

    def __init__(self, folder: Path) -> None:
        """Nothing runs before the first test asks."""
        self._folder = folder
        self._matrices: dict[Place, Matrix] = {}
        self._sessions: list[Session] = []
        self._reported: dict[tuple[Place, Item], list[Reported]] = {}

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[None]:
        """For the duration of a test session."""
        cls._opened = cls(folder)
        try:
            yield
        finally:
            cls._opened._close()
            cls._opened = None

    @classmethod
    def opened(cls) -> Histories:
        """The process's own.

        Raises:
            RuntimeError: the plugin's fixture is not active.
        """
        if cls._opened is None:
            raise RuntimeError(f"the fixture {FIXTURE!r} of the plugin fsdp_conformance is missing")
        return cls._opened

    def report(self, place: Place, item: Item) -> list[Reported]:
        """What is found on one case, judged once per process."""
        key = (place, item)
        if key not in self._reported:
            self._reported[key] = self._matrix(place).report(item)
        return self._reported[key]

    def _matrix(self, place: Place) -> Matrix:
        if place not in self._matrices:
            name = f"{place.world}-{place.device}-{place.seed}-{place.timeout:g}"
            setting = Setting(
                world=place.world,
                device=place.device,
                seed=place.seed,
                timeout=place.timeout,
                directory=self._folder / name,
            )
            session = Session(setting)
            self._sessions.append(session)
            self._matrices[place] = Matrix(
                histories=lambda item: session.run(item.subject, item.planned.case),
                root=setting.directory,
                world=place.world,
                seed=place.seed,
                with_control=False,
            )
        return self._matrices[place]

    def _close(self) -> None:
        for session in self._sessions:
            session.close()
