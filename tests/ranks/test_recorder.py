"""The recorder sees the traffic of plain calls, of DDP and of DTensors, with the right sizes."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.ranks import Job, RankContext, RankPool
from tests.ranks.jobs import Net

FIELDS = ("op", "group", "numel", "bytes", "dtype", "reduce_op", "root")


@pytest.fixture
def pool(warm: RankPool) -> RankPool:
    """Most of these jobs train."""
    return warm


def issue_each_kind(context: RankContext) -> list[Any]:
    whole, piece = torch.zeros(6), torch.zeros(3)
    pieces = [torch.zeros(3), torch.zeros(3)]
    dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    dist.all_gather(pieces, piece)
    dist.broadcast(whole, src=1)
    dist.reduce(whole, dst=1)
    dist.barrier()
    dist.gather(piece, pieces if context.rank == 0 else None, dst=0)
    dist.scatter(piece, pieces if context.rank == 1 else None, src=1)
    dist.all_to_all_single(whole, whole.clone())
    halves = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    dist.distributed_c10d._all_gather_base(*halves)
    dist.distributed_c10d._reduce_scatter_base(*reversed(halves))
    records = context.recorder.records
    assert all(r.left is not None and r.entered <= r.left for r in records)
    return [[getattr(r, field) for field in FIELDS] for r in records]


def test_every_kind_of_collective_has_its_full_payload(pool: RankPool) -> None:
    outcome = pool.run(Job.of(issue_each_kind))
    expected = [
        ["all_reduce", "default", 6, 24, "float32", "max", None],
        ["all_gather", "default", 6, 24, "float32", None, None],
        ["broadcast", "default", 6, 24, "float32", None, 1],
        ["reduce", "default", 6, 24, "float32", "sum", 1],
        ["barrier", "default", 0, 0, "", None, None],
        ["gather", "default", 6, 24, "float32", None, 0],
        ["scatter", "default", 6, 24, "float32", None, 1],
        ["all_to_all", "default", 6, 24, "float32", None, None],
        ["all_gather", "default", 6, 12, "bfloat16", None, None],
        ["reduce_scatter", "default", 6, 12, "bfloat16", "sum", None],
    ]
    assert outcome.values == (expected, expected), outcome.sentence


def train_ddp(context: RankContext) -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    ddp = nn.parallel.DistributedDataParallel(model)
    context.recorder.name_modules(ddp)
    context.recorder.mark("backward")
    before = len(context.recorder.records)
    ddp(torch.ones(2, 4)).sum().backward()
    return [
        [r.op, r.numel, r.backward, r.phase, r.module] for r in context.recorder.records[before:]
    ]


def test_the_gradients_of_ddp_are_seen(pool: RankPool) -> None:
    outcome = pool.run(Job.of(train_ddp))
    assert outcome.values[0] == [["all_reduce", 4 * 4 + 4 + 4 * 2 + 2, True, "backward", "0"]]


def use_functional_collectives(context: RankContext) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    sharded = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    context.recorder.mark("gather")
    with context.recorder.unjudged():
        whole = sharded.full_tensor()
    return [whole.tolist()] + [
        [r.op, r.numel, r.judged] for r in context.recorder.records if r.phase == "gather"
    ]


def test_functional_collectives_are_seen_and_side_doors_marked(pool: RankPool) -> None:
    outcome = pool.run(Job.of(use_functional_collectives))
    assert outcome.values[0] == [[float(i) for i in range(10)], ["all_gather", 10, False]]


def sum_with_a_pause(context: RankContext) -> list[str]:
    for phase in ("before", "off", "after"):
        context.recorder.mark(phase)
        if phase == "off":
            with context.recorder.off():
                dist.all_reduce(torch.ones(1))
        else:
            dist.all_reduce(torch.ones(1))
    return [record.phase for record in context.recorder.records]


def test_nothing_is_recorded_while_the_recorder_is_off(pool: RankPool) -> None:
    assert pool.run(Job.of(sum_with_a_pause)).values[0] == ["before", "after"]


def multiply_dtensors(context: RankContext) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    more = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    before = len(context.recorder.records)
    product = rows @ more
    traffic = [[r.op, r.numel] for r in context.recorder.records[before:]]
    return [product.to_local().tolist(), traffic]


def test_collectives_that_an_operator_on_dtensors_issues_are_seen(pool: RankPool) -> None:
    outcome = pool.run(Job.of(multiply_dtensors))
    assert outcome.values[0] == [[[6.0, 6.0], [6.0, 6.0]], [["all_gather", 12]]]


def sum_in_unusual_places(context: RankContext) -> list[list[Any]]:
    """Phase and size of what is recorded: elements tell the places apart."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(torch.ones(2))
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(torch.ones(3))
            return 2 * grad

    with torch.inference_mode():
        dist.all_reduce(torch.ones(1))
    Double.apply(torch.ones(1, requires_grad=True)).backward()
    dist.all_reduce(torch.ones(4, requires_grad=True).detach())
    with Passing():
        dist.all_reduce(torch.ones(5))
    dist.all_reduce(torch.eye(6).to_sparse())
    return [[r.numel, r.backward] for r in context.recorder.records]


class Passing(TorchDispatchMode):
    """Does nothing, and is in the way."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_collectives_are_seen_whatever_is_around_them(pool: RankPool) -> None:
    outcome = pool.run(Job.of(sum_in_unusual_places))
    expected = [[1, False], [2, False], [3, True], [4, False], [5, False], [36, False]]
    assert outcome.values == (expected, expected), outcome.sentence


def sum_in_a_graph(context: RankContext) -> list[Any]:
    from torch.distributed._functional_collectives import all_gather_tensor

    @torch.compile(backend="aot_eager", fullgraph=True)
    def gather(x: torch.Tensor) -> torch.Tensor:
        return all_gather_tensor(x, 0, dist.group.WORLD) + 1

    for size in (3, 3):
        gathered = gather(torch.full((size,), float(context.rank)))
    return [gathered.tolist(), [[r.op, r.numel, r.bytes] for r in context.recorder.records]]


def test_what_a_compiler_captures_is_seen_when_it_runs_and_only_then(pool: RankPool) -> None:
    outcome = pool.run(Job.of(sum_in_a_graph))
    expected = [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0], [["all_gather", 6, 24]] * 2]
    assert outcome.values == (expected, expected), outcome.sentence


def sum_on_a_thread(context: RankContext) -> list[int]:
    own = dist.new_group([0, 1])
    before = len(context.recorder.records)
    thread = Thread(target=lambda: dist.all_reduce(torch.ones(3), group=own))
    thread.start()
    thread.join()
    dist.all_reduce(torch.ones(2))
    return [record.numel for record in context.recorder.records[before:]]


def test_collectives_of_other_threads_are_not_seen(pool: RankPool) -> None:
    outcome = pool.run(Job.of(sum_on_a_thread))
    assert outcome.values == ([2], [2]), outcome.sentence


def count_while_a_collective_waits(context: RankContext, *, path: str) -> int:
    """How often another thread ran while this rank was inside of a collective.

    The other rank does not enter it before that was five times, or half a minute later.
    """
    ran = Path(path)
    if context.rank == 1:
        deadline = time.monotonic() + 30
        while not ran.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        dist.monitored_barrier()
        return 0
    ticks, begun, over = [], Event(), Event()

    def tick() -> None:
        begun.wait()
        while not over.wait(0.01):
            ticks.append(time.monotonic())
            if len(ticks) == 5:
                ran.touch()

    thread = Thread(target=tick)
    thread.start()
    begun.set()
    dist.monitored_barrier()
    ended = time.monotonic()
    over.set()
    thread.join()
    return sum(at < ended for at in ticks)


def test_python_goes_on_while_a_collective_waits(pool: RankPool, tmp_path: Path) -> None:
    job = Job.of(count_while_a_collective_waits, path=str(tmp_path / "ran"))
    outcome = pool.run(job)
    assert outcome.values[0] >= 5, outcome.sentence


def name_groups(context: RankContext) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1], group_desc="replicas"))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    dist.all_reduce(torch.ones(1), group=mesh["shard"].get_group())
    dist.all_reduce(torch.ones(1))
    return [[r.group, list(r.group_ranks), r.nth] for r in context.recorder.records]


def test_group_names_are_equal_on_all_ranks_and_in_later_jobs(pool: RankPool) -> None:
    values = [value for _ in range(2) for value in pool.run(Job.of(name_groups)).values]
    assert all(value == values[0] for value in values)
    assert [entry[0] for entry in values[0]][:2] == ["1", "replicas"]
    assert values[0][-1] == ["default", [0, 1], values[0][-1][2]]


def run_modules(context: RankContext) -> list[Any]:
    net = Net()
    context.recorder.name_modules(net)
    net(torch.ones(2, 4))
    dist.barrier()
    nn.Sequential(Net())(torch.ones(2, 4))
    return [[r.module, r.backward] for r in context.recorder.records]


def test_collectives_are_ascribed_to_the_module_that_runs(pool: RankPool) -> None:
    outcome = pool.run(Job.of(run_modules))
    assert outcome.values[0] == [["second", False], [None, False], ["Reducing", False]]


class ReduceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reducer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ReduceInBackward.apply(x)


def run_backward(context: RankContext) -> list[Any]:
    model = nn.Sequential(nn.Linear(2, 2), Reducer(), nn.Linear(2, 2))
    context.recorder.name_modules(model)
    model(torch.ones(1, 2)).sum().backward()
    return [[r.op, r.module, r.backward] for r in context.recorder.records]


def test_collectives_in_backward_are_ascribed_to_the_module_whose_backward_began_last(
    pool: RankPool,
) -> None:
    assert pool.run(Job.of(run_backward)).values[0] == [["all_reduce", "1", True]]


def train_with_and_without(context: RankContext) -> bool:
    def gradients() -> list[float]:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
        model(torch.randn(4, 5) + context.rank).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()

    recorded = gradients()
    context.recorder.__exit__(None, None, None)
    try:
        return recorded == gradients()
    finally:
        context.recorder.__enter__()


def test_recording_changes_no_result(pool: RankPool) -> None:
    assert pool.run(Job.of(train_with_and_without)).values == (True, True)


@pytest.mark.parametrize("names", [("second",), ("nested.module.second",)])
def test_wrapper_parts_are_stripped_from_names(names: tuple[str, ...]) -> None:
    from conformance.ranks.modules import strip_wrappers

    parts = names[0].split(".")
    wrapped = ".".join(f"_fsdp_wrapped_module.{part}" for part in parts)
    assert strip_wrappers(wrapped) == names[0]
