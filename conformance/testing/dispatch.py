"""Send one test method to the ranks, and turn what came of it into what unittest understands.

Runs in the controller. Knows pools and outcomes. Must not know what a test does.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.ranks import Job, Outcome, RankPool, RankVerdict, shared_pool
from conformance.testing.messages import failure_text, prefixed_output
from conformance.testing.rank import run_method

__all__ = ["Ranks", "RanksFailed", "judge", "send"]

__unittest = True  # unittest leaves the frames of this module out of what it prints

PRELOAD = ("conformance.testing", "conformance.models.fixtures", "torch.distributed.tensor")
"""What every test imports (the first comparison of tensors imports DTensor, which takes a second);
imported once in the forkserver, it costs a fresh rank nothing."""


class RanksFailed(AssertionError):
    """A test that did not pass on all ranks.

    Attributes:
        outcome: the verdict, every rank's report, and its marks.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(failure_text(outcome))
        self.outcome = outcome


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which ranks a test asks for.

    Attributes:
        world: how many.
        device: device type.
        backend: of the default group, None for the device's own.
        fresh: whether they run nothing else before or after.
        timeout: bound on the test in seconds.
        preload: modules that they have imported from the start.
    """

    world: int
    device: str
    backend: str | None
    fresh: bool
    timeout: float
    preload: Sequence[str]

    def pool(self) -> RankPool:
        """The pool of this process that has them."""
        modules = (*PRELOAD, *self.preload)
        return shared_pool(self.world, self.device, self.backend, modules)


def send(
    cls: type,
    method: str,
    ranks: Ranks,
    drawn: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
) -> Outcome:
    """Run a method of a test class on all ranks.

    Args:
        cls: found by ranks under its module and qualified name.
        method: its name.
        ranks: where.
        drawn: arguments that were drawn for it.

    Raises:
        TypeError: ranks cannot find the class, or an argument cannot be sent to them.
    """
    try:
        target = Job.of(cls)
    except ValueError as error:
        raise TypeError(
            f"ranks import a test class by its name and cannot find {cls.__qualname__}: {error}; "
            "define test classes at the top of a module"
        ) from error
    place = {"file": target.file, "module": target.module, "qualname": target.qualname}
    job = Job.of(run_method, place=place, method=method, drawn=drawn)
    outcome = ranks.pool().run(job, timeout=ranks.timeout, fresh=ranks.fresh)
    sys.stdout.write(prefixed_output(outcome))
    return outcome


def judge(outcome: Outcome) -> None:
    """Return if the test passed on all ranks.

    Raises:
        unittest.SkipTest: all ranks skipped.
        RanksFailed: anything else.
    """
    __tracebackhide__ = True  # pytest leaves this frame out
    if outcome.verdict is RankVerdict.SKIP:
        raise unittest.SkipTest(outcome.sentence or "skipped on all ranks")
    if outcome.verdict is not RankVerdict.OK:
        raise RanksFailed(outcome)
