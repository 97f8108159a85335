"""What one 2-rank test costs in the harnesses of PyTorch and in the pool of `conformance.ranks`.

The same test (`all_reduce.py`: an all-reduce whose result is checked) runs under
`MultiProcessTestCase` (processes spawned for each test), `MultiProcContinuousTest` (processes
spawned once per class), in fresh ranks and in kept ranks of a `RankPool`. Rounds are interleaved.
Start-up is the time from nothing to the end of the first test; "each test" is that of one more.

    python benchmarks/harness.py [--device cpu] [--rounds 3] [--out results/harness-cpu.json]

`--out` also writes the printed table beside the JSON file. Without `--device`, the CPU is measured
and, where there are two, the accelerators.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from all_reduce import WORLD, check_all_reduce, job_all_reduce
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
)

from conformance.ranks import Job, RankPool, RankVerdict

DEVICE_VARIABLE = "HARNESS_DEVICE"  # spawned processes import this file and learn it from here


def device_type() -> str:
    return os.environ.get(DEVICE_VARIABLE, "cpu")


def take_device(rank: int) -> torch.device:
    if device_type() == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(rank)
    return torch.device(device_type(), rank)


class SpawnedPerTest(MultiProcessTestCase):
    @property
    def world_size(self) -> int:
        return WORLD

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_all_reduce(self) -> None:
        device = take_device(self.rank)
        dist.init_process_group(
            dist.get_default_backend_for_device(device_type()),
            store=dist.FileStore(self.file_name, WORLD),
            rank=self.rank,
            world_size=WORLD,
        )
        check_all_reduce(self.rank, device)


class SpawnedPerClass(MultiProcContinuousTest):
    world_size = WORLD

    @classmethod
    def backend_str(cls) -> str:
        return dist.get_default_backend_for_device(device_type())

    @classmethod
    def device_type(cls) -> str:
        return device_type()

    def test_all_reduce(self) -> None:
        check_all_reduce(self.rank, take_device(self.rank))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Seconds: start-up (None: each test is its own) and each test after the first."""

    start: float | None
    tests: list[float]


def timed(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def run_unittest(case: type[unittest.TestCase]) -> None:
    result = unittest.TestResult()
    case("test_all_reduce").run(result)
    if not result.wasSuccessful() or result.skipped or result.testsRun != 1:
        raise RuntimeError(f"{case.__name__}: {result.errors} {result.failures} {result.skipped}")


def sample_spawned_per_test(tests: int) -> Sample:
    del tests  # one is enough: every test is a start
    return Sample(start=None, tests=[timed(lambda: run_unittest(SpawnedPerTest))])


def sample_spawned_per_class(tests: int) -> Sample:
    SpawnedPerClass.setUpClass()
    try:
        start = timed(lambda: run_unittest(SpawnedPerClass))
        return Sample(
            start=start, tests=[timed(lambda: run_unittest(SpawnedPerClass)) for _ in range(tests)]
        )
    finally:
        SpawnedPerClass.tearDownClass()
        SpawnedPerClass._processes_spawned = False


def run_job(pool: RankPool, *, fresh: bool) -> None:
    outcome = pool.run(Job.of(job_all_reduce), timeout=120, fresh=fresh)
    if outcome.verdict is not RankVerdict.OK:
        raise RuntimeError(f"{outcome.verdict}: {outcome.sentence}")


def sample_pool(tests: int, *, fresh: bool) -> Sample:
    with RankPool(world=WORLD, device=device_type()) as pool:
        start = timed(lambda: run_job(pool, fresh=fresh))
        return Sample(
            start=start, tests=[timed(lambda: run_job(pool, fresh=fresh)) for _ in range(tests)]
        )


HARNESSES: dict[str, Callable[[int], Sample]] = {
    "torch MultiProcessTestCase": sample_spawned_per_test,
    "torch MultiProcContinuousTest": sample_spawned_per_class,
    "fresh ranks": lambda tests: sample_pool(tests, fresh=True),
    "kept ranks": lambda tests: sample_pool(tests, fresh=False),
}
PEER_OF = {
    "fresh ranks": "torch MultiProcessTestCase",
    "kept ranks": "torch MultiProcContinuousTest",
}


@contextmanager
def on_device(device: str) -> Iterator[None]:
    os.environ[DEVICE_VARIABLE] = device
    try:
        yield
    finally:
        del os.environ[DEVICE_VARIABLE]


def measure(device: str, rounds: int, tests: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in HARNESSES}
    with on_device(device):
        for number in range(rounds):
            for name, sample in HARNESSES.items():
                print(f"{device}: round {number + 1} of {rounds}, {name}", file=sys.stderr)
                samples[name].append(sample(tests))
    return samples


def summarise(samples: list[Sample]) -> dict[str, Any]:
    starts = [sample.start for sample in samples if sample.start is not None]
    tests = [seconds for sample in samples for seconds in sample.tests]
    return {
        "start": _spread(starts) if starts else None,
        "test": _spread(tests),
        "samples": [{"start": sample.start, "tests": sample.tests} for sample in samples],
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(device: str, summary: dict[str, Any]) -> str:
    lines = [
        f"one {WORLD}-rank all-reduce test on {device}; seconds: median (min to max)",
        f"{'harness':<32}{'start-up, first test included':>34}{'each test':>30}",
    ]
    for name, found in summary.items():
        start = "each test starts anew" if found["start"] is None else _cell(found["start"])
        lines.append(f"{name:<32}{start:>34}{_cell(found['test']):>30}")
    for ours, peer in PEER_OF.items():
        tests = summary[peer]["test"]["median"] / summary[ours]["test"]["median"]
        text = f"{ours} against {peer}: each test {tests:.1f} times as fast"
        if summary[peer]["start"] and summary[ours]["start"]:
            starts = summary[peer]["start"]["median"] / summary[ours]["start"]["median"]
            text += f", start-up {starts:.1f} times"
        lines.append(text)
    return "\n".join(lines)


def _cell(spread: dict[str, float]) -> str:
    return f"{spread['median']:.4f} ({spread['min']:.4f} to {spread['max']:.4f})"


def machine(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load average at start": os.getloadavg()[0],
    }
    if device != "cpu":
        module = torch.get_device_module(device)
        found["card"] = module.get_device_name(0)
        found["cards"] = torch.accelerator.device_count()
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def default_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and torch.accelerator.device_count() >= WORLD:
        return ["cpu", accelerator.type]
    return ["cpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of a 2-rank test, harness by harness")
    parser.add_argument("--device", action="append", help="cpu or an accelerator type; repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tests", type=int, default=20, help="tests after the first, per round")
    parser.add_argument("--out", type=Path, help="JSON file to write; the table goes beside it")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    tables = []
    for device in options.device or default_devices():
        about = machine(device)
        samples = measure(device, options.rounds, options.tests)
        summary = {name: summarise(found) for name, found in samples.items()}
        report[device] = {"machine": about, "harnesses": summary}
        tables.append(table(device, summary) + "\n" + json.dumps(about))
    text = "\n\n".join(tables) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        options.out.with_suffix(".txt").write_text(text)


if __name__ == "__main__":
    main()
