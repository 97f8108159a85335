"""Ours beside torch.distributed.fsdp.fully_shard: interleaved rounds of the same training.

    python benchmarks/fully_shard.py --world 2 --blocks 8 --dim 64
    python benchmarks/fully_shard.py --preset host_bound --device TYPE --out FILE.json

Prints, per implementation, the median milliseconds of forward, backward and optimizer over all
rounds, the spread (half the distance between quartiles), peak device memory where there is one,
and the ratios of the medians of a step and of the peaks, ours over torch's. "bare" trains without
any wrapper. One model is there at a time: a round builds it anew, so that a peak is its own.

`--out` writes every step's seconds and the machine as JSON, and the printed table beside it.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp import MixedPrecisionPolicy, fully_shard

PHASES = ("forward", "backward", "optimizer")
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


@dataclass
class Times:
    """Seconds of every step, by phase, and the peak bytes."""

    phases: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})
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
        wraps: dict[str, tuple[Callable[..., nn.Module], type]] = {
            "ours": (fully_shard, MixedPrecisionPolicy),
            "torch": (torch_fully_shard, TorchPolicy),
        }
        if self.name in wraps:
            wrap, policy = wraps[self.name]
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            options = {"mesh": mesh, "mp_policy": policy(param_dtype=dtype)}
            for block in model.blocks:
                wrap(block, **options)
            wrap(model, **options)
        elif dtype is not None:
            model.to(dtype)
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

    def round(self, warmup: int, steps: int) -> None:
        self.build()
        self.losses = [self.step(record=False) for _ in range(warmup)]
        dist.barrier()
        on_device = self.device.type != "cpu"
        if on_device:
            torch.accelerator.reset_peak_memory_stats()
        for _ in range(steps):
            self.step(record=True)
        if on_device:
            self.times.peak = max(self.times.peak, torch.accelerator.max_memory_allocated())
        self.release()


def run(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(args.device) if args.device == "cpu" else torch.device(args.device, rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=args.world,
        backend=dist.get_default_backend_for_device(device),
    )
    trainees = {name: Trainee(name, args, device) for name in args.implementations}
    for _ in range(args.rounds):
        for trainee in trainees.values():
            trainee.round(args.warmup, args.steps)
    if rank == 0:
        report(args, trainees, device)
    dist.destroy_process_group()


def report(args: argparse.Namespace, trainees: dict[str, Trainee], device: torch.device) -> None:
    card = torch.get_device_module(device).get_device_name() if device.type != "cpu" else "cpu"
    machine = {
        "card": card,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }
    lines = [f"torch {torch.__version__}, {args.world} ranks on {card}, {vars(args)}"]
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
    print("\n".join(lines))
    if args.out is not None:
        times = {n: {"seconds": t.times.phases, "peak": t.times.peak} for n, t in trainees.items()}
        found = {"machine": machine, "options": vars(args) | {"out": str(args.out)}, "times": times}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_suffix(".txt").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="sizes of the model")
    parser.add_argument("--world", type=int, default=2)
    for size in ("blocks", "dim", "heads", "vocabulary", "batch", "length"):
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--bf16", action="store_true", default=None)
    parser.add_argument("--implementations", nargs="+", default=["ours", "torch", "bare"])
    parser.add_argument("--out", type=Path, help="JSON file to write; the table goes beside it")
    args = parser.parse_args()
    for name, value in ({"bf16": False} | PRESETS[args.preset]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args, os.path.join(folder, "rendezvous")), nprocs=args.world)


if __name__ == "__main__":
    main()
