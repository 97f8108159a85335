"""One copy of the tree, and a process with torch imported that runs tests there on request.

Each run is a fork, so that it imports the changed module and pays for nothing else. Started by
`crew.py` as `bench.py COPY LIMIT_BYTES`; one JSON line in, one out. Ends with its parent. Knows
pytest and what ended a run; must not know which mutants there are or what counts as killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_TICK = 0.02
_LAST_WORDS = 5.0
_TRANSPORT = re.compile(r"gloo/|Connection (closed|reset)|[Tt]imed out|Broken pipe")
_TEXT = 4000
"""Characters of a failure that are kept."""


class Witness:
    """A pytest plugin that remembers the first failure, and what the ranks' last job came to."""

    def __init__(self) -> None:
        """Nothing has failed yet."""
        self.failure: dict[str, str] | None = None
        self._ranks = ""

    def pytest_collectreport(self, report: Any) -> None:
        """A module that cannot be imported."""
        if report.failed:
            self._note(report, "collect")

    def pytest_runtest_logstart(self) -> None:
        """Another test: what an earlier one had from its ranks is no part of it."""
        self._ranks = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test, or what prepares it or cleans up after it."""
        if report.failed:
            self._note(report, report.when)

    def watch_ranks(self) -> None:
        """See every verdict on ranks that did not come through."""
        from conformance.ranks.pool import RankPool

        run = RankPool.run

        def watched(pool: RankPool, *args: Any, **options: Any) -> Any:
            outcome = run(pool, *args, **options)
            self._ranks = "TRANSPORT" if _only_lost(outcome) else str(outcome.verdict)
            return outcome

        RankPool.run = watched

    def _note(self, report: Any, when: str) -> None:
        if self.failure is None:
            text = report.longreprtext
            self.failure = {
                "test": report.nodeid,
                "when": when,
                "ranks": self._ranks,
                "text": text[-_TEXT:],
            }


def _only_lost(outcome: Any) -> bool:
    """Whether all that the failed ranks say is that they lost each other."""
    told = [report.message for report in outcome.reports if report is not None and report.error]
    return bool(told) and all(_TRANSPORT.search(message) for message in told)


class Bench:
    """Runs tests in `copy`; what they leave in the scratch folder beside it goes after each run."""

    def __init__(self, copy: Path, memory: int) -> None:
        """Import what does not change from mutant to mutant."""
        self._scratch = copy.parent / "tmp"
        self._output = copy.parent / "output.txt"
        self._answer = copy.parent / "answer.json"
        self._memory = memory
        os.environ["TMPDIR"] = str(self._scratch)
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        # A mutant may have its original's size and second: no file of its bytecode may outlive it.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        os.chdir(copy)
        sys.path[0] = str(copy)
        names = ("torch", "torch.distributed.checkpoint", "numpy", "hypothesis", "xdist", "pytest")
        for name in (*names, "conformance.ranks", "conformance.pytest_plugin"):
            importlib.import_module(name)
        if "fsdp" in sys.modules:
            raise RuntimeError("what every run shares imports fsdp: no mutant would be seen")
        from conformance.ranks.orphans import adopt_orphans, end_children

        self._end_children = end_children
        adopt_orphans()
        _quick_draws()

    def run(self, tests: list[str], limit: float) -> dict[str, Any]:
        """Run the tests up to the first failure; the whole run ends after `limit` seconds."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        shutil.rmtree(Path(".hypothesis"), ignore_errors=True)
        self._scratch.mkdir()
        self._answer.unlink(missing_ok=True)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._become_run(tests)
        try:
            status = _wait(pid, started + limit)
            seconds = round(time.monotonic() - started, 2)
        finally:  # also when this process is told to end
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._end_children((), _LAST_WORDS)
        found = {"exit": status, "seconds": seconds, "failure": None, "output": ""}
        if self._answer.exists():
            found["failure"] = json.loads(self._answer.read_text())
        if status:
            found["output"] = self._output.read_text(errors="replace")[-_TEXT:]
        return found

    def _become_run(self, tests: list[str]) -> None:
        code = 70
        try:
            os.setsid()
            _die_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_DATA, (self._memory, self._memory))
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            import pytest

            witness = Witness()
            witness.watch_ranks()
            options = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0")
            code = int(pytest.main([*options, *tests], plugins=[witness]))
            self._answer.write_text(json.dumps(witness.failure))
            sys.stdout.flush()
        except BaseException as error:
            # Not the tests' failure: the parent sees the exit status, and this text.
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)


def _die_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _quick_draws() -> None:
    """Draw the same examples in every run, and do not spend time on a smaller one that fails."""
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutation",
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")


def _wait(pid: int, deadline: float) -> int | None:
    """Return the exit status, negative for a signal; None when time was up."""
    pause = _TICK
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.2, pause * 1.2)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> None:
    """Serve one request per line until there is none left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the crew ends this process
    _die_with_parent(signal.SIGTERM)
    copy, memory = Path(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = Bench(copy, memory)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(bench.run(order["tests"], order["limit"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
