"""The same test files on PyTorch's `FSDPTest` and on this project's: cells, outcomes, times.

The files of `benchmarks/style/` are written in PyTorch's style. For PyTorch's framework they are
copied with nothing but their import lines changed; the changed lines are shown. PyTorch's
`FSDPTest` needs accelerators: without them its cells are only collected and compared by name.
This project's run on accelerators, if there are two, and on the CPU.

    python benchmarks/style.py [--file core] [--every 1] [--jobs 1] [--out RESULTS.json]

PyTorch's take 8 to 14 s a cell: `--file` (repeatable) and `--every N` select some, and `--jobs N`
runs N of PyTorch's cells at once on the same accelerators, each in a pytest of its own, which makes
each of them slower. The table goes beside the JSON file; both are written again after every one of
PyTorch's cells, so that a run that is cut short leaves what it has found.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent / "style"
FILES = ("core", "state_dict", "optim_state")
INTERNAL = "torch.testing._internal"
SOURCES = {
    "skip_if_lt_x_gpu": f"{INTERNAL}.common_distributed",
    "instantiate_parametrized_tests": f"{INTERNAL}.common_utils",
    "parametrize": f"{INTERNAL}.common_utils",
    "run_tests": f"{INTERNAL}.common_utils",
}
"""Where PyTorch has what `conformance.testing` has; everything else is in `common_fsdp`."""
OURS = ("conformance.testing", "conformance.models.fixtures")
WORLD = 2


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One pytest run: outcome and seconds of every cell, and the seconds of the whole."""

    outcomes: dict[str, str]
    times: dict[str, float]
    seconds: float


def for_torch(source: str) -> str:
    """A test file with this project's imports replaced by PyTorch's."""
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.ImportFrom) and node.module in OURS:
            by_module: dict[str, list[str]] = {}
            for alias in node.names:
                module = SOURCES.get(alias.name, f"{INTERNAL}.common_fsdp")
                by_module.setdefault(module, []).append(alias.name)
            lines[node.lineno - 1 : node.end_lineno] = [
                f"from {module} import {', '.join(names)}" for module, names in by_module.items()
            ]
    return "\n".join(lines) + "\n"


def write_copies(folder: Path, files: list[str]) -> list[str]:
    """Write PyTorch's versions; gives the lines that differ."""
    (folder / "wrapping.py").write_text((FOLDER / "wrapping.py").read_text())
    changed = []
    for name in files:
        source = (FOLDER / f"test_{name}.py").read_text()
        copy = for_torch(source)
        (folder / f"test_{name}.py").write_text(copy)
        lines = difflib.unified_diff(source.splitlines(), copy.splitlines(), n=0, lineterm="")
        changed += [line for line in lines if re.match(r"[+-](?![+-])", line)]
    return changed


def pytest(folder: Path, files: list[str], *extra: str, **environment: str) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--rootdir", folder, *extra),
            *(f"test_{name}.py" for name in files),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def collect(folder: Path, files: list[str]) -> list[str]:
    """Names of the cells, sorted."""
    output = pytest(folder, files, "--collect-only")
    cells = sorted(re.findall(r"^(test_\w+\.py::\S+)$", output, re.MULTILINE))
    if not cells:
        raise RuntimeError(f"no cells in {folder}:\n{output}")
    return cells


def run(folder: Path, cells: list[str], **environment: str) -> Ran:
    descriptor, name = tempfile.mkstemp(suffix=".xml")
    os.close(descriptor)
    report = Path(name)
    start = time.perf_counter()
    try:
        output = pytest(folder, [], f"--junitxml={report}", *cells, **environment)
        seconds = time.perf_counter() - start
        if not report.stat().st_size:
            raise RuntimeError(f"pytest in {folder} wrote no report:\n{output[-4000:]}")
        found = list(ET.parse(report).iter("testcase"))
    finally:
        report.unlink()
    outcomes, times = {}, {}
    for case in found:
        module, _, cls = (case.get("classname") or "").rpartition(".")
        cell = f"{module.rpartition('.')[2]}.py::{cls}::{case.get('name')}"
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[cell] = kinds.pop() if kinds else "passed"
        times[cell] = float(case.get("time") or 0.0)
    return Ran(outcomes=outcomes, times=times, seconds=seconds)


def run_at_once(folder: Path, cells: list[str], jobs: int, tell: Callable[[Ran], None]) -> None:
    """Run every cell in a pytest of its own, `jobs` of them at a time; `tell` what is there."""
    start, lock = time.perf_counter(), threading.Lock()
    found = Ran(outcomes={}, times={}, seconds=0.0)

    def one(cell: str) -> None:
        nonlocal found
        ran = run(folder, [cell])
        with lock:
            found = Ran(
                outcomes=found.outcomes | ran.outcomes,
                times=found.times | ran.times,
                seconds=time.perf_counter() - start,
            )
            tell(found)

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(one, cells))


def table(runs: dict[str, Ran]) -> str:
    cells = sorted(cell for cell in next(iter(runs.values())).outcomes)
    width = max(len(cell.rpartition("::")[2]) for cell in cells)
    lines = ["cell".ljust(width) + "".join(f"{name:>24}" for name in runs)]
    for cell in cells:
        texts = [
            f"{r.outcomes.get(cell, '-')} {r.times.get(cell, 0.0):8.2f} s" for r in runs.values()
        ]
        lines.append(cell.rpartition("::")[2].ljust(width) + "".join(f"{t:>24}" for t in texts))
    totals = [f"{len(r.outcomes)} cells {r.seconds:8.1f} s" for r in runs.values()]
    lines.append("all, with pytest itself".ljust(width) + "".join(f"{t:>24}" for t in totals))
    return "\n".join(lines)


def differences(runs: dict[str, Ran]) -> list[str]:
    """Cells that are not the same in all runs, or did not pass."""
    wrong = []
    for cell in sorted({cell for r in runs.values() for cell in r.outcomes}):
        found = {name: r.outcomes.get(cell, "absent") for name, r in runs.items()}
        if set(found.values()) != {"passed"}:
            wrong.append(f"{cell}: {found}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="one test file, two frameworks")
    parser.add_argument("--file", action="append", choices=FILES, help="repeatable; all by default")
    parser.add_argument("--every", type=int, default=1, help="run every N-th cell")
    parser.add_argument("--jobs", type=int, default=1, help="so many of PyTorch's cells at once")
    parser.add_argument("--out", type=Path, help="JSON file to write; the table goes beside it")
    options = parser.parse_args()
    files = options.file or list(FILES)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    cards = torch.accelerator.device_count() if accelerator is not None else 0
    runs: dict[str, Ran] = {}
    with tempfile.TemporaryDirectory() as scratch:
        copies = Path(scratch)
        changed = write_copies(copies, files)
        cells = collect(FOLDER, files)
        theirs = collect(copies, files)
        missing = sorted(set(cells) ^ set(theirs))
        chosen = cells[:: options.every]
        notes = [
            f"{len(cells)} cells here, {len(theirs)} with PyTorch's FSDPTest, "
            f"{len(missing)} on one side only{': ' if missing else ''}{', '.join(missing)}",
            "lines that differ between the two versions of the files:",
            *changed,
        ]
        if cards < WORLD:
            notes.append(f"PyTorch's FSDPTest needs {WORLD} accelerators, {cards} here: not run")
        else:
            notes.append(
                f"PyTorch's cells ran {options.jobs} at once, this project's one at a time"
            )

        def tell(name: str, ran: Ran) -> None:
            runs[name] = ran
            if options.out is not None:
                write(options.out, notes, runs)

        hidden = {f"{accelerator.type.upper()}_VISIBLE_DEVICES": ""} if accelerator else {}
        if accelerator is not None and cards >= WORLD:
            tell(f"ours, {WORLD} {accelerator.type}", run(FOLDER, chosen))
        tell("ours, cpu", run(FOLDER, chosen, **hidden))
        if accelerator is not None and cards >= WORLD:
            name = f"torch, {WORLD} {accelerator.type}"
            run_at_once(copies, chosen, options.jobs, lambda ran: tell(name, ran))
    print(text_of(notes, runs), end="")
    return int(bool(differences(runs) or missing))


def machine() -> dict[str, Any]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "cards": torch.accelerator.device_count() if accelerator is not None else 0,
        "card": torch.get_device_module(accelerator).get_device_name(0) if accelerator else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def text_of(notes: list[str], runs: dict[str, Ran]) -> str:
    wrong = differences(runs)
    lines = [*notes, f"cells that did not pass everywhere: {len(wrong)}", *wrong]
    return "\n".join([table(runs), "", *lines, json.dumps(machine())]) + "\n"


def write(path: Path, notes: list[str], runs: dict[str, Ran]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {name: {"outcomes": r.outcomes, "times": r.times} for name, r in runs.items()}
    path.write_text(json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n")
    path.with_suffix(".txt").write_text(text_of(notes, runs))


if __name__ == "__main__":
    sys.exit(main())
