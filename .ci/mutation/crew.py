"""Several copies of the tree, each with a bench, and the runs dealt out to them until time is up.

A mutation stands in a file, so that ranks, which import for themselves, have it too: every bench
therefore has a tree of its own. Knows copies and processes; must not know what a run means.
"""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("fsdp", "conformance", "models", "tests", "pyproject.toml", "README.md")
"""What of the tree is copied: what the tests import, pytest's settings, and the examples."""
_BENCH = Path(__file__).with_name("bench.py")
_START = 300.0
_GRACE = 30.0
_LAST_WORDS = 10.0
_TICK = 0.2


@dataclass(frozen=True, kw_only=True)
class Order:
    """One run, in a tree where `module` has `text` (none: as it is).

    Attributes:
        key: says which it is.
        files: what pytest collects.
        tests: ids of those to run, in this order; all that are not `long` if there are none.
        limit: seconds after which the run ends.
        survey: measure the tests that begin within so many seconds, instead of judging by them.
        first: before all orders that wait.
    """

    key: str
    files: tuple[str, ...]
    tests: tuple[str, ...] = ()
    limit: float
    survey: float | None = None
    module: str = ""
    text: str | None = None
    first: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a run came to.

    Attributes:
        order: what was asked for.
        exit: pytest's status, negative for a signal, None when the limit ended it.
        seconds: of the run.
        failures: "test", "when", "ranks" (verdict on its last job), "text" of each.
        output: its end, if it did not pass.
        imports: whether the changed module could be imported.
        tests: of a survey: what was measured, by id.
        left: of a survey: ids of the tests that did not begin.
        long: of a survey: ids of the tests that are left out unless asked for.
    """

    order: Order
    exit: int | None
    seconds: float
    output: str
    failures: Sequence[dict[str, str]] = ()
    imports: bool = True
    tests: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    left: Sequence[str] = ()
    long: Sequence[str] = ()


class Crew:
    """Benches at work; a context manager, and no process or file of theirs outlives it."""

    def __init__(self, root: Path, scratch: Path, jobs: int, *, gigabytes: int) -> None:
        """Make the copies and start the benches; they import while the caller goes on.

        Args:
            root: the tree.
            scratch: an empty folder for the copies.
            jobs: how many.
            gigabytes: memory that one process of a run may take.
        """
        self._stop = threading.Event()
        self._waiting = 0
        self._asked = 0
        self._orders: queue.PriorityQueue[tuple[bool, int, Order]] = queue.PriorityQueue()
        self._answers: queue.Queue[Answer | BaseException] = queue.Queue()
        first = scratch / "0" / "tree"
        _copy(root, first)
        self._memory = gigabytes << 30
        self._trees = [first]
        for number in range(1, jobs):
            tree = scratch / str(number) / "tree"
            shutil.copytree(first, tree, symlinks=True)
            self._trees.append(tree)
        self._lock = threading.Lock()
        self._benches = [self._start(tree) for tree in self._trees]
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), daemon=True)
            for number in range(jobs)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with self._lock:
            for bench in self._benches:
                bench.terminate()
        for bench in self._benches:
            try:
                bench.wait(_LAST_WORDS)
            except subprocess.TimeoutExpired:
                bench.kill()
                bench.wait()
        for thread in self._threads:
            thread.join()

    def put(self, order: Order) -> None:
        """Have a run done, after those that were asked for before unless it is to be first."""
        self._waiting += 1
        self._asked += 1
        self._orders.put((not order.first, self._asked, order))

    def answers(self, deadline: float) -> Iterator[Answer]:
        """Yield answers as they come, in any order; ends at `deadline` or when none is left.

        Runs may be asked for meanwhile. What is unfinished at the deadline is dropped.

        Raises:
            BenchLostError: a bench cannot start.
        """
        while self._waiting and time.monotonic() < deadline:
            try:
                answer = self._answers.get(timeout=_TICK)
            except queue.Empty:
                continue
            if isinstance(answer, BaseException):
                raise answer
            self._waiting -= 1
            yield answer

    def _start(self, tree: Path) -> subprocess.Popen[str]:
        with (tree.parent / "bench.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(_BENCH), str(tree), str(self._memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=tree,
                env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"},
            )

    def _serve(self, number: int) -> None:
        try:
            self._hear(number, _START)
            while not self._stop.is_set():
                try:
                    _, _, order = self._orders.get(timeout=_TICK)
                except queue.Empty:
                    continue
                self._answers.put(self._run(number, order))
        except BaseException as error:
            if not self._stop.is_set():
                self._answers.put(error)

    def _run(self, number: int, order: Order) -> Answer:
        path = self._trees[number] / order.module
        original = path.read_bytes() if order.text is not None else b""
        try:
            if order.text is not None:
                path.write_text(order.text, encoding="utf-8")
            found = self._ask(number, order)
        finally:
            if order.text is not None:
                path.write_bytes(original)
        return Answer(order=order, **found)

    def _ask(self, number: int, order: Order) -> dict[str, Any]:
        bench = self._benches[number]
        assert bench.stdin is not None
        try:
            names = ("files", "tests", "survey", "limit", "module")
            told = {name: getattr(order, name) for name in names}
            print(json.dumps(told), file=bench.stdin)
            bench.stdin.flush()
            return self._hear(number, order.limit + _GRACE)
        except (BrokenPipeError, BenchLostError):
            bench.kill()
            bench.wait()
            with self._lock:
                if self._stop.is_set():
                    raise
                self._benches[number] = self._start(self._trees[number])
            self._hear(number, _START)
            return {"exit": 70, "seconds": 0.0, "output": "the bench was lost"}

    def _hear(self, number: int, limit: float) -> dict[str, Any]:
        """Read a bench's next line; a watchdog ends a bench that has lost itself."""
        bench = self._benches[number]
        assert bench.stdout is not None
        watchdog = threading.Timer(limit, bench.kill)
        watchdog.start()
        try:
            line = bench.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            log = self._trees[number].parent / "bench.log"
            raise BenchLostError(f"bench {number} ended: {log.read_text(errors='replace')[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found


class BenchLostError(RuntimeError):
    """A bench ended without an answer."""


def _copy(root: Path, tree: Path) -> None:
    """Copy what the tests need, with bytecode that is checked against its source's content.

    Whoever imports a mutant writes bytecode of it, which may have its original's size and second.
    """
    tree.mkdir(parents=True)
    for name in PARTS:
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(root / name, tree / name)
    (tree / "conformance" / "models").symlink_to(Path("..", "models"))
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    for name in ("fsdp", "conformance", "models"):
        compileall.compile_dir(tree / name, quiet=2, invalidation_mode=checked)
