"""One copy of the tree, and a process with torch imported that runs tests there on request.

Each run is a fork, so that it imports the changed module and pays for nothing else. Started by
`crew.py` as `bench.py COPY LIMIT_BYTES`; one JSON line in, one out. Ends with its parent. Knows
processes; must not know which mutants there are or what counts as killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
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
_TEXT = 4000
"""Characters of the output that are kept."""
_SPARES = 2
"""More servers of ranks than that in one run are rare."""
_SHARED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.testing",
    "numpy",
    "hypothesis",
    "safetensors",
    "xdist",
    "pytest",
    "coverage",
    "conformance.ranks",
    "conformance.ranks.worker",
    "conformance.pytest_plugin",
    "witness",
    "forked",
)
"""What every run and its ranks would import, and no mutant changes."""


class Bench:
    """Runs tests in `copy`; what they leave in the scratch folder beside it goes after each run."""

    def __init__(self, copy: Path, memory: int) -> None:
        """Import what does not change from mutant to mutant."""
        self._copy = copy
        self._scratch = copy.parent / "tmp"
        self._lines = copy.parent / "lines"
        self._output = copy.parent / "output.txt"
        self._answer = copy.parent / "answer.json"
        self._memory = memory
        os.environ["TMPDIR"] = str(self._scratch)
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        for name in _SHARED:
            importlib.import_module(name)
        sys.path.remove(str(Path(__file__).parent))  # the tests must not see what stands here
        _make_optimizers()
        if "fsdp" in sys.modules:
            raise RuntimeError("what every run shares imports fsdp: no mutant would be seen")
        from conformance.ranks.orphans import adopt_orphans, end_children

        self._end_children = end_children
        adopt_orphans()
        _quick_draws()
        gc.collect()
        gc.freeze()  # collections of the runs then neither visit nor copy what is shared

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run tests until one tells something; the whole run ends after `order["limit"]` seconds.

        With `order["survey"]` seconds all are run, and measured, that begin before these are over.
        """
        for folder in (self._scratch, self._lines):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        shutil.rmtree(Path(".hypothesis"), ignore_errors=True)
        self._answer.unlink(missing_ok=True)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._become_run(order)
        try:
            status = _wait(pid, started + order["limit"])
            seconds = round(time.monotonic() - started, 2)
        finally:  # also when this process is told to end
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._end_children((), _LAST_WORDS)
        found = {"exit": status, "seconds": seconds, "output": ""}
        if self._answer.exists():
            found |= json.loads(self._answer.read_text())
        if status:
            found["output"] = self._output.read_text(errors="replace")[-_TEXT:]
        return found

    def _become_run(self, order: dict[str, Any]) -> None:
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
            code, answer = self._tests(order)
            self._answer.write_text(json.dumps(answer))
            sys.stdout.flush()
        except BaseException as error:
            # Not the tests' failure: the parent sees the exit status, and this text.
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)

    def _tests(self, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        import pytest
        from forked import fork_servers
        from lines import Lines
        from witness import Chosen, Surveyor, Witness

        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-seed=0",
            *order["files"],
        ]
        plugins: list[Any] = []
        if order["tests"]:
            plugins.append(Chosen(order["tests"]))
            options += ["-m", ""]
        if order["survey"] is None:
            fork_servers(_SPARES, lambda: None)
            options.append("--continue-on-collection-errors")
            witness = Witness()
            witness.watch_ranks()
            try:
                code = int(pytest.main(options, plugins=[*plugins, witness]))
            except Exception:  # such as what a collection raises at the very end
                if not witness.failures:
                    raise
                code = 1
            return code, {"failures": witness.failures, "imports": _imports(order["module"])}
        lines = Lines(self._copy, self._lines)
        fork_servers(_SPARES, lines.watch_ranks)
        surveyor = Surveyor(lines, order["survey"])
        code = int(pytest.main(options, plugins=[*plugins, surveyor]))
        return code, {name: getattr(surveyor, name) for name in ("tests", "left", "long")}


def _imports(module: str) -> bool:
    """Whether a module of the tree, named by its path, is imported or can be."""
    try:
        if module:
            importlib.import_module(module.removesuffix(".py").replace("/", "."))
    except Exception:
        return False
    return True


def _make_optimizers() -> None:
    """The first optimizer of a process imports the compiler and patches the optimizer classes."""
    import torch

    for kind in (torch.optim.AdamW, torch.optim.SGD):
        kind([torch.nn.Parameter(torch.empty(0))], lr=0.1)


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
        print(json.dumps(bench.run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
