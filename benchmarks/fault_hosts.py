"""What commits the faults of `faults.py` in this project: test methods, and an adapter's verb."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from fault_cases import NEXT, WAIT, wait

from conformance.adapter import Wrapped
from conformance.adapters.torch_ddp import DataParallelAdapter
from conformance.case import Case
from conformance.session import Session, Setting
from conformance.stored import judge_stored
from conformance.subject import Subject
from conformance.verdicts import COMPLETED
from tests.testing.faults import Place
from tests.testing.faulty import Faults, FaultyAdapter

BOUND = 20.0
CASE = Case.parse("mlp/eval_first/accumulation=1,optimizer=sgd")


class OurFaults(Faults):
    """With a time limit that a busy machine keeps too."""

    device_type = "cpu"
    timeout = BOUND

    def nothing_is_left(self) -> None:
        self.finds_everything_as_it_was()

    def wait(self) -> None:
        wait(Place(rank=self.rank, device=self.device))


class WaitingAdapter(DataParallelAdapter):
    """Waits for the end of the controller."""

    def optimizer_step(self, w: Wrapped) -> None:
        wait(Place(rank=torch.distributed.get_rank(), device=torch.device("cpu")))


@contextmanager
def scenario_session(directory: Path) -> Iterator[Callable[[str], str]]:
    """From the name of a fault to the verdict on the case in which it is committed."""
    with Session(Setting(directory=directory, timeout=BOUND)) as session:

        def run(method: str) -> str:
            cls = WaitingAdapter if method == WAIT else FaultyAdapter
            variant = "default" if method in (NEXT, WAIT) else method
            subject = Subject(adapter=f"{cls.__module__}:{cls.__name__}", variant=variant)
            [finding] = judge_stored(session.run(subject, CASE), directory, [])
            assert finding.check == COMPLETED
            return finding.verdict.lower()

        yield run
