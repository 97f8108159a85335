"""The faults of `tests/testing/faults.py` as test methods of PyTorch's own multi-process classes.

By itself, because every spawned process imports it. `BOUND` is their own time limit: on a busy
machine a test that does nothing takes them half a minute.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

BOUND = 60.0
os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(BOUND))  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import (  # noqa: E402
    MultiProcContinuousTest,
    MultiProcessTestCase,
)

from tests.testing.faults import FAULTS, Place, nothing_is_left  # noqa: E402

WORLD = 2
NEXT = "nothing_is_left"
WAIT = "wait"


def nothing_is_left_but_the_seed(at: Place) -> None:
    """As `nothing_is_left`; which seed a test begins with is each framework's choice."""
    if torch.initial_seed() != 12345 + at.rank:
        torch.manual_seed(0)
    nothing_is_left(at)


def wait(at: Place) -> None:
    """Until the controller dies: what comes of the ranks is looked at from outside."""
    at.meet()
    Path(os.environ["FAULTS_READY"], f"rank{at.rank}").touch()
    time.sleep(600)


METHODS = {**FAULTS, NEXT: nothing_is_left_but_the_seed, WAIT: wait}


class PerTest(MultiProcessTestCase):
    """Processes are spawned for each test."""

    @property
    def world_size(self) -> int:
        return WORLD

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class PerClass(MultiProcContinuousTest):
    """Processes are spawned once."""

    world_size = WORLD
    timeout: ClassVar[timedelta] = timedelta(seconds=BOUND)

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"


def _spawned(fault: Callable[[Place], None]) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        store = dist.FileStore(self.file_name, WORLD)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=WORLD)
        fault(Place(rank=self.rank, device=torch.device("cpu")))

    return test


def _kept(fault: Callable[[Place], None]) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        fault(Place(rank=self.rank, device=torch.device("cpu")))

    return test


for _name, _fault in METHODS.items():
    for _class, _made in ((PerTest, _spawned(_fault)), (PerClass, _kept(_fault))):
        _made.__name__ = f"test_{_name}"
        setattr(_class, f"test_{_name}", _made)
