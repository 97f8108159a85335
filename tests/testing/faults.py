"""What can go wrong on rank 1 of 2: one table, run by everything that has to withstand it.

`test_faults` commits each fault in a test method, `test_faults_in_scenarios` in a verb of an
adapter, `benchmarks/faults.py` in PyTorch's own test classes too.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from conformance.causes import Cause
from conformance.verdicts import Verdict
from tests.ranks.bounds import say_arrived

LONG = 600.0
SOON = 30.0
"""Seconds: far below the bounds that only hanging ranks reach."""
CHILD = "import time; time.sleep(600)"
CRASH = "rank 1 died without a report "
FAIL = (Verdict.FAIL, Cause.EXCEPTION)
CRASHED = (Verdict.CRASH, Cause.CRASHED)
HUNG = (Verdict.HANG, Cause.HUNG)
DESYNCHRONISED = (Verdict.DESYNC, Cause.DESYNCHRONISED)
PASSED = (Verdict.PASS, None)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The rank on which a fault may happen; the default group exists."""

    rank: int
    device: torch.device

    def meet(self) -> None:
        dist.all_reduce(torch.ones(2, device=self.device))


def exception(at: Place) -> None:
    if at.rank == 1:
        raise ValueError("rank 1 has its reasons")
    at.meet()


def exception_on_all_ranks(at: Place) -> None:
    """Rank 1 first: they have met, so a second is long even where each gets little of a core."""
    at.meet()
    time.sleep(1.0 - at.rank)
    raise KeyError(f"reason of rank {at.rank}")


def same_exception_on_all_ranks(at: Place) -> None:
    raise KeyError("the same reason")


def sigkill(at: Place) -> None:
    _end_by_signal(at, signal.SIGKILL)


def sigkill_with_nothing_left_to_do(at: Place) -> None:
    if at.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def sigsegv(at: Place) -> None:
    _end_by_signal(at, signal.SIGSEGV)


def sigabrt(at: Place) -> None:
    _end_by_signal(at, signal.SIGABRT)


def _end_by_signal(at: Place, number: int) -> None:
    at.meet()
    if at.rank == 1:
        os.kill(os.getpid(), number)
    at.meet()


def os_exit_0(at: Place) -> None:
    if at.rank == 1:
        os._exit(0)


def os_exit_3(at: Place) -> None:
    if at.rank == 1:
        os._exit(3)


def sys_exit_0(at: Place) -> None:
    if at.rank == 1:
        sys.exit(0)


def skip_on_one_rank(at: Place) -> None:
    if at.rank == 1:
        raise unittest.SkipTest("not here")


def endless_python_loop(at: Place) -> None:
    if at.rank == 1:
        say_arrived()
        while True:
            pass


def endless_native_loop(at: Place) -> None:
    if at.rank == 1:
        say_arrived()
        re.match(r"(a+)+$", "a" * 60 + "b")


def never_enters_a_collective(at: Place) -> None:
    if at.rank == 1:
        time.sleep(LONG)
    at.meet()


def waits_for_a_rank_that_ended(at: Place) -> None:
    if at.rank == 0:
        at.meet()


def another_collective(at: Place) -> None:
    values = torch.ones(4, device=at.device)
    if at.rank == 1:
        dist.broadcast(values, src=0)
    else:
        dist.all_reduce(values)


def another_shape(at: Place) -> None:
    dist.all_reduce(torch.ones(3 + at.rank, device=at.device))


def another_dtype(at: Place) -> None:
    dtype = torch.float64 if at.rank == 1 else torch.float32
    dist.all_reduce(torch.ones(4, dtype=dtype, device=at.device))


def ignores_sigterm(at: Place) -> None:
    if at.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)


def writes_100_megabytes(at: Place) -> None:
    if at.rank == 1:
        line = "x" * 1023 + "\n"
        for _ in range(100):
            sys.stdout.write(line * 1024)
        sys.stdout.write("the end\n")


def a_child_outlives_it(at: Place) -> None:
    if at.rank == 1:
        subprocess.Popen([sys.executable, "-S", "-c", CHILD])


def a_session_outlives_it(at: Place) -> None:
    if at.rank == 1:
        subprocess.Popen([sys.executable, "-S", "-c", CHILD], start_new_session=True)


def a_daemon_outlives_it(at: Place) -> None:
    """Its parent has ended, and it is in a session of its own."""
    if at.rank == 1:
        command = f"setsid {sys.executable} -S -c '{CHILD}' &"
        subprocess.run(["sh", "-c", command], check=True)


def a_thread_never_ends(at: Place) -> None:
    if at.rank == 1:
        threading.Thread(target=time.sleep, args=(LONG,)).start()


def out_of_memory(at: Place) -> None:
    if at.rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        torch.ones(2**28)
    at.meet()


def corrupt_report(at: Place) -> None:
    """Write into the socket that leads to the controller."""
    if at.rank == 1:
        for number in range(3, 100):
            try:
                with socket.socket(fileno=os.dup(number)) as channel:
                    if channel.family == socket.AF_UNIX:
                        channel.sendall(b"this is no report")
                        break
            except OSError:
                continue
        time.sleep(LONG)


def leaves_default_dtype(at: Place) -> None:
    torch.set_default_dtype(torch.float64)


def leaves_patched_function(at: Place) -> None:
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: original(*args, **kwargs)


def leaves_environment(at: Place) -> None:
    os.environ["LEAKED"] = "1"


def leaves_random_state(at: Place) -> None:
    torch.manual_seed(12345 + at.rank)
    random.seed(12345)


def nothing_is_left(at: Place) -> None:
    """What the test after a fault asks for."""
    assert torch.get_default_dtype() == torch.float32
    assert "LEAKED" not in os.environ
    assert dist.all_reduce.__name__ == "all_reduce"
    assert torch.initial_seed() == 0
    values = torch.ones(2, device=at.device)
    dist.all_reduce(values)
    assert values.tolist() == [2.0, 2.0]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault and what has to come of it.

    Attributes:
        fault: commits it; called on every rank.
        verdict: of a test method, in unittest's words.
        says: parts of that test's message.
        judged: verdict and cause of a scenario, in which an adapter's verb commits it.
        tells: a part of that finding's sentence.
        bounded: only the time limit ends it.
    """

    fault: Callable[[Place], None]
    verdict: str = "failure"
    says: tuple[str, ...] = ()
    judged: tuple[Verdict, Cause | None]
    tells: str = ""
    bounded: bool = False

    @property
    def name(self) -> str:
        return self.fault.__name__


def passes(fault: Callable[[Place], None]) -> Row:
    """A row for what must do no harm to anybody."""
    return Row(fault=fault, verdict="pass", judged=PASSED)


def crashes(fault: Callable[[Place], None], how: str, *more: str) -> Row:
    """A row for a rank that dies."""
    says = f"{CRASH}({how})"
    return Row(fault=fault, says=(f"CRASH: {says}", *more), judged=CRASHED, tells=says)


def hangs(fault: Callable[[Place], None], *says: str) -> Row:
    """A row for a rank that does not end."""
    heads = (f"HANG: {says[0]}", *says[1:])
    tells = "rank 1 never entered all_reduce"  # of the step after it, where rank 0 waits
    return Row(fault=fault, says=heads, judged=HUNG, tells=tells, bounded=True)


def disagrees(fault: Callable[[Place], None], what: str) -> Row:
    """A row for ranks that issue different collectives."""
    tells = f"different {what}"
    return Row(fault=fault, says=("DESYNC: rank ", tells), judged=DESYNCHRONISED, tells=tells)


ROWS = (
    Row(
        fault=exception,
        says=("ERROR: rank 1: ValueError: rank 1 has its reasons",),
        judged=FAIL,
        tells="): ValueError: rank 1 has its reasons",  # behind the line that raised
    ),
    Row(
        fault=exception_on_all_ranks,
        says=("ERROR: rank 1: KeyError: 'reason of rank 1'; rank",),
        judged=FAIL,
        tells="KeyError: 'reason of rank",
    ),
    Row(
        fault=same_exception_on_all_ranks,
        says=("ERROR: all ranks: KeyError: 'the same",),
        judged=FAIL,
        tells="KeyError: 'the same reason'",
    ),
    crashes(sigkill, "signal SIGKILL", "its last collective was all_reduce"),
    crashes(sigkill_with_nothing_left_to_do, "signal SIGKILL"),
    crashes(sigsegv, "signal SIGSEGV", "Segmentation fault"),
    crashes(sigabrt, "signal SIGABRT"),
    crashes(os_exit_0, "exit 0"),
    crashes(os_exit_3, "exit 3"),
    crashes(sys_exit_0, "exit 0"),
    Row(
        fault=skip_on_one_rank,
        says=("ERROR: rank 1 skipped (not here), rank 0 did not",),
        judged=FAIL,
        tells="SkipTest: not here",
    ),
    hangs(
        endless_python_loop,
        "rank 1 did not end within 1 s, it is at endless_python_loop",
        "Python stacks",
    ),
    hangs(endless_native_loop, "rank 1 did not end within 1 s", "in endless_native_loop"),
    hangs(
        never_enters_a_collective,
        "rank 1 never entered all_reduce 1 of group default; rank 0 waits there for",
    ),
    Row(
        fault=waits_for_a_rank_that_ended,
        says=("HANG: rank 1 ended and never entered all_reduce 1",),
        judged=DESYNCHRONISED,  # there rank 1 goes on, to the reduction of the next step
        tells="different numel",
    ),
    disagrees(another_collective, "op"),
    disagrees(another_shape, "numel"),
    disagrees(another_dtype, "dtype"),
    hangs(ignores_sigterm, "rank 1 did not end within"),
    passes(writes_100_megabytes),
    passes(a_child_outlives_it),
    passes(a_session_outlives_it),
    passes(a_daemon_outlives_it),
    passes(a_thread_never_ends),
    Row(
        fault=out_of_memory,
        says=("ERROR: rank 1: RuntimeError:", "DefaultCPUAllocator"),
        judged=FAIL,
        tells="DefaultCPUAllocator",
    ),
    Row(
        fault=corrupt_report,
        says=("CRASH: rank 1 sent a report that cannot be read",),
        judged=CRASHED,
        tells="rank 1 sent a report that cannot be read",
    ),
    passes(leaves_default_dtype),
    passes(leaves_patched_function),
    passes(leaves_environment),
    passes(leaves_random_state),
)
FAULTS = {row.name: row.fault for row in ROWS}
