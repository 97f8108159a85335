"""Draws one training step of three sharded blocks from a profile: `docs/timeline.svg`.

Two ranks on the CPU; the picture shows rank 0. Run it alone on the machine:

    python benchmarks/timeline.py --out docs/timeline.svg
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from fsdp import fully_shard

WORLD, BLOCKS, WIDTH = 2, 3, 256
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f")  # one per block
LANES = ("hooks", "computation", "all-gather", "reduce-scatter")
# gloo reduce-scatters by an all-reduce of which each rank keeps its part.
COLLECTIVES = {"gloo:all_gather": "all-gather", "gloo:all_reduce": "reduce-scatter"}
LAUNCHES = {"all-gather": "c10d::_allgather_base_", "reduce-scatter": "c10d::_reduce_scatter_base_"}
LEFT, TOP, ROW, BAR, RIGHT, SCALE = 110, 46, 40, 26, 20, 900


@dataclass(frozen=True, kw_only=True)
class Span:
    """What happened in a lane, in microseconds; ``unit`` is the number of a block, -1 if none."""

    lane: str
    start: float
    stop: float
    unit: int
    label: str


def record(rows: int) -> list[Span]:
    """Profile one step after three; returns this rank's spans."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    ]
    model = nn.Sequential(*(fully_shard(block) for block in blocks))
    fully_shard(model)
    x = torch.randn(rows, WIDTH)
    for _ in range(3):
        model(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x).sum().backward()
    return spans(profile.events())


def spans(events: Iterable[torch.autograd.profiler_util.FunctionEvent]) -> list[Span]:
    """Turn profiler events into spans; a collective belongs to the hook that launched it."""
    timed = sorted(events, key=lambda event: event.time_range.start)
    hooks = [event for event in timed if event.name.startswith("FSDP::") and "(" in event.name]

    def unit_at(moment: float) -> int:
        around = [h for h in hooks if h.time_range.start <= moment <= h.time_range.end]
        inside = around[-1].name.partition("(")[2].rstrip(")") if around else ""
        return int(inside) if inside.isdigit() else -1

    found = []
    for event in hooks:
        start, stop = event.time_range.start, event.time_range.end
        name = event.name.removeprefix("FSDP::").partition(" ")[0]
        found.append(Span(lane="hooks", start=start, stop=stop, unit=unit_at(start), label=name))
    launched = {
        lane: [unit_at(e.time_range.start) for e in timed if e.name == name]
        for lane, name in LAUNCHES.items()
    }
    for event in timed:
        start, stop = event.time_range.start, event.time_range.end
        lane = COLLECTIVES.get(event.name)
        if lane is not None:
            unit = launched[lane].pop(0)
            found.append(Span(lane=lane, start=start, stop=stop, unit=unit, label=str(unit)))
        elif event.name in ("aten::addmm", "aten::mm"):
            found.append(Span(lane="computation", start=start, stop=stop, unit=-1, label=""))
    return found


def draw(found: list[Span]) -> str:
    """Return the picture."""
    begin, end = min(s.start for s in found), max(s.stop for s in found)
    factor = SCALE / (end - begin)
    height = TOP + ROW * len(LANES) + 44
    turn = min(s.start for s in found if s.label == "pre_backward")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + SCALE + RIGHT}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    at = LEFT + (turn - begin) * factor
    lines += [
        f'<text x="{LEFT}" y="20">forward</text>',
        f'<text x="{at + 4:.1f}" y="20">backward</text>',
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="8" y2="{height - 40}" stroke="#999"/>',
    ]
    for row, lane in enumerate(LANES):
        y = TOP + row * ROW
        lines.append(f'<text x="8" y="{y + 17}">{lane}</text>')
        for span in (s for s in found if s.lane == lane):
            x, width = LEFT + (span.start - begin) * factor, (span.stop - span.start) * factor
            colour = COLOURS[span.unit] if span.unit >= 0 else "#bbbbbb"
            title = f"{lane} {span.label}, block {span.unit}, {span.stop - span.start:.0f} µs"
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1):.1f}" height="{BAR}" '
                f'fill="{colour}" fill-opacity="0.85"><title>{title}</title></rect>'
            )
    y = height - 30
    for unit, colour in enumerate(COLOURS):
        x = LEFT + 90 * unit
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="{y + 11}">block {unit}</text>')
    text = f"{(end - begin) / 1000:.1f} ms; rank 0 of {WORLD}, CPU, torch {torch.__version__}"
    lines.append(f'<text x="{LEFT + SCALE}" y="{y + 11}" text-anchor="end">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


def run(rank: int, rendezvous: str, rows: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    found = record(rows)
    if rank == 0:
        Path(out).write_text(draw(found), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="docs/timeline.svg")
    parser.add_argument("--rows", type=int, default=2048, help="rows of the batch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/rendezvous", args.rows, args.out), nprocs=WORLD)


if __name__ == "__main__":
    main()
