"""One test method on one rank: the whole life of a `unittest.TestCase`, its first failure raised.

Called by name through `conformance.ranks`. Must not know pools or verdicts.
"""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from conformance.ranks import Job, RankContext
from conformance.ranks.job import load_function
from conformance.testing.generated import inner_test
from conformance.testing.place import standing

__all__ = ["run_method"]

ErrorInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def run_method(
    context: RankContext,
    *,
    place: Mapping[str, Any],
    method: str,
    drawn: tuple[Sequence[Any], Mapping[str, Any]] | None,
) -> None:
    """Run setUp, one method, tearDown and cleanups.

    Args:
        context: of this rank.
        place: file, module and qualified name of the test class.
        method: name of the method.
        drawn: arguments that the controller drew for a property, None for an ordinary test.

    Raises:
        BaseException: the first failure, error or skip, as the test raised it.
    """
    with standing(context):
        cls: Any = load_function(Job(**place))
        case: unittest.TestCase = cls(method)
        if drawn is not None:
            _bind(case, method, drawn)
        result = _FirstFailure()
        case.run(result)
    if result.first is not None:
        raise result.first
    if result.skipped:
        raise unittest.SkipTest(result.skipped[0][1])


class _FirstFailure(unittest.TestResult):
    """Keeps the first exception itself, where the base class keeps its text only."""

    def __init__(self) -> None:
        super().__init__()
        self.failfast = True  # after a failed subtest the ranks would issue different collectives
        self.first: BaseException | None = None

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._keep(err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._keep(err)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._keep(err)  # the controller knows that it is expected

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            err[1].add_note(f"in {subtest._subDescription()}")  # type: ignore[attr-defined]
            self._keep(err)

    def _keep(self, err: ErrorInfo) -> None:
        if self.first is None:
            self.first = err[1].with_traceback(_own_frames(err[2]))


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is the test's."""
    while trace is not None and "__unittest" in trace.tb_frame.f_globals:
        trace = trace.tb_next
    return trace


def _bind(
    case: unittest.TestCase, method: str, drawn: tuple[Sequence[Any], Mapping[str, Any]]
) -> None:
    """Let the method stand for its inner test with the drawn arguments."""
    function = inner_test(getattr(type(case), method))
    if function is None:
        raise TypeError(f"{type(case).__qualname__}.{method} draws nothing on this rank")
    arguments, keywords = drawn

    def run() -> None:
        function(case, *arguments, **keywords)

    setattr(case, method, run)
