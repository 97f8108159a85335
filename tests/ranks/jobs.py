"""Jobs that ranks run in these tests, each named after what it does."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conformance.ranks import RankContext, SkipRank
from tests.ranks.bounds import say_arrived

WAIT = "import time; time.sleep(300)"


def sum_over_ranks(context: RankContext, *, size: int = 3) -> list[float]:
    values = torch.full((size,), float(context.rank + 1), device=context.device)
    dist.all_reduce(values)
    return values.tolist()


class Holder:
    @staticmethod
    def rank_twice(context: RankContext) -> int:
        return 2 * context.rank


def describe(context: RankContext) -> dict[str, Any]:
    return {
        "rank": context.rank,
        "world": context.world_size,
        "device": context.device.type,
        "backend": context.backend,
        "env": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")],
        "threads": torch.get_num_threads(),
        "collects": gc.isenabled(),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "cwd": os.getcwd(),
        "directory": str(context.directory),
        "exists": context.directory.is_dir(),
    }


def draw(context: RankContext) -> list[float]:
    return [torch.rand(()).item(), random.random()]


def fail_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError("rank 1 has its reasons")
    dist.all_reduce(torch.ones(2))


def fail_alone_at_the_end(context: RankContext) -> str:
    if context.rank == 1:
        raise ValueError("only at the end")
    return "fine"


def fail_everywhere(context: RankContext) -> None:
    raise KeyError("the same everywhere")


def fail_differently(context: RankContext) -> None:
    """One after the other: a rank that has failed is ended a moment later."""
    pids = [torch.empty(1, dtype=torch.int64) for _ in range(context.world_size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if context.rank == 1:
        _wait_for_the_end_of(int(pids[0].item()))
    raise RuntimeError(f"failure of rank {context.rank}")


def _wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.001)


def return_a_tensor(context: RankContext) -> Any:
    return torch.ones(1)


def skip_everywhere(context: RankContext, *, kind: str) -> None:
    if kind == "ours":
        raise SkipRank("no such device")
    if kind == "unittest":
        raise unittest.SkipTest("no such device")
    pytest.skip("no such device")


def skip_on_rank_1(context: RankContext, *, collective: bool) -> None:
    if context.rank == 1:
        raise SkipRank("not here")
    if collective:
        dist.all_reduce(torch.ones(2))


def die(context: RankContext, *, how: str) -> None:
    dist.all_reduce(torch.ones(2))
    if context.rank == 1:
        sys.stdout.write("last words\n")
        _die(how)
    else:
        dist.all_reduce(torch.ones(2))


def die_now(context: RankContext) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _die(how: str) -> None:
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "os._exit(0)":
        os._exit(0)
    elif how == "sys.exit(0)":
        sys.exit(0)
    elif how == "SIGSEGV":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "garbage":
        os.write(_channel(), b"this is no report")
        time.sleep(60)
    elif how == "closed":
        os.close(_channel())
    elif how == "shut down":
        with socket.socket(fileno=os.dup(_channel())) as channel:
            channel.shutdown(socket.SHUT_RDWR)
        time.sleep(60)


def _channel() -> int:
    """The descriptor on which this rank hears from the controller and answers it."""
    for number in range(3, 100):
        try:
            with socket.socket(fileno=os.dup(number)) as sock:
                if sock.family == socket.AF_UNIX:
                    return number
        except OSError:
            continue
    raise AssertionError("no channel found")


class Net(nn.Module):
    """Its second layer issues an all-reduce in forward, unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = Reducing()

    def forward(self, x: torch.Tensor, *, reduce: bool = True) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if reduce else x


class Reducing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return x + total


def wait_inside_the_call(context: RankContext) -> None:
    """A monitored barrier waits before it returns, an all-reduce only after."""
    if context.rank == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    else:
        time.sleep(60)


def die_with_children(context: RankContext, *, path: str) -> None:
    if context.rank == 1:
        pids = [_child(), _child(start_new_session=True), _daemon()]
        with open(path, "w") as file:
            file.write(" ".join(map(str, pids)))
        os.kill(os.getpid(), signal.SIGKILL)


def miss_a_collective_in_a_module(context: RankContext) -> None:
    net = Net()
    context.recorder.name_modules(net)
    context.recorder.mark("step 2")
    net(torch.ones(2, 4))
    if context.rank == 1:
        time.sleep(120)
    net(torch.ones(2, 4))


def end_without_the_last_collective(context: RankContext) -> None:
    dist.all_reduce(torch.ones(2))
    if context.rank == 0:
        dist.all_reduce(torch.ones(2))


def loop_forever(context: RankContext) -> None:
    if context.rank == 1:
        say_arrived()
        while True:
            pass


def send_without_receive(context: RankContext) -> None:
    if context.rank == 0:
        dist.send(torch.ones(3), dst=1)


def return_with_a_collective_in_flight(context: RankContext) -> None:
    if context.rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)


def other_shape(context: RankContext) -> None:
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(3 + context.rank))


def other_op(context: RankContext) -> None:
    values = torch.ones(4)
    if context.rank == 0:
        dist.broadcast(values, src=0)
    else:
        dist.all_reduce(values)


def other_reduction(context: RankContext) -> list[float]:
    """Gloo goes through with it, so only the record can tell."""
    values = torch.ones(4)
    dist.all_reduce(values, op=dist.ReduceOp.SUM if context.rank == 0 else dist.ReduceOp.MAX)
    return values.tolist()


def other_reduction_long_ago(context: RankContext) -> None:
    other_reduction(context)
    for _ in range(300):
        dist.all_reduce(torch.ones(1))


def point_to_point(context: RankContext) -> list[float]:
    values = torch.full((3,), float(context.rank))
    if context.rank == 0:
        dist.send(values, dst=1)
        dist.recv(values, src=1)
    else:
        received = torch.empty(3)
        dist.recv(received)  # from any source
        dist.send(values + 10, dst=0)
    return values.tolist()


def leave_changed(context: RankContext, *, what: str) -> None:
    if context.rank == 1:
        _LEAKS[what]()


def _patch(owner: Any, name: str) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs))


def _start_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()


def _start_child() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


_LEAKS: dict[str, Any] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "number of threads": lambda: torch.set_num_threads(2),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "grad mode": lambda: torch._C._set_grad_enabled(False),
    "default device": lambda: torch.set_default_device("meta"),
    "torch.distributed.all_reduce": lambda: _patch(dist, "all_reduce"),
    "torch.optim.Optimizer.zero_grad": lambda: _patch(torch.optim.Optimizer, "zero_grad"),
    "torch.nn.Module.__call__": lambda: _patch(nn.Module, "__call__"),
    "os.environ['LEAKED']": lambda: os.environ.update(LEAKED="1"),
    "working directory": lambda: os.chdir("/"),
    "handler of signal 10": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "non-daemon threads": _start_thread,
    "child processes": _start_child,
    "global hooks": lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "default process group": dist.destroy_process_group,
}


def leave_nothing(context: RankContext) -> int:
    """What well-behaved training leaves: groups, modules, an optimizer, a restored setting."""
    group = dist.new_group([0, 1])
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        dist.barrier()
    return os.getpid()


def print_without_end(context: RankContext, *, megabytes: int) -> int:
    """How large the file of the output is in the end."""
    line = "x" * 1023 + "\n"
    for _ in range(megabytes):
        sys.stdout.write(line * 1024)
    time.sleep(1.0)
    sys.stdout.write("the end\n")
    return os.fstat(1).st_size


def fork_a_child_that_returns(context: RankContext) -> str:
    if os.fork() == 0:
        return "from the child"
    time.sleep(0.3)
    os.wait()
    return "from the rank"


def write_pids_and_wait(context: RankContext, *, path: str) -> None:
    """The rank, its child, one in a session of its own, a daemon, and the forkserver."""
    pids = [os.getpid(), _child(), _child(start_new_session=True), _daemon(), os.getppid()]
    with open(path, "a") as file:
        file.write(" ".join(map(str, pids)) + "\n")
    time.sleep(300)


def _child(**how: Any) -> int:
    return subprocess.Popen([sys.executable, "-S", "-c", WAIT], **how).pid


def _daemon() -> int:
    """A process in a session of its own whose parent has ended."""
    start = (
        "import subprocess, sys;"
        f" child = subprocess.Popen([sys.executable, '-S', '-c', {WAIT!r}],"
        " start_new_session=True, stdout=subprocess.DEVNULL);"
        " print(child.pid)"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", start], stdout=subprocess.PIPE, check=True)
    return int(ran.stdout)


def sum_on_a_mesh_of_two_dimensions(context: RankContext) -> float:
    """Needs the groups of this job's own mesh; DTensor would remember an equal one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    spread = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)])
    return float(spread.sum().full_tensor())


def sum_on_a_mesh_of_a_group(context: RankContext, *, own: bool) -> float:
    """Over a group that nothing names, or over that of all ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    group = dist.new_group([0, 1]) if own else dist.group.WORLD
    assert group is not None
    spread = distribute_tensor(torch.arange(4.0), DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    return float(spread.sum().full_tensor())


def leave_a_mesh(context: RankContext) -> None:
    """Somebody holds the mesh beyond the end of the job."""
    from torch.distributed.device_mesh import init_device_mesh

    vars(dist)["kept_by_a_test"] = init_device_mesh("cpu", (2, 1))


def mesh_without_tensors(context: RankContext) -> int:
    """Nothing remembers a mesh with which nothing was done."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(dist.new_group([0, 1]), "cpu").size()
