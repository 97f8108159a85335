"""What each way of running ranks makes of a rank that goes wrong, and what it leaves behind.

Every fault of `tests/testing/faults.py` is committed on rank 1 of 2 (CPU, gloo) in a test method
of `FSDPTest`, in a scenario of the suite, and in test methods of PyTorch's `MultiProcessTestCase`
and `MultiProcContinuousTest`. Each in a controller of its own, which then runs one more test.
PyTorch's own time limit is set to 60 s, ours to 20 s, that of the controller is 150 s after its
imports. At last the controller itself is interrupted, terminated and killed in mid-test, and its
processes are counted after 5 s.

    python benchmarks/faults.py [--fault NAME] [--jobs 1] [--out benchmarks/results/faults-cpu.json]
    python benchmarks/faults.py --join RUN.json --join OTHER.json --out FILE.json

The table goes beside the JSON file; both are written again after every cell. About 40 minutes with
one job on two idle cores; `--jobs` runs several controllers at once, of which each keeps two to
four cores busy. `--join` measures nothing: each row is taken from the first of the given runs that
has it whole, and says from which.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fault_cases import FAULTS, NEXT, WAIT, WORLD, PerClass, PerTest

from tests.testing.faults import ROWS
from tests.testing.running import MARK, marked_processes, run_one

CONTROLLER_BOUND = 150.0
IMPORTS = 180.0
SURVIVAL = 5.0
SETTLE = 1.0
RUN = "run"
"""Beside the hosts in a row: from which of several runs it is."""
NUMBERS = ("SIGINT", "SIGTERM", "SIGKILL")
"""Signals to the controller."""
WANTED = {row.name: row.verdict for row in ROWS}
Run = Callable[[str], str]
"""From the name of a method to the verdict."""


@contextlib.contextmanager
def fsdp_test() -> Iterator[Run]:
    from fault_hosts import OurFaults

    yield lambda method: run_one(OurFaults, method).verdict


@contextlib.contextmanager
def scenario() -> Iterator[Run]:
    from fault_hosts import scenario_session

    with tempfile.TemporaryDirectory() as folder, scenario_session(Path(folder)) as run:
        yield run


@contextlib.contextmanager
def torch_per_test() -> Iterator[Run]:
    yield lambda method: run_one(PerTest, f"test_{method}").verdict


@contextlib.contextmanager
def torch_per_class() -> Iterator[Run]:
    PerClass.setUpClass()
    yield lambda method: run_one(PerClass, f"test_{method}").verdict
    PerClass.tearDownClass()


HOSTS = {
    "FSDPTest": fsdp_test,
    "scenario": scenario,
    "MultiProcessTestCase": torch_per_test,
    "MultiProcContinuousTest": torch_per_class,
}


def commit(host: str, fault: str, answer: Path) -> None:
    """In the controller: the fault, then another test; what is known so far stands in `answer`."""
    # A shell in the background has interrupts ignored, and so would have its processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with HOSTS[host]() as run:
        answer.with_name("started").touch()
        for key, method in (("fault", fault), ("next", NEXT)):
            start = time.monotonic()
            try:
                verdict = run(method)
            except BaseException:  # SystemExit too: whatever comes, it is not a pass
                traceback.print_exc()
                verdict = "error"
            found = json.loads(answer.read_text()) if answer.exists() else {}
            found[key] = {"verdict": verdict, "seconds": round(time.monotonic() - start, 2)}
            answer.write_text(json.dumps(found))


@contextlib.contextmanager
def controller(host: str, method: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    mark = folder.name
    process = subprocess.Popen(
        [sys.executable, __file__, "--commit", host, method, "--answer", str(folder / "answer")],
        env={**os.environ, MARK: mark, "FAULTS_READY": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("wb"),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in marked_processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + IMPORTS
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError(f"the controller did not start: {(folder / 'stderr').read_text()}")
        time.sleep(0.1)


def measure(host: str, fault: str, folder: Path) -> dict[str, Any]:
    """One cell of the table."""
    with controller(host, fault, folder) as process:
        ended = True
        wait_for(lambda: (folder / "started").exists(), process, folder)
        try:
            process.wait(CONTROLLER_BOUND)
        except subprocess.TimeoutExpired:
            ended = False
            process.kill()
            process.wait()
        time.sleep(SETTLE)
        orphans = len(marked_processes(folder.name))
    answer = folder / "answer"
    found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    return {**found, "ended": ended, "orphans": orphans}


def measure_signal(host: str, number: signal.Signals, folder: Path) -> dict[str, Any]:
    """The same for a controller that gets a signal in the middle of a test."""
    with controller(host, WAIT, folder) as process:
        wait_for(lambda: len(list(folder.glob("rank*"))) == WORLD, process, folder)
        process.send_signal(number)
        end = time.monotonic() + SURVIVAL
        while time.monotonic() < end and (process.poll() is None or marked_processes(folder.name)):
            time.sleep(0.1)
        alive = marked_processes(folder.name) - {process.pid}
        return {"ended": process.poll() is not None, "orphans": len(alive)}


def cell(found: dict[str, Any] | None, wanted: str | None) -> str:
    """A cell's text; "WRONG" where a fault passed or was skipped, or a sound test did not pass."""
    if found is None:
        return "not measured"
    left = f"; {found['orphans']} processes left" if found["orphans"] else ""
    if wanted is None:
        return ("ended" if found["ended"] else "CONTROLLER LIVES") + left
    fault, after = found.get("fault"), found.get("next")
    if fault is None:
        return f"WRONG: no verdict in {CONTROLLER_BOUND:g} s" + left
    right = fault["verdict"] == "pass" if wanted == "pass" else fault["verdict"] in BAD
    text = f"{'' if right else 'WRONG: '}{fault['verdict']} {fault['seconds']:.1f} s"
    if after is None:
        text += "; the next one never ends"
    elif after["verdict"] != "pass":
        text += f"; next: {after['verdict']}"
    if not found["ended"] and after is not None:
        text += "; no end"
    return text + left


BAD = {"failure", "error", "fail", "hang", "crash", "desync"}


def table(report: dict[str, dict[str, Any]]) -> str:
    texts = [["fault on rank 1", *HOSTS, ""]]
    texts += [
        [name, *(cell(row.get(host), WANTED.get(name)) for host in HOSTS), row.get(RUN, "")]
        for name, row in report.items()
    ]
    widths = [max(len(line[i]) for line in texts) for i in range(len(texts[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in texts
    )


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load average at start": os.getloadavg()[0],
    }


def joined(runs: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return each row from the first run that has all of it, and the machines of the runs."""
    report: dict[str, dict[str, Any]] = {}
    for name in [*FAULTS, *NUMBERS]:
        whole = (
            n for n, run in enumerate(runs) if HOSTS.keys() <= run["faults"].get(name, {}).keys()
        )
        number = next(whole, None)
        report[name] = {}
        if number is not None:
            report[name] = runs[number]["faults"][name] | {RUN: f"run {number + 1}"}
    return report, {f"run {number}": run["machine"] for number, run in enumerate(runs, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="verdicts on faults, framework by framework")
    parser.add_argument("--fault", action="append", choices=[*FAULTS, *NUMBERS], help="repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="controllers at once; 1 for 4 cores")
    parser.add_argument("--out", type=Path, help="JSON file to write; the table goes beside it")
    parser.add_argument("--join", action="append", type=Path, help="JSON of a run; repeatable")
    parser.add_argument("--commit", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.commit:
        commit(*options.commit, options.answer)
        return
    if options.join:
        report, about = joined([json.loads(path.read_text()) for path in options.join])
        if options.out is not None:
            write(options.out, report, about)
        print(text_of(report, about), end="")
        return
    about = machine() | {"jobs": options.jobs}
    names = options.fault or [*FAULTS, *NUMBERS]
    report = {name: {} for name in names}
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    writing = threading.Lock()

    def fill(name: str, host: str) -> None:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        if name in FAULTS:
            found = measure(host, name, folder)
        else:
            found = measure_signal(host, signal.Signals[name], folder)
        print(f"{name}, {host}: {cell(found, WANTED.get(name))}", file=sys.stderr)
        with writing:
            report[name][host] = found
            if options.out is not None:
                write(options.out, report, about)

    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            cells = [pool.submit(fill, name, host) for name in names for host in HOSTS]
            for each in cells:
                each.result()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(text_of(report, about), end="")


def text_of(report: dict[str, dict[str, Any]], about: dict[str, Any]) -> str:
    machines = [f"{name}: {json.dumps(each)}" for name, each in about.items() if RUN in name]
    return "\n".join([table(report), "", *(machines or [json.dumps(about)]), ""])


def write(path: Path, report: dict[str, dict[str, Any]], about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": about, "faults": report}, indent=1) + "\n")
    path.with_suffix(".txt").write_text(text_of(report, about))


if __name__ == "__main__":
    main()
