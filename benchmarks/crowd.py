"""`pytest -n auto` with 200 tests of one and of two ranks, repeated: clashes, overlap, flakes.

On accelerators no device may have two tests at a time, one-rank tests have to run side by side,
and two-rank tests on two devices one after the other. On the CPU all may overlap.

    python benchmarks/crowd.py [--repeats 5] [--out benchmarks/results/crowd-cpu.json]

The table goes beside the JSON file; both are written again after every run. Exit status 1 for a
clash, a flake or a missing overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent / "crowd"
TESTS = 200


@dataclass(frozen=True, kw_only=True)
class Test:
    """One test as its ranks stamped it; seconds of the machine's clock."""

    name: str
    world: int
    devices: frozenset[str]
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One run of all tests.

    Attributes:
        workers: that pytest started.
        passed: tests.
        failed: their names.
        seconds: of the whole run.
        narrow_together: pairs of one-rank tests that overlapped.
        wide_together: pairs of two-rank tests that overlapped.
        clashes: pairs of tests that had an accelerator in common at the same time.
    """

    workers: int
    passed: int
    failed: list[str]
    seconds: float
    narrow_together: int
    wide_together: int
    clashes: int


def read_stamps(folder: Path) -> list[Test]:
    stamps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            stamp = json.loads(line)
            stamps[stamp["test"]].append(stamp)
    return [
        Test(
            name=name,
            world=ranks[0]["world"],
            devices=frozenset(rank["device"] for rank in ranks),
            start=min(rank["start"] for rank in ranks),
            end=max(rank["end"] for rank in ranks),
        )
        for name, ranks in stamps.items()
        if len(ranks) == ranks[0]["world"]
    ]


def together(tests: list[Test]) -> list[tuple[Test, Test]]:
    """Pairs that overlapped in time."""
    ordered = sorted(tests, key=lambda test: test.start)
    pairs = []
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.start >= one.end:
                break
            pairs.append((one, other))
    return pairs


def repeat() -> Repeat:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-n",
                "auto",
                "-rfE",
                "-p",
                "no:cacheprovider",
                FOLDER,
            ],
            env={**os.environ, "CROWD_STAMPS": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        tests = read_stamps(Path(folder))
    workers = re.search(r"^(\d+) workers?", done.stdout, re.MULTILINE)
    passed = re.search(r"(\d+) passed", done.stdout)
    if workers is None:
        raise RuntimeError(done.stdout + done.stderr)
    pairs = together(tests)
    on_devices = [(one, other) for one, other in pairs if "cpu" not in one.devices]
    return Repeat(
        workers=int(workers[1]),
        passed=int(passed[1]) if passed else 0,
        failed=re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE),
        seconds=seconds,
        narrow_together=sum(one.world == other.world == 1 for one, other in pairs),
        wide_together=sum(one.world == other.world == 2 for one, other in pairs),
        clashes=sum(bool(one.devices & other.devices) for one, other in on_devices),
    )


def faults(repeats: list[Repeat], cards: int) -> list[str]:
    found = []
    flakes = sorted({name for each in repeats for name in each.failed})
    if flakes:
        found.append(f"flakes: {', '.join(flakes)}")
    if any(each.passed != TESTS for each in repeats):
        found.append(f"not all of the {TESTS} tests passed each time")
    if any(each.clashes for each in repeats):
        found.append("two tests had one accelerator at the same time")
    if any(each.workers > 1 and not each.narrow_together for each in repeats):
        found.append("no two one-rank tests ran side by side")
    if cards == 2 and any(each.wide_together for each in repeats):
        found.append("two two-rank tests ran side by side on two accelerators")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="200 tests, many workers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write; the table goes beside it")
    options = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    cards = torch.accelerator.device_count() if accelerator is not None else 0
    card = torch.get_device_module(accelerator).get_device_name(0) if accelerator else None
    about = {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "cards": cards,
        "card": card,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load average at start": os.getloadavg()[0],
    }
    repeats: list[Repeat] = []
    for _ in range(options.repeats):
        repeats.append(repeat())
        if options.out is not None:
            write(options.out, repeats, about)
    print(text_of(repeats, about), end="")
    return int(bool(faults(repeats, cards)))


def text_of(repeats: list[Repeat], about: dict[str, Any]) -> str:
    columns = ("workers", "passed", "failed", "seconds", "1-rank pairs", "2-rank pairs", "clashes")
    lines = ["run" + "".join(f"{name:>14}" for name in columns)]
    for number, each in enumerate(repeats, start=1):
        values = [*asdict(each).values()]
        values[2:4] = len(each.failed), round(each.seconds, 1)
        lines.append(f"{number:3}" + "".join(f"{value:>14}" for value in values))
    lines.append("pairs: of tests that ran at the same time; clashes: on one accelerator")
    lines += faults(repeats, about["cards"]) or ["no clash, no flake"]
    return "\n".join([*lines, json.dumps(about)]) + "\n"


def write(path: Path, repeats: list[Repeat], about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": about, "repeats": [asdict(each) for each in repeats]}
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".txt").write_text(text_of(repeats, about))


if __name__ == "__main__":
    sys.exit(main())
