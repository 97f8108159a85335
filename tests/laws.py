"""One line for each law as soon as its draws are over: a long run that is cut keeps what it has.

For runs with the switch of `draws`: how it ended, how often it was drawn, and for how long.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

_DRAWN = "draws of the law"


class Lines:
    """A plugin of pytest, with and without workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Count the draws where they were made; what a report has as properties travels."""
        report = yield
        statistics = getattr(item, "hypothesis_statistics", None)
        if report.when == "call" and statistics is not None:
            drawn = sum(map(int, re.findall(r"(\d+) (?:passing|failing)", statistics)))
            report.user_properties.append((_DRAWN, drawn))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the line."""
        drawn = dict(report.user_properties).get(_DRAWN)
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if report.when != "call" or drawn is None or terminal is None:
            return
        terminal.ensure_newline()
        terminal.write_line(
            f"{report.outcome}: {drawn} draws in {report.duration:.1f} s: {report.nodeid}"
        )
