"""How long a reshard plan takes at the scale of a large job, and which reshards hold here.

    python benchmarks/reshard.py --plan             # 70 B parameters, 1,024 -> 384 ranks; no ranks
    python benchmarks/reshard.py --live --out docs/results/reshard.md
    python benchmarks/reshard.py --table --device TYPE --world 1 --world 2

A plan is made of integers alone, so one process does the work of all ranks. Every case runs in a
fresh process, whose peak memory is that of the whole process, torch included.

`--live` moves a model and its optimizer between all forms and worlds, on CPU ranks, in a job and
through directories, and compares every bit with a model that was made in the target form. `--out`
writes the tables to a file. `--table` prints the first of them alone, for the given worlds, on any
device, and `--parallel` that beside tensor parallelism: each row as soon as it is known.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BLOCKS, DIM, HIDDEN, KEYS, VOCABULARY = 80, 8192, 28672, 1024, 128256
MANY, FEW = 1024, 384
CASES = {
    "flat -> per parameter": ("flat", 1, "dim 0", 1),
    "per parameter -> flat": ("dim 0", 1, "flat", 1),
    "flat -> flat": ("flat", 1, "flat", 1),
    "flat, 8 replicas -> per parameter, 4 replicas": ("flat", 8, "dim 0", 4),
    "per parameter, 8 replicas -> flat, 4 replicas": ("dim 0", 8, "flat", 4),
}


def llama_70b() -> Iterator[dict[str, tuple[int, ...]]]:
    """The parameter groups of a decoder with grouped queries: names and shapes."""
    yield {"embedding.weight": (VOCABULARY, DIM)}
    for block in range(BLOCKS):
        shapes: dict[str, tuple[int, ...]] = {
            "attention_norm.weight": (DIM,),
            "attention.query.weight": (DIM, DIM),
            "attention.key.weight": (KEYS, DIM),
            "attention.value.weight": (KEYS, DIM),
            "attention.output.weight": (DIM, DIM),
            "norm.weight": (DIM,),
            "feed_forward.gate.weight": (HIDDEN, DIM),
            "feed_forward.up.weight": (HIDDEN, DIM),
            "feed_forward.down.weight": (DIM, HIDDEN),
        }
        yield {f"blocks.{block}.{name}": shape for name, shape in shapes.items()}
    yield {"norm.weight": (DIM,), "output.weight": (VOCABULARY, DIM)}


def one_plan(case: str) -> dict[str, float]:
    """Make the plan of all ranks, and that of one rank, in this process."""
    from fsdp.reshard.dealt import Dealt, Ranks, by_dim, flat
    from fsdp.reshard.plan import Plan

    def deal(kind: str, world: int, replicas: int) -> dict[str, Dealt]:
        width = world // replicas
        ranks = Ranks([list(range(r * width, r * width + width)) for r in range(replicas)])
        found: dict[str, Dealt] = {}
        for group in llama_70b():
            if kind == "flat":
                found |= flat(group, ranks, align=8)
            else:
                found |= {name: by_dim(shape, ranks) for name, shape in group.items()}
        return found

    one, replicas, other, fewer = CASES[case]
    begin = time.perf_counter()
    source, target = deal(one, MANY, replicas), deal(other, FEW, fewer)
    plan = Plan(source, target, host_size=8)
    every = list(plan.all_moves())
    whole = time.perf_counter() - begin
    numel = sum(int(moves.numel.sum()) for moves in every)
    parameters = sum(each.runs.numel for each in target.values())
    assert numel == parameters * fewer, f"{numel} elements for {parameters} x {fewer}"
    begin = time.perf_counter()
    own = len(plan.receives(FEW - 1)) + len(plan.sends(FEW - 1))
    return {
        "parameters": parameters,
        "moves": sum(len(moves) for moves in every),
        "seconds": whole,
        "own_moves": own,
        "own_seconds": time.perf_counter() - begin,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def plans() -> str:
    """Return one line per case, each measured in a fresh process."""
    lines = [
        f"{BLOCKS} blocks, {MANY} -> {FEW} ranks; peak of the whole process, torch included.\n",
        "| case | parameters | moves of all ranks | seconds | moves of one rank | seconds "
        "| peak MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case in CASES:
        command = [sys.executable, __file__, "--one-plan", case]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row = json.loads(done.stdout)
        lines.append(
            f"| {case} | {row['parameters'] / 1e9:.1f} B | {row['moves']:,} "
            f"| {row['seconds']:.2f} | {row['own_moves']:,} | {row['own_seconds']:.2f} "
            f"| {row['peak_mib']:.0f} |"
        )
    return "\n".join(lines)


FORMS = ("flat", "original", "fully", "plain")
WAYS = ("live", "sharded", "safetensors")
WORLDS = (1, 2, 3, 4, 8)
JOB_SECONDS = 300.0  # a job makes two communicators, 17 models and 14 directories or transfers


def all_cells(context: Any, *, source: str, one: int, other: int, path: str) -> dict[str, bool]:
    """On each rank: whether one form became every other in every way, bit for bit."""
    import torch.distributed as dist

    from fsdp import checkpoint
    from fsdp.reshard import reshard
    from tests.reshard.faces import fresh, made, marked

    sources, targets = list(range(one)), list(range(other))
    # One group for each side: a fresh one for each model costs a communicator each.
    groups = [dist.new_group(sources), dist.new_group(targets)]
    here = made(source, sources, group=groups[0])
    before = marked(here)
    for way in WAYS[1:]:
        if here is not None:
            checkpoint.save(f"{path}/{way}", here, before, process_group=groups[0], format=way)
    dist.barrier()
    found = {}
    for target in FORMS:
        wanted = made(target, targets, group=groups[1])
        for way in WAYS:
            there = made(target, targets, seed=8, group=groups[1])
            after = fresh(there, lr=0.5)
            if way == "live":
                reshard(here, there, before, after)
            elif there is not None:
                checkpoint.load(f"{path}/{way}", there, after, process_group=groups[1])
            found[f"{target} {way}"] = there is None or _alike(there, after, wanted)
    return found


def _alike(got: Any, optimizer: Any, wanted: Any) -> bool:
    """Whether a model and its optimizer have the bits of one that was made so."""
    from tests.reshard.faces import everything, marked, same

    try:
        same(everything(got, optimizer), everything(wanted, marked(wanted)))
    except AssertionError:
        return False
    return True


PARALLEL = ("flat", "original", "fully")
MESHES = ((2, 2), (1, 4), (4, 1))


def parallel_cells(context: Any, *, source: str, path: str) -> dict[str, bool]:
    """The same beside tensor parallelism: from two by two ranks to every form on every mesh."""
    from fsdp import checkpoint
    from fsdp.reshard import reshard
    from tests.reshard.faces import fresh, marked
    from tests.reshard.parallel import shaped

    here = shaped(source, MESHES[0])
    before = marked(here)
    for way in WAYS[1:]:
        checkpoint.save(f"{path}/{way}", here, before, format=way)
    found = {}
    for target, mesh, way in itertools.product(PARALLEL, MESHES, WAYS):
        wanted, there = shaped(target, mesh), shaped(target, mesh, seed=8)
        after = fresh(there, lr=0.5)
        if way == "live":
            reshard(here, there, before, after)
        else:
            checkpoint.load(f"{path}/{way}", there, after)
        found[f"{target} {mesh[0]}x{mesh[1]} {way}"] = _alike(there, after, wanted)
    return found


def _row(world: int, device: str, cells: Any, *, fresh: bool = False, **given: Any) -> list[str]:
    """Return whether each cell of one job holds on all ranks."""
    from conformance.ranks import Job, RankVerdict, shared_pool

    pool = shared_pool(world, device, preload=("tests.fsdp.preload",))
    with tempfile.TemporaryDirectory() as path:
        job = Job.of(cells, path=path, **given)
        outcome = pool.run(job, fresh=fresh, timeout=JOB_SECONDS)
    if outcome.verdict is not RankVerdict.OK:
        raise SystemExit(outcome.sentence)
    values = outcome.values
    return ["same" if all(each[key] for each in values) else "**differs**" for key in values[0]]


def _tell(lines: list[str], line: str) -> None:
    """Add a line of a table, and show it: what is known stays if the rest is never reached."""
    lines.append(line)
    print(line, flush=True)


def live(worlds: Sequence[int] = WORLDS, device: str = "cpu") -> str:
    """Return the table of all forms and ways, from each of ``worlds`` to each."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from reshard import all_cells as cells  # the ranks import this file by its name

    ways = [f"{target} {way}" for target in FORMS for way in WAYS]
    lines: list[str] = []
    _tell(lines, "| ranks | from | seconds | to " + " | to ".join(ways) + " |")
    _tell(lines, "|---|---|---:|" + "---|" * len(ways))
    for one, other, source in itertools.product(worlds, worlds, FORMS):
        begin = time.perf_counter()
        given = {"source": source, "one": one, "other": other}
        marks = _row(max(one, other), device, cells, **given)
        seconds = time.perf_counter() - begin
        _tell(lines, f"| {one} -> {other} | {source} | {seconds:.1f} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def parallel(device: str = "cpu") -> str:
    """Return the table of forms beside tensor parallelism, on four ranks."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from reshard import parallel_cells as cells

    targets = [f"{target} {a}x{b}" for target in PARALLEL for a, b in MESHES]
    lines: list[str] = []
    _tell(lines, "| from 2x2 | way | to " + " | to ".join(targets) + " |")
    _tell(lines, "|---|---|" + "---|" * len(targets))
    for source in PARALLEL:
        marks = _row(4, device, cells, fresh=True, source=source)
        for number, way in enumerate(WAYS):
            own = marks[number :: len(WAYS)]
            _tell(lines, f"| {source} | {way} | " + " | ".join(own) + " |")
    return "\n".join(lines)


def integers() -> str:
    """Return the table of all pairs of worlds, of plans that are carried out on labels."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.reshard.test_plan import SHAPES, check, side

    kinds = ("flat", "aligned", "dim 0", "whole")
    lines = ["| from | to | " + " | ".join(f"{n} -> 1…8" for n in range(1, 9)) + " |"]
    lines.append("|---|---|" + "---|" * 8)
    for first, second in itertools.product(kinds, kinds):
        marks = []
        for one in range(1, 9):
            held = 0
            for other in range(1, 9):
                check(
                    side(first, SHAPES, [list(range(one))], {}),
                    side(second, SHAPES, [list(range(other))], {}),
                )
                held += 1
            marks.append(f"{held} of 8")
        lines.append(f"| {first} | {second} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def report() -> str:
    """Return the page of results."""
    import torch

    cells = len(FORMS) ** 2 * len(WAYS) * len(WORLDS) ** 2
    return f"""# Resharding: every form into every other

{time.strftime("%Y-%m-%d")}, {os.cpu_count()} cores, gloo, torch {torch.__version__}, Python \
{platform.python_version()}, beside other work. Made by `python benchmarks/reshard.py --live --out \
docs/results/reshard.md`.

## With ranks

A model with tied weights, sizes that no world divides, a gain of one element, buffers and extra \
state, and an optimizer with two entries per element, a step count and a word. `flat` and \
`original` are `FullyShardedDataParallel` without and with `use_orig_params`, `fully` is \
`fully_shard`, `plain` is no wrapper. Ways: `live` inside a job, and `fsdp.checkpoint` in its two \
formats. A cell says `same` if every parameter, buffer, optimizer entry and option on every rank \
has the bits of a model that was made in the target form. {cells} cells; a row is one job.

{live()}

## Beside tensor parallelism

Four ranks, a model whose layers tensor parallelism cuts on dim 0, on dim 1 and not at all. Meshes \
are `data x tensor parallel`; what is saved or moved lies on 2x2.

{parallel()}

## Integers only

The plan, carried out on labels of elements, for all 64 pairs of worlds 1…8 and each pair of \
layouts; `aligned` leaves gaps between parameters. A cell counts the worlds to which all holds.

{integers()}

## At scale

{plans()}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--plan", action="store_true", help="plans at scale, without ranks")
    what.add_argument("--live", action="store_true", help="both, and all forms on CPU ranks")
    what.add_argument("--table", action="store_true", help="all forms between --world ranks")
    what.add_argument("--parallel", action="store_true", help="beside tensor parallelism, 4 ranks")
    what.add_argument("--one-plan", choices=CASES, help="one of them, in this process, as JSON")
    parser.add_argument("--world", type=int, action="append", help="of --table; repeatable")
    parser.add_argument("--device", default="cpu", help="of --table and --parallel")
    parser.add_argument("--out", type=Path, help="where the page of --live is written")
    given = parser.parse_args()
    if given.one_plan:
        print(json.dumps(one_plan(given.one_plan)))
    elif given.plan:
        print(plans())
    elif given.table:
        live(given.world or WORLDS, given.device)
    elif given.parallel:
        parallel(given.device)
    else:
        page = report()
        if given.out is not None:
            given.out.write_text(page)


if __name__ == "__main__":
    main()
