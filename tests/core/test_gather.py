"""Full copies of many DTensors: what `full_tensor` gives one by one, in one collective."""

from __future__ import annotations

from typing import Any

import torch

from conformance.gather import full_copies
from conformance.ranks import Job, RankContext, RankVerdict, shared_pool

SHAPES = {"even": (8, 3), "uneven": (7, 3), "tiny": (1, 5), "empty": (0, 2), "vector": (6,)}


def gather_everything(context: RankContext) -> dict[str, Any]:
    """Names of what differs from the original, and how many collectives were needed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    layouts = {
        "rows": (flat, [Shard(0)]),
        "copies": (flat, [Replicate()]),
        "hybrid": (grid, [Replicate(), Shard(0)]),
        "outer": (grid, [Shard(0), Replicate()]),
        "twice": (grid, [Shard(0), Shard(0)]),
    }
    originals, tensors = {}, {}
    for place, (mesh, placements) in layouts.items():
        for dtype in (torch.float32, torch.bfloat16):
            for name, shape in SHAPES.items():
                key = f"{place} {name} {dtype}"
                originals[key] = torch.randn(shape).to(dtype)
                tensors[key] = distribute_tensor(originals[key], mesh, placements)
    for dim, name in ((1, "columns"), (-1, "last")):
        originals[name] = torch.randn(3, 5)
        tensors[name] = distribute_tensor(originals[name], flat, [Shard(dim)])
    originals["plain"] = tensors["plain"] = torch.randn(3, requires_grad=True)
    context.recorder.records.clear()
    copies = full_copies(tensors)
    asked = {key: t for key, t in tensors.items() if "twice" not in key and "copies" not in key}
    context.recorder.records.clear()
    full_copies(asked)
    return {
        "order": list(copies) == list(tensors),
        "wrong": [key for key, value in originals.items() if not torch.equal(copies[key], value)],
        "aliased": [key for key, t in tensors.items() if copies[key].requires_grad],
        "collectives": [record.op for record in context.recorder.records],
    }


def test_copies_are_the_originals_and_take_one_collective_a_group_and_dtype() -> None:
    outcome = shared_pool(4, preload=("tests.fsdp.preload",)).run(Job.of(gather_everything))
    assert outcome.verdict is RankVerdict.OK, outcome.sentence
    for value in outcome.values:
        assert value == {
            "order": True,
            "wrong": [],
            "aliased": [],
            "collectives": ["all_gather"] * 6,
        }
