"""A command that is ended from outside: it says what it knows, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.cli.interrupt import leaving_on_signals
from conformance.cli.repeating import recheck_command
from conformance.cli.selftesting import diagonal_text
from conformance.ranks.process import ForkServer
from conformance.ranks.servers import end_servers, lease_server, release_server
from conformance.report.lines import read_log
from conformance.selftest import Diagonal, Kill
from tests.waiting import PATIENCE, wait_for

ENDS_ITSELF = """
import signal
import sys
from pathlib import Path

from conformance.cli import interrupt, listing, main
from conformance.room import temporary_folder

number = int(sys.argv.pop(1))
ignored = sys.argv.pop(1) == "ignored"
signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)  # however the tests began


def known():
    signal.raise_signal(number)  # `timeout` sends it to the process and to its group
    return "what is known\\n"


def ended(what, *, as_json):
    with temporary_folder() as folder, interrupt.telling(known, "and noted"):
        (folder / "file").write_text("any")
        sys.stdout.write("found\\n")
        signal.raise_signal(number)
        return "went on"


listing.listing = ended
main()
"""


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "ended by SIGTERM"),
        (signal.SIGHUP, "ended by SIGHUP"),
    ],
)
def test_a_signal_has_the_status_of_shells_and_what_is_known_is_told(
    tmp_path: Path, number: signal.Signals, told: str
) -> None:
    done = ends_itself(tmp_path, number, "heard")
    assert done.returncode == 128 + number
    assert done.stdout == "found\nwhat is known\n"
    assert done.stderr == f"fsdp-conformance: {told}; and noted\n"
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_to_be_ignored_is_ignored(tmp_path: Path) -> None:
    done = ends_itself(tmp_path, signal.SIGHUP, "ignored")  # under nohup
    assert (done.returncode, done.stdout) == (0, "found\nwent on\n")
    assert not done.stderr


def ends_itself(folder: Path, number: signal.Signals, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENDS_ITSELF, str(int(number)), how, "list", "checks"],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


WHILE_IT_IMPORTS = """
import runpy
import signal
import sys


class Interrupts:
    def find_spec(self, name, *_):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)


signal.signal(signal.SIGINT, signal.default_int_handler)  # however the tests began
sys.meta_path.insert(0, Interrupts())
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "command",
    ["conformance list checks", "conformance.false_alarms --out none", "conformance.kills --check"],
)
def test_an_interrupt_while_a_command_imports_is_told_in_one_line(
    tmp_path: Path, command: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WHILE_IT_IMPORTS, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (130, "fsdp-conformance: interrupted\n")


ADAPTER = '''
import time

from torch.nn.parallel import DistributedDataParallel

from conformance import Adapter, Wrapped


class Slow(Adapter):
    """Takes longer than anybody waits."""

    def build(self, model, make_optimizer, config):
        time.sleep(600.0)
        raise AssertionError
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text(ADAPTER)
    return folder


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, with a folder of its own for what is temporary."""
    (folder / "temporary").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "conformance", *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def end(
    process: subprocess.Popen[str], folder: Path, when: Callable[[], object]
) -> tuple[str, str]:
    """End it when that is so, and ranks are there; what it wrote."""
    wait_for(lambda: when() and (processes_of(folder) or sys.platform != "linux"))
    process.terminate()
    written = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, written
    assert processes_of(folder) == []
    assert list((folder / "temporary").iterdir()) == []
    return written


def processes_of(folder: Path) -> list[str]:
    """Command lines in which a temporary folder stands: the forkserver's and its ranks' (Linux)."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes().decode(errors="replace")
            found += [text] if str(folder / "temporary") in text else []
    return found


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda server: server.alive, id="another is started if it is not alive"),
        pytest.param(lambda server: server.collect_exits([]), id="ranks that end have crashed"),
        pytest.param(lambda server: server.signal([], 0, group=False), id="no answer is an error"),
    ],
)
def test_who_uses_a_forkserver_that_is_ended_with_its_process_goes_on_no_more(
    use: Callable[[ForkServer], object],
) -> None:
    server = ForkServer(preload=(), env=os.environ)
    server.end_now()
    assert not server.root.exists()
    thread = threading.Thread(target=use, args=(server,), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    server._process.wait()


def test_a_forkserver_that_is_being_closed_is_ended_with_its_process(monkeypatch) -> None:
    ended: list[ForkServer] = []
    close = ForkServer.close

    def interrupted(server: ForkServer) -> None:
        end_servers()
        close(server)

    monkeypatch.setattr(ForkServer, "end_now", lambda server: ended.append(server))
    monkeypatch.setattr(ForkServer, "close", interrupted)
    server = lease_server((), {"OF_THIS_TEST": "alone"})
    release_server(server)
    assert ended.count(server) == 1
    end_servers()
    assert ended.count(server) == 1


def test_a_command_in_another_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        with leaving_on_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_selftest_that_is_ended_says_how_many_mutants_it_measured() -> None:
    killed = Diagonal(mutant="halved", check="gradients.scale", cause="scaled", kill=Kill.KILLED)
    text = diagonal_text([killed], "2 ranks on cpu", 3.21, planned=4)
    assert text == "\nPARTIAL: 1 of 4 mutants; 1 killed in 3.2 s (2 ranks on cpu)\n"
    text = diagonal_text([], "2 ranks on cpu", 3.21, planned=1)
    assert text == "\nPARTIAL: 0 of 1 mutant; nothing measured in 3.2 s (2 ranks on cpu)\n"


CASE = "mlp/train/accumulation=1,optimizer=sgd"


def test_a_run_that_is_ended_leaves_its_report_and_a_partial_log(folder: Path, capsys) -> None:
    arguments = ["run", "mine:Slow", "--case", CASE, "--check", "gradients.value"]
    kept = folder / "kept"

    def stuck() -> bool:
        ranks = [*kept.glob("histories/mine_Slow*/*/rank0.jsonl")]
        return ranks != [] and '"role": "control"' in (kept / "run.jsonl").read_text()

    with started(folder, *arguments, "--device", "cpu", "--out", "kept") as process:
        out, errors = end(process, folder, stuck)
    told = f"fsdp-conformance: ended by SIGTERM; {kept}/run.jsonl is partial"
    assert errors.splitlines()[-1] == told
    assert "\n\ncontrol: torch.DistributedDataParallel agrees with the oracle on 1 plain" in out
    assert "\nPARTIAL: the run did not come to its end; so far 0 of 1 case: nothing judged" in out
    # that its ranks were ended is not a finding
    assert not [*kept.glob("histories/mine_Slow*/*/case.json")]
    assert read_log(kept / "run.jsonl").partial
    recheck_command(kept)
    assert "PARTIAL: the run did not come to its end" in capsys.readouterr().out


def test_a_search_that_is_ended_says_how_far_it_came(folder: Path) -> None:
    with started(folder, "fuzz", "mine:Slow", "--device", "cpu", "--world", "2") as process:
        out, errors = end(process, folder, lambda: [*folder.glob("temporary/ranks-*/ranks*/*.out")])
    assert errors.splitlines()[-1] == "fsdp-conformance: ended by SIGTERM"
    assert out.startswith("0 examples, 0 deviations, 0 checks passed in ")


def test_no_garbage_is_looked_for_among_what_torch_has_made_when_the_interpreter_ends() -> None:
    script = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count()))\n"  # the first comes last
        "sys.argv = ['fsdp-conformance', '--version']\n"
        "from conformance.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert int(done.stdout.rpartition("frozen ")[2]) > 1000
