"""Pieces of DTensors without a collective, and full copies of all in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from conformance.gather import Cut, full_copies, held
from conformance.history import History, HistoryWriter
from conformance.ranks import Job, RankContext, RankVerdict, shared_pool

SHAPES = {"even": (8, 3), "uneven": (7, 3), "tiny": (1, 5), "empty": (0, 2), "vector": (6,)}


def distributed() -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors by name, and the same distributed in several ways; collective."""
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
    return originals, tensors


def gather_everything(context: RankContext) -> dict[str, Any]:
    """Names of what differs from the original, and how many collectives were needed."""
    originals, tensors = distributed()
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


def test_copies_are_the_originals_and_take_one_collective_of_objects() -> None:
    outcome = shared_pool(4, preload=("tests.fsdp.preload",)).run(Job.of(gather_everything))
    assert outcome.verdict is RankVerdict.OK, outcome.sentence
    for value in outcome.values:
        assert value == {
            "order": True,
            "wrong": [],
            "aliased": [],
            "collectives": ["all_gather"] * 2,  # their lengths, then what they are
        }


def write_pieces(context: RankContext, *, directory: str) -> dict[str, Any]:
    """Names of what is no piece, and how many collectives were needed for the others."""
    originals, tensors = distributed()
    whole = {key for key in tensors if "twice" in key or "copies" in key or key == "plain"}
    own = {key: tensor for key, tensor in tensors.items() if key not in whole}
    context.recorder.records.clear()
    pieces = held(own)
    collectives = len(context.recorder.records)
    with HistoryWriter(Path(directory), context.rank, {"world": context.world_size}) as writer:
        writer.begin_phase("build")
        writer.write("tensors", held(tensors))
        writer.write("originals", originals)
    return {
        "collectives": collectives,
        "no piece": [key for key, piece in pieces.items() if not isinstance(piece, Cut)],
        "aliased": [
            key
            for key, piece in pieces.items()
            if piece.piece.numel() and piece.piece.data_ptr() == tensors[key].to_local().data_ptr()
        ],
    }


def test_pieces_take_no_collective_and_make_up_the_originals(tmp_path: Path) -> None:
    job = Job.of(write_pieces, directory=str(tmp_path))
    outcome = shared_pool(4, preload=("tests.fsdp.preload",)).run(job)
    assert outcome.verdict is RankVerdict.OK, outcome.sentence
    for value in outcome.values:
        assert value == {"collectives": 0, "no piece": [], "aliased": []}
    history = History.read(tmp_path, 4)
    for rank in range(4):
        read, originals = (history.get(rank, what) for what in ("tensors", "originals"))
        assert list(read) == list(originals)
        assert [k for k, t in read.items() if t.dtype != originals[k].dtype] == []
        assert [k for k, t in read.items() if not torch.equal(t, originals[k])] == []


def hold_what_is_no_piece(context: RankContext) -> str:
    """What is said of a DTensor on whose last rank the local tensor is the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    whole = torch.ones(5, 3) if context.rank else sharded.to_local()
    wrong = DTensor.from_local(
        whole, mesh, [Shard(0)], run_check=False, shape=sharded.shape, stride=sharded.stride()
    )
    try:
        held({"right": sharded, "wrong": wrong})
    except ValueError as error:
        return str(error)
    return ""


def test_a_local_tensor_that_is_not_the_piece_its_placements_name_is_refused() -> None:
    outcome = shared_pool(2, preload=("tests.fsdp.preload",)).run(Job.of(hold_what_is_no_piece))
    assert outcome.values == (
        "",
        "wrong: this rank's local tensor is (5, 3), but of a DTensor of shape (5, 3) that is cut"
        " on dimension 0 among 2 ranks, the piece at 1 is (2, 3)",
    )
