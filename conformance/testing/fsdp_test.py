"""`FSDPTest`: a `unittest.TestCase` each of whose test methods runs on every rank of a pool.

Knows both sides: what a test asks for in the controller, and what it finds on its rank. Must not
know wrappers.
"""

from __future__ import annotations

import functools
import itertools
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from conformance.machine import AUTO, CPU, accelerator
from conformance.ranks import RankVerdict
from conformance.testing import place
from conformance.testing.across import AcrossRanks
from conformance.testing.compare import assert_equal, assert_not_equal
from conformance.testing.decorators import devices_wanted, skip_reason
from conformance.testing.dispatch import Ranks, judge, send
from conformance.testing.generated import is_generated, redirect

__all__ = ["FSDPTest", "run_tests"]

__unittest = True  # unittest leaves the frames of this module out of what it prints

CONTROLLER_RANK = -1


class FSDPTest(AcrossRanks, unittest.TestCase):
    """Base class of tests that run on several ranks.

    `setUp`, the test method, `tearDown` and cleanups run on every rank, where the default process
    group exists. `setUpClass`, `tearDownClass` and pytest's fixtures run in the controller, and
    what they set does not reach the ranks. The class must be importable by its name.

    A test passes if it returned on all ranks and they issued the same collectives. It is skipped if
    it skipped on all ranks. Anything else fails, an exit without a report included.

    Class attributes:
        fresh: run every test in ranks that run nothing else. Otherwise ranks are kept from test to
            test, and replaced when a test failed or left global state changed.
        timeout: bound on one test in seconds, after which it fails as a HANG.
        device_type: "auto" (the accelerator if there is one, else the CPU), "cpu", or a type of
            `torch.accelerator`.
        backend: of the default process group, None for the device's own.
        preload: modules that ranks have imported before they start. They must run no tensor
            operator when imported.
    """

    fresh: ClassVar[bool] = False
    timeout: ClassVar[float] = 120.0
    device_type: ClassVar[str] = AUTO
    backend: ClassVar[str | None] = None
    preload: ClassVar[Sequence[str]] = ()

    def __init__(self, methodName: str = "runTest") -> None:
        super().__init__(methodName)
        method = getattr(self, methodName, None)
        if method is None or place.on_rank():
            return
        self._failed: BaseException | None = None
        # On the instance, so that the class keeps what ranks run.
        vars(self)["setUp"] = self._nothing
        vars(self)["tearDown"] = self._raise_what_is_never_expected
        vars(self)[methodName] = self._sender(method)

    # -- where this test runs ---------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks; override it. All accelerators, at least 2; 2 on the CPU."""
        return max(2, accelerator()[1]) if self.kind != CPU else 2

    @property
    def rank(self) -> int:
        """This rank; -1 in the controller."""
        return place.here().rank if place.on_rank() else CONTROLLER_RANK

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The default process group, with all ranks. Ranks only."""
        place.here()
        group = dist.group.WORLD
        assert group is not None
        return group

    @property
    def device(self) -> torch.device:
        """The device of this rank, already current. Ranks only."""
        return place.here().device

    @property
    def kind(self) -> str:
        """The device type on which this class runs."""
        return accelerator()[0] if self.device_type == AUTO else self.device_type

    # -- asserts ----------------------------------------------------------------------------------

    def assertEqual(self, first: Any, second: Any, msg: Any = None, **tolerance: Any) -> None:
        """Fail unless the two are equal; tensors and floats within a tolerance.

        Args:
            first: anything; containers may hold tensors.
            second: the same.
            msg: put in front of the message.
            **tolerance: `atol`, `rtol` (both or none), `equal_nan`, `exact_dtype`, `exact_device`,
                as `conformance.testing.compare.assert_equal` takes them.
        """
        if not assert_equal(first, second, msg, **tolerance):
            super().assertEqual(first, second, msg)  # noqa: PT009 - this is that assert

    def assertNotEqual(self, first: Any, second: Any, msg: Any = None, **tolerance: Any) -> None:
        """Fail if `assertEqual` would pass."""
        if not assert_not_equal(first, second, msg, **tolerance):
            super().assertNotEqual(first, second, msg)  # noqa: PT009

    def assertExpectedInline(self, actual: str, expect: str, skip: int = 0) -> None:
        """Compare with an inline expectation of the `expecttest` package, on rank 0 only.

        With ``EXPECTTEST_ACCEPT=1`` rank 0 writes what it got into the source file.

        Args:
            actual: what the test computed; rank 0's counts.
            expect: a string literal with triple quotes.
            skip: frames between the caller and the literal.
        """
        if self.rank > 0:
            return
        import expecttest

        expecttest.assert_expected_inline(
            actual, expect, skip=skip + 1, debug_id=self.id(), assert_eq=self.assertMultiLineEqual
        )

    def run_subtests(
        self,
        subtest_config: Mapping[str, Sequence[Any]],
        test_fn: Callable[..., None],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run `test_fn` once per element of a product, each as a subtest that a failure names.

        A failed configuration ends the test: the others' collectives would no longer meet.

        Args:
            subtest_config: keyword argument to its values.
            test_fn: called as ``test_fn(*args, **kwargs, **configuration)``.
            *args: passed on.
            **kwargs: passed on.

        Collective: a barrier after each configuration.
        """
        for values in itertools.product(*subtest_config.values()):
            configuration = dict(zip(subtest_config, values, strict=True))
            with self.subTest(**configuration):
                test_fn(*args, **kwargs, **configuration)
                dist.barrier()

    # -- in the controller ------------------------------------------------------------------------

    def _sender(self, method: Callable[..., Any]) -> Callable[[], None]:
        """What unittest calls in place of the method, in the controller."""

        @functools.wraps(method)
        def sender() -> None:
            __tracebackhide__ = True
            reason = self._reason_to_skip(method)
            if reason:
                self.skipTest(reason)
            if not is_generated(method):
                self._send(None)
                return
            redirect(method, FSDPTest._send_drawn)
            method()

        return sender

    def _send_drawn(self, *arguments: Any, **keywords: Any) -> None:
        __tracebackhide__ = True
        self._send((arguments, keywords))

    def _send(self, drawn: tuple[Sequence[Any], Mapping[str, Any]] | None) -> None:
        __tracebackhide__ = True
        outcome = send(type(self), self._testMethodName, self._ranks(), drawn)
        try:
            judge(outcome)
        except BaseException as error:
            if outcome.verdict not in (RankVerdict.ERROR, RankVerdict.SKIP):
                self._failed = error
            raise

    def _ranks(self) -> Ranks:
        return Ranks(
            world=self.world_size,
            device=self.kind,
            backend=self.backend,
            fresh=self.fresh,
            timeout=self.timeout,
            preload=self.preload,
        )

    def _reason_to_skip(self, method: Callable[..., Any]) -> str:
        """Why this machine cannot run the test, "" if it can."""
        wanted = max(self.world_size, devices_wanted(method, self.kind))
        return skip_reason(wanted, self.kind)

    def _nothing(self) -> None:
        """The controller's setUp: the class's own runs on the ranks."""

    def _raise_what_is_never_expected(self) -> None:
        """The controller's tearDown: a dead or hanging rank is no expected failure."""
        failed, self._failed = self._failed, None
        if failed is not None and self._expects_failure():
            raise failed

    def _expects_failure(self) -> bool:
        mark = "__unittest_expecting_failure__"
        return bool(
            getattr(self, mark, False) or getattr(vars(self)[self._testMethodName], mark, 0)
        )


def run_tests(argv: list[str] | None = None) -> None:
    """Run the tests of the main program, as its last statement.

    Args:
        argv: arguments, None for the process's own.
    """
    unittest.main(module="__main__", argv=argv)
