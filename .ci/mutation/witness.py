"""Plugins of pytest: which tests run and in which order, what came of them, which lines they ran.

Knows pytest and the verdicts on ranks; must not know mutants or what counts as killed.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from lines import Lines

LOST = frozenset({"HANG", "CRASH", "DESYNC", "TRANSPORT"})
"""Verdicts on ranks that a time-out, a dead process or a broken connection led to."""
_TRANSPORT = re.compile(r"gloo/|Connection (closed|reset)|[Tt]imed out|Broken pipe")
_LOST_AT_MOST = 3
_TEXT = 4000
"""Characters of a failure that are kept."""


class Chosen:
    """Runs these tests in this order, whatever else their files hold."""

    def __init__(self, tests: Sequence[str]) -> None:
        """Ids of tests."""
        self._place = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Leave others out before anyone marks by number, and sort when all have had their say."""
        items[:] = [item for item in items if item.nodeid in self._place]
        yield
        items.sort(key=lambda item: self._place[item.nodeid])


class Witness:
    """Remembers failures, each with the verdict on the ranks' last job; ends a run that has failed.

    Ranks that hang or lose each other tell nothing of the code, nor does a file that cannot be
    imported, so the next tests run on.
    """

    def __init__(self) -> None:
        """Nothing has failed yet."""
        self.failures: list[dict[str, str]] = []
        self._ranks = ""
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Where to say that it is enough."""
        self._session = session

    def pytest_collectreport(self, report: Any) -> None:
        """A module that cannot be imported."""
        if report.failed:
            self._note(report, "collect")

    def pytest_runtest_logstart(self) -> None:
        """Another test: what an earlier one had from its ranks is no part of it."""
        self._ranks = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test, or what prepares it or cleans up after it."""
        if report.failed:
            self._note(report, report.when)

    def watch_ranks(self) -> None:
        """See every verdict on ranks that did not come through."""
        from conformance.ranks.pool import RankPool

        run = RankPool.run

        def watched(pool: RankPool, *args: Any, **options: Any) -> Any:
            outcome = run(pool, *args, **options)
            self._ranks = "TRANSPORT" if _only_lost(outcome) else str(outcome.verdict)
            return outcome

        RankPool.run = watched  # type: ignore[method-assign]

    def _note(self, report: Any, when: str) -> None:
        text = report.longreprtext[-_TEXT:]
        self.failures.append(
            {"test": report.nodeid, "when": when, "ranks": self._ranks, "text": text}
        )
        run = [failure for failure in self.failures if failure["when"] != "collect"]
        told = any(failure["ranks"] not in LOST for failure in run)
        if self._session is not None and (told or len(run) >= _LOST_AT_MOST):
            self._session.shouldfail = "a test has failed"


class Surveyor:
    """Measures what each test runs, and stops after some seconds.

    Attributes:
        tests: by id, of those that came to their end: "outcome" (passed, failed, skipped),
            "seconds", "why" it failed, "lines" of each module.
        left: ids of the others.
        long: ids of those that are left out unless asked for.
    """

    def __init__(self, lines: Lines, seconds: float) -> None:
        """Begin no test later than after `seconds`."""
        self.tests: dict[str, dict[str, Any]] = {}
        self.left: list[str] = []
        self.long: list[str] = []
        self._lines = lines
        self._until = time.monotonic() + seconds
        self._labels: list[str] = []
        self._using: dict[str, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All are left at first."""
        self.left = [item.nodeid for item in session.items]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Left out by their mark."""
        self.long += [item.nodeid for item in items]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test with what prepares it."""
        self.tests[item.nodeid] = {"outcome": "passed", "seconds": 0.0, "why": ""}
        self._using[item.nodeid] = [item.nodeid, *getattr(item, "fixturenames", ())]
        with self._under(item.nodeid), self._lines.measured():
            result = yield
        self.left.remove(item.nodeid)
        if time.monotonic() > self._until:
            item.session.shouldstop = "time is up"
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        """What a fixture of several tests runs on ranks counts for all of them."""
        if fixturedef.scope == "function":
            return (yield)
        with self._under(fixturedef.argname):
            return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """The seconds of all stages, and the worst outcome."""
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        if report.failed:
            test["outcome"], test["why"] = "failed", report.longreprtext[-_TEXT:]
        elif report.skipped and test["outcome"] == "passed":
            test["outcome"] = "skipped"

    def pytest_sessionfinish(self) -> None:
        """Put the lines to the tests."""
        by_name: dict[str, list[dict[str, set[int]]]] = defaultdict(list)
        for number, modules in self._lines.found().items():
            by_name[self._labels[number]].append(modules)
        for name, test in self.tests.items():
            lines: dict[str, set[int]] = defaultdict(set)
            for modules in (each for used in self._using[name] for each in by_name[used]):
                for module, numbers in modules.items():
                    lines[module] |= numbers
            test["lines"] = {module: sorted(numbers) for module, numbers in lines.items()}
            test["seconds"] = round(test["seconds"], 2)

    def _under(self, name: str) -> Any:
        return _Label(self._lines, self._labels, name)


class _Label:
    """Inside, what runs counts for `name`."""

    def __init__(self, lines: Lines, labels: list[str], name: str) -> None:
        self._lines, self._before = lines, lines.label
        labels.append(name)
        self._number = len(labels) - 1

    def __enter__(self) -> None:
        self._lines.label = self._number

    def __exit__(self, *_: object) -> None:
        self._lines.label = self._before


def _only_lost(outcome: Any) -> bool:
    """Whether all that the failed ranks say is that they lost each other."""
    told = [report.message for report in outcome.reports if report is not None and report.error]
    return bool(told) and all(_TRANSPORT.search(message) for message in told)
