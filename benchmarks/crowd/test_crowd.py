"""200 tests, of one rank and of two, in an order that mixes them; run by `crowd.py`.

Each computes, communicates and checks the result on the device that it was given, and writes down
when it was there: start, end, ranks, device as the operating system knows it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance.testing import (
    FSDPTest,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

STAMPS = "CROWD_STAMPS"
BUSY_SECONDS = 0.05


def physical(device: torch.device) -> str:
    """The device behind an index, whatever this rank can see; the processor is one for all."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", device.index))


class Crowd(FSDPTest):
    """What every test does."""

    def work(self, number: int) -> None:
        start = time.time()
        torch.manual_seed(number)
        model = nn.Linear(8, 8).to(self.device)
        ddp = DistributedDataParallel(model)
        inputs = torch.full((4, 8), float(self.rank + 1), device=self.device)
        deadline = time.monotonic() + BUSY_SECONDS
        while True:  # all ranks leave together: the first one decides
            ddp(inputs).sum().backward()
            more = torch.tensor(float(time.monotonic() < deadline), device=self.device)
            dist.broadcast(more, src=0)
            if not more.item():
                break
            model.zero_grad()
        mean = 4.0 * (self.world_size + 1) / 2
        self.assertEqual(model.weight.grad, torch.full((8, 8), mean, device=self.device))
        stamp = {
            "test": self.id(),
            "rank": self.rank,
            "world": self.world_size,
            "device": physical(self.device),
            "start": start,
            "end": time.time(),
        }
        file = Path(os.environ[STAMPS], f"{os.getpid()}.jsonl")
        with file.open("a") as stream:
            stream.write(json.dumps(stamp) + "\n")


@instantiate_parametrized_tests
class TestNarrow(Crowd):
    world_size = 1

    @parametrize("number", range(100))
    def test(self, number: int) -> None:
        self.work(number)


@instantiate_parametrized_tests
class TestWide(Crowd):
    world_size = 2

    @parametrize("number", range(100))
    def test(self, number: int) -> None:
        self.work(number)


if __name__ == "__main__":
    run_tests()
