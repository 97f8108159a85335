"""Our two faces beside PyTorch's: interleaved rounds of the same training.

    python benchmarks/training.py --world 2 --blocks 8 --dim 64
    python benchmarks/training.py --face original --preset host_bound --device TYPE --out FILE.json

Faces: `composable` is `fully_shard`; `flat` and `original` are `FullyShardedDataParallel`.

Prints, per implementation, the median milliseconds of forward, backward and optimizer over all
rounds, the spread (half the distance between quartiles), peak device memory where there is one,
and the ratios of the medians of a step and of the peaks, ours over torch's. "bare" trains without
any wrapper, "ddp" with `DistributedDataParallel` around the same. For `FullyShardedDataParallel`
also the milliseconds of a clip and of a summon of all parameters. One model is there at a time: a
round builds it anew. What is allocated before it is built is not of its peak: PyTorch's
`FullyShardedDataParallel` keeps the flat parameters of a module that is gone alive, and whatever
was built after it would seem to need their memory too.

`--out` writes every step's seconds and the machine as JSON, the printed table beside it, and with
`--profile` where the host spends one step of each (own time by operation and by phase).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fsdp as ours
import fsdp.wrap as our_policies

PHASES = ("forward", "backward", "optimizer")
METHODS = ("clip", "summon")
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {"blocks": 8, "dim": 64, "heads": 4, "vocabulary": 256, "batch": 1, "length": 16},
    "host_bound": {
        "blocks": 48, "dim": 1024, "heads": 16, "vocabulary": 32000,
        "batch": 1, "length": 1024, "bf16": True,
    },
    "compute_bound": {
        "blocks": 24, "dim": 2048, "heads": 16, "vocabulary": 32000,
        "batch": 8, "length": 1024, "bf16": True,
    },
}  # fmt: skip


class Block(nn.Module):
    """A transformer block: 12 parameters."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, vocabulary: int, dim: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def composable(package: Any, model: GPT, dtype: torch.dtype | None, device: torch.device) -> GPT:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": package.MixedPrecisionPolicy(param_dtype=dtype)}
    for block in model.blocks:
        package.fully_shard(block, **options)
    return package.fully_shard(model, **options)


def wrapper(
    package: Any, model: GPT, dtype: torch.dtype | None, device: torch.device, *, original: bool
) -> nn.Module:
    policies = our_policies if package is ours else torchs.wrap
    return package.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policies.ModuleWrapPolicy({Block}),
        mixed_precision=package.MixedPrecision(param_dtype=dtype),
        device_id=device,
        use_orig_params=original,
    )


FACES: dict[str, Callable[..., nn.Module]] = {
    "composable": composable,
    "flat": partial(wrapper, original=False),
    "original": partial(wrapper, original=True),
}
PACKAGES = {"ours": ours, "torch": torchs}


@dataclass
class Times:
    """Seconds of every step, by phase, of the wrapper's methods, and the peak bytes."""

    phases: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})
    methods: dict[str, list[float]] = field(default_factory=lambda: {m: [] for m in METHODS})
    peak: int = 0

    def steps(self) -> list[float]:
        return [sum(parts) for parts in zip(*self.phases.values(), strict=True)]


class Trainee:
    """One implementation; its model and optimizer exist between ``build`` and ``release``."""

    def __init__(self, name: str, args: argparse.Namespace, device: torch.device) -> None:
        self.name, self.args, self.device = name, args, device
        self.times = Times()
        self.losses: list[float] = []
        self.model: Any = None
        self.optimizer: Any = None
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (args.batch, args.length)
        self.tokens = torch.randint(args.vocabulary, shape, generator=generator).to(device)

    def build(self) -> None:
        args, device = self.args, self.device
        torch.manual_seed(0)
        with device:
            model = GPT(args.vocabulary, args.dim, args.blocks, args.heads)
        dtype = torch.bfloat16 if args.bf16 else None
        if self.name in PACKAGES:
            model = FACES[args.face](PACKAGES[self.name], model, dtype, device)
        elif dtype is not None:
            model.to(dtype)
        if self.name == "ddp":
            ids = None if device.type == "cpu" else [device]
            model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def release(self) -> None:
        self.model = self.optimizer = None
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def step(self, *, record: bool) -> float:
        marks = [self.now()]
        logits = self.model(self.tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten())
        marks.append(self.now())
        loss.backward()
        marks.append(self.now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self.now())
        if record:
            for phase, start, end in zip(PHASES, marks[:-1], marks[1:], strict=True):
                self.times.phases[phase].append(end - start)
        return loss.item()

    def call_methods(self) -> None:
        """Time a clip and a summon of everything, three times each after one of each."""
        cls = PACKAGES[self.name].FullyShardedDataParallel
        self.model(self.tokens).float().mean().backward()
        for turn in range(4):
            start = self.now()
            self.model.clip_grad_norm_(1.0)
            middle = self.now()
            with cls.summon_full_params(self.model, writeback=False):
                end = self.now()
            if turn:
                for name, seconds in zip(METHODS, (middle - start, end - middle), strict=True):
                    self.times.methods[name].append(seconds)

    def profiled(self) -> str:
        """Where the host spends one step after two others."""
        self.build()
        for _ in range(2):
            self.step(record=False)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            self.step(record=False)
        self.release()
        averages = found.key_averages()
        table = averages.table(
            sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60
        )
        return f"{self.name}\n{table}"

    def round(self, warmup: int, steps: int) -> None:
        on_device = self.device.type != "cpu"
        before = torch.accelerator.memory_allocated() if on_device else 0
        self.build()
        self.losses = [self.step(record=False) for _ in range(warmup)]
        dist.barrier()
        if on_device:
            torch.accelerator.reset_peak_memory_stats()
        for _ in range(steps):
            self.step(record=True)
        if on_device:
            peak = torch.accelerator.max_memory_allocated() - before
            self.times.peak = max(self.times.peak, peak)
        if self.args.face != "composable" and self.name in PACKAGES:
            self.call_methods()
        self.release()


def run(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(args.device) if args.device == "cpu" else torch.device(args.device, rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
        # Cores of its own, so that threads of two ranks do not meet on one.
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // args.world
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
    dist.init_process_group(
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=args.world,
        backend=dist.get_default_backend_for_device(device),
    )
    if device.type != "cpu":
        # What libraries allocate at their first product and keep would be of the first one's peak.
        Trainee("bare", args, device).round(warmup=1, steps=0)
    trainees = {name: Trainee(name, args, device) for name in args.implementations}
    for _ in range(args.rounds):
        for trainee in trainees.values():
            trainee.round(args.warmup, args.steps)
    profiles = [each.profiled() for each in trainees.values()] if args.profile else []
    if rank == 0:
        report(args, trainees, device)
        if profiles:
            args.out.with_suffix(".profile.txt").write_text("\n\n".join(profiles) + "\n")
    dist.destroy_process_group()


def machine(device: torch.device) -> dict[str, Any]:
    card = torch.get_device_module(device).get_device_name() if device.type != "cpu" else "cpu"
    return {
        "card": card,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }


def tell(args: argparse.Namespace, lines: list[str], times: Any, device: torch.device) -> None:
    """Print a table; with `--out` write it beside what was measured."""
    print("\n".join(lines))
    if args.out is None:
        return
    options = vars(args) | {"out": args.out.name}
    found = {"machine": machine(device), "options": options, "times": times}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".txt").write_text("\n".join(lines) + "\n")


def report(args: argparse.Namespace, trainees: dict[str, Trainee], device: torch.device) -> None:
    options = {name: value for name, value in vars(args).items() if name != "out"}
    lines = [
        f"torch {torch.__version__}, {args.world} ranks on {machine(device)['card']}, {options}"
    ]
    lines.append(
        f"{'':8}{'step':>9}{'spread':>9}" + "".join(f"{p:>11}" for p in PHASES) + f"{'MiB':>9}"
    )
    medians, peaks = {}, {}
    for name, trainee in trainees.items():
        low, medians[name], high = statistics.quantiles(trainee.times.steps(), n=4)
        peaks[name] = trainee.times.peak
        parts = [statistics.median(trainee.times.phases[phase]) for phase in PHASES]
        row = [medians[name], (high - low) / 2, *parts]
        lines.append(
            f"{name:8}"
            + "".join(f"{1e3 * v:{w}.2f}" for v, w in zip(row, (9, 9, 11, 11, 11), strict=True))
            + f"{peaks[name] / 2**20:9.0f}"
        )
    for name, trainee in trainees.items():
        lines.append(f"{name}: loss {trainee.losses[0]:.6f} .. {trainee.losses[-1]:.6f}")
    if {"ours", "torch"} <= medians.keys():
        lines.append(f"ours / torch: step {medians['ours'] / medians['torch']:.3f}")
        if peaks["torch"]:
            lines[-1] += f", peak memory {peaks['ours'] / peaks['torch']:.3f}"
        for method in METHODS if args.face != "composable" else ():
            low, high = (
                1e3 * statistics.median(trainees[name].times.methods[method]) for name in PACKAGES
            )
            lines.append(f"{method}: ours {low:.2f} ms, torch {high:.2f} ms, {low / high:.3f}")
    times = {
        n: {"seconds": t.times.phases | t.times.methods, "peak": t.times.peak}
        for n, t in trainees.items()
    }
    tell(args, lines, times, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--face", choices=FACES, default="composable")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="sizes of the model")
    parser.add_argument("--world", type=int, default=2)
    for size in ("blocks", "dim", "heads", "vocabulary", "batch", "length"):
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--bf16", action="store_true", default=None)
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=("ours", "torch", "ddp", "bare"),
        default=["ours", "torch", "bare"],
    )
    parser.add_argument("--out", type=Path, help="JSON file to write; the table goes beside it")
    parser.add_argument("--profile", action="store_true", help="needs --out")
    args = parser.parse_args()
    if args.profile and args.out is None:
        parser.error("--profile writes beside --out")
    for name, value in ({"bf16": False} | PRESETS[args.preset]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args, os.path.join(folder, "rendezvous")), nprocs=args.world)


if __name__ == "__main__":
    main()
