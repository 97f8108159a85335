"""What commits the faults of the table: test methods, and a verb of an adapter."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from conformance.adapter import BuildConfig, OptimizerFactory, Wrapped
from conformance.adapters.torch_ddp import DataParallelAdapter
from conformance.ranks import RankContext
from conformance.testing import FSDPTest
from tests.testing.faults import FAULTS, Place, nothing_is_left

FAULTY_STEP = 1


class Faults(FSDPTest):
    """A method for each fault of the table, under its name."""

    __test__ = False

    world_size = 2
    device_type = "cpu"
    timeout = 120.0

    @unittest.expectedFailure
    def dies_where_a_failure_is_expected(self) -> None:
        if self.rank == 1:
            os._exit(0)

    @unittest.expectedFailure
    def fails_where_a_failure_is_expected(self) -> None:
        raise ValueError("expected")

    def fails_in_teardown(self) -> None:
        self.addCleanup(self.fail, "the cleanup fails")

    def finds_everything_as_it_was(self) -> None:
        nothing_is_left(Place(rank=self.rank, device=self.device))
        self.assertEqual(torch.ones(2), torch.ones(2))


class BoundedFaults(Faults):
    """Those that only the bound ends."""

    timeout = 1.0


def _method(fault: Callable[[Place], None]) -> Callable[[Faults], None]:
    def commit(self: Faults) -> None:
        fault(Place(rank=self.rank, device=self.device))

    commit.__name__ = fault.__name__
    commit.__qualname__ = f"Faults.{fault.__name__}"
    return commit


for _name, _fault in FAULTS.items():
    setattr(Faults, _name, _method(_fault))


class FaultyAdapter(DataParallelAdapter):
    """A variant for each fault, committed by the optimizer's second step; the default has none."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        **{name: {"fault": name} for name in FAULTS},
    }
    fault: str | None = None
    steps = 0

    def configure(self, options: Mapping[str, Any]) -> None:
        self.fault = options.get("fault")

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        return super().build(model, make_optimizer, replace(config, options={}))

    def optimizer_step(self, w: Wrapped) -> None:
        super().optimizer_step(w)
        self.steps += 1
        if self.fault is not None and self.steps == FAULTY_STEP + 1:
            rank = torch.distributed.get_rank()
            FAULTS[self.fault](Place(rank=rank, device=next(w.module.parameters()).device))


def look(context: RankContext) -> None:
    """The job after a fault."""
    nothing_is_left(Place(rank=context.rank, device=context.device))
