"""A full optimizer state gathered and loaded again: ours beside PyTorch's, interleaved.

    python benchmarks/optim_state.py --world 2 --blocks 4 --dim 64
    python benchmarks/optim_state.py --preset billion --device TYPE --out FILE.json

Both are `FullyShardedDataParallel` around the same model with AdamW after one step. A round takes
`optim_state_dict` (full, on the host of rank 0 alone; or full on every rank, where it was), then
`optim_state_dict_to_load` of what it gave and the optimizer's `load_state_dict`, by one after the
other, in every second round by the other first: whoever comes second may find host memory as the
first has left it. A load is both calls, and each is printed below it: with flat parameters
PyTorch's first one leaves its result on the host. Printed: median milliseconds of rank 0, spread
(half the distance between quartiles), the peak of device memory above what was there before, on
the rank where it is highest, and ours over torch's. A round of a small model of each comes first,
and the two results are compared; on the CPU PyTorch's are wrong with original parameters
(`docs/findings/fsdp1-optim-state-aliased-on-cpu.md`).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from training import FACES, GPT, PACKAGES, machine, tell

PRESETS: dict[str, dict[str, int]] = {
    "small": {"blocks": 4, "dim": 64, "heads": 4, "vocabulary": 256},
    "billion": {"blocks": 24, "dim": 2048, "heads": 16, "vocabulary": 32000},
}
WAYS = {"rank 0's host": {"offload_to_cpu": True, "rank0_only": True}, "in place": {}}


class Side:
    """One implementation: a trained model and what was measured of it."""

    def __init__(self, name: str, args: argparse.Namespace, device: torch.device) -> None:
        self.package, self.device = PACKAGES[name], device
        torch.manual_seed(0)
        with device:
            model = GPT(args.vocabulary, args.dim, args.blocks, args.heads)
        self.model: Any = FACES[args.face](self.package, model, None, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        tokens = torch.arange(16, device=device).view(1, 16)
        self.model(tokens).float().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds: dict[str, list[float]] = {}
        self.peaks: dict[str, int] = {}

    def state_type(self, way: str) -> Any:
        package, options = self.package, {"offload_to_cpu": False} | WAYS[way]
        return package.FullyShardedDataParallel.state_dict_type(
            self.model,
            package.StateDictType.FULL_STATE_DICT,
            package.FullStateDictConfig(**options),
            package.FullOptimStateDictConfig(**options),
        )

    def rest(self) -> int:
        """Bring ranks and device to rest; return the bytes that are on the device."""
        gc.collect()
        base = 0
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
            base = torch.accelerator.memory_allocated()
        dist.barrier()
        return base

    def measured(self, name: str, base: int, call: Callable[[], Any]) -> Any:
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        start = time.perf_counter()
        result = call()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
            peak = torch.accelerator.max_memory_allocated() - base
            self.peaks[name] = max(self.peaks.get(name, 0), peak)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def state(self, way: str) -> dict[str, Any]:
        cls = self.package.FullyShardedDataParallel
        with self.state_type(way):
            return cls.optim_state_dict(self.model, self.optimizer)

    def to_load(self, way: str, full: dict[str, Any]) -> dict[str, Any]:
        cls = self.package.FullyShardedDataParallel
        with self.state_type(way):
            return cls.optim_state_dict_to_load(self.model, self.optimizer, full)

    def round(self, way: str, *, loads: bool = True) -> None:
        full = self.measured(f"save, {way}", self.rest(), lambda: self.state(way))
        if loads:
            base = self.rest()
            one, other = parts_of(f"load, {way}")
            found = self.measured(one, base, lambda: self.to_load(way, full))
            self.measured(other, base, lambda: self.optimizer.load_state_dict(found))

    def add_up(self) -> None:
        """Make whole loads of their parts; peaks are those of the highest rank."""
        told: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(told, self.peaks)
        self.peaks = {name: max(each[name] for each in told) for name in self.peaks}
        for name in (f"load, {way}" for way in WAYS):
            parts = parts_of(name)
            each = (self.seconds[part] for part in parts)
            self.seconds[name] = [sum(pair) for pair in zip(*each, strict=True)]
            self.peaks[name] = max(self.peaks.get(part, 0) for part in parts)


def parts_of(name: str) -> list[str]:
    """Return how the two calls of a load are called; none of a save."""
    calls = ("to_load", "load_state_dict") if name.startswith("load") else ()
    return [f"{name}: {call}" for call in calls]


def compare(sides: dict[str, Side]) -> str:
    """Say how many entries the two full states have, and how many of them differ."""
    found = [side.state("rank 0's host") for side in sides.values()]
    if dist.get_rank() != 0:
        return ""
    one, other = (
        {(fqn, key): value for fqn, entry in state["state"].items() for key, value in entry.items()}
        for state in found
    )
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    wrong = sum(not torch.equal(value, other[key]) for key, value in one.items())
    return f"{len(one)} entries, {wrong} of them not equal bit for bit"


def run(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(args.device) if args.device == "cpu" else torch.device(args.device, rank)
    backend = dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{device.type}:{backend}"
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=args.world
    )
    small = argparse.Namespace(**vars(args) | PRESETS["small"])
    take_round({name: Side(name, small, device) for name in PACKAGES})  # sets up communicators
    sides = {name: Side(name, args, device) for name in PACKAGES}
    elements = sum(p.numel() for p in on_meta(args).parameters())
    entries = compare(sides)
    start = time.perf_counter()
    for turn in range(args.rounds):
        if turn >= args.load_rounds and late(start, args):
            args.rounds = turn
            break
        take_round(sides, back=turn % 2 == 1, loads=turn < args.load_rounds)
    for side in sides.values():
        side.add_up()
    if rank == 0:
        report(args, sides, device, f"{elements / 1e9:.3f} billion parameters, {entries}")
    dist.destroy_process_group()


def take_round(sides: dict[str, Side], *, back: bool = False, loads: bool = True) -> None:
    for way in WAYS:
        for name in reversed(sides) if back else sides:
            sides[name].round(way, loads=loads)


def late(start: float, args: argparse.Namespace) -> bool:
    """Whether `--seconds` are over by the clock of rank 0."""
    told = [args.seconds is not None and time.perf_counter() - start > args.seconds]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def on_meta(args: argparse.Namespace) -> GPT:
    with torch.device("meta"):
        return GPT(args.vocabulary, args.dim, args.blocks, args.heads)


def report(
    args: argparse.Namespace, sides: dict[str, Side], device: torch.device, model: str
) -> None:
    card = machine(device)["card"]
    lines = [
        f"torch {torch.__version__}, {args.world} ranks on {card}, face {args.face}, "
        f"{args.rounds} rounds, {args.load_rounds} of loads: {model}",
        f"{'':38}" + "".join(f"{name:>10}{'spread':>9}{'MiB':>9}" for name in sides)
        + f"{'time':>8}{'memory':>8}",
    ]  # fmt: skip
    rows = [f"{what}, {way}" for way in WAYS for what in ("save", "load")]
    for name in (name for row in rows for name in (row, *parts_of(row))):
        text, medians, peaks = f"{name:38}", [], []
        for side in sides.values():
            low, middle, high = statistics.quantiles(side.seconds[name], n=4)
            medians.append(middle)
            peaks.append(side.peaks.get(name, 0))
            text += f"{1e3 * middle:10.1f}{1e3 * (high - low) / 2:9.1f}{peaks[-1] / 2**20:9.0f}"
        text += f"{medians[0] / medians[1]:8.3f}"
        lines.append(text + (f"{peaks[0] / peaks[1]:8.3f}" if peaks[1] else ""))
    times = {name: {"seconds": side.seconds, "peak": side.peaks} for name, side in sides.items()}
    tell(args, lines, times, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--face", choices=("flat", "original"), default="flat")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", choices=PRESETS, default="small", help="sizes of the model")
    parser.add_argument("--world", type=int, default=2)
    for size in ("blocks", "dim", "heads", "vocabulary"):
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-rounds", type=int, help="as many as --rounds unless told")
    parser.add_argument("--seconds", type=float, help="begin no round of saves alone after these")
    parser.add_argument("--out", type=Path, help="JSON file to write; the table goes beside it")
    args = parser.parse_args()
    if args.load_rounds is None:
        args.load_rounds = args.rounds
    if not 2 <= args.load_rounds <= args.rounds:
        parser.error("a spread needs two rounds, of loads too; and no more of them than --rounds")
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args, os.path.join(folder, "rendezvous")), nprocs=args.world)


if __name__ == "__main__":
    main()
