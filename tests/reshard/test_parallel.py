"""Beside tensor parallelism: any form and mesh into any other, in a job and through directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from conformance.ranks import RankContext
from fsdp import checkpoint
from fsdp.engine.torch_private import strided_shard
from fsdp.reshard import reshard
from fsdp.reshard.agreed import _on_all_meshes
from fsdp.reshard.dealt import Ranks, by_dim
from fsdp.reshard.pieces import pieces_of
from fsdp.reshard.side import Told
from tests.fsdp.ranks import error_of, named_on_every_rank, on_ranks
from tests.reshard.faces import everything, fresh, marked, same
from tests.reshard.parallel import shaped

Form = tuple[str, Sequence[int]]


def named(value: object) -> str:
    return f"{value[0]}_{'x'.join(map(str, value[1]))}" if isinstance(value, tuple) else str(value)


def late(*cells: tuple[Form, Form]) -> list[Any]:
    """Cells of a long run."""
    return [pytest.param(*cell, marks=pytest.mark.long) for cell in cells]


def _live(context: RankContext, *, source: Form, target: Form, limit: int) -> None:
    here, there, wanted = shaped(*source), shaped(*target, seed=8), shaped(*target)
    before, after, expected = marked(here), fresh(there, lr=0.5), marked(wanted)
    untouched = everything(here, before)
    reshard(here, there, before, after, limit=limit)
    same(everything(there, after), everything(wanted, expected))
    same(everything(here, before), untouched)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("original", (2, 2)), ("fully_last_dim", (2, 2))),
        *late(
            (("original", (2, 1)), ("tensor", (1, 2))),
            (("flat", (1, 2)), ("fully", (2, 1))),
            (("fully", (2, 2)), ("flat", (2, 2))),
            (("flat", (2, 2)), ("original", (1, 4))),
            (("no_shard", (2, 2)), ("fully", (4, 1))),
            (("fully_last_dim", (1, 4)), ("no_shard", (2, 2))),
            (("fully", (2, 1, 2)), ("original", (2, 2, 1))),
            (("plain", (1,)), ("fully", (2, 2))),
            (("tensor", (2, 2)), ("plain", (1,))),
        ),
    ],
    ids=named,
)
def test_a_model_moves_inside_a_job(source: Form, target: Form) -> None:
    on_ranks(_live, _world(source, target), source=source, target=target, limit=300)


def _world(*forms: Form) -> int:
    return max(int(torch.tensor(sizes).prod()) for _, sizes in forms)


def _saves(context: RankContext, *, form: Form, path: str, written: str) -> None:
    model = shaped(*form)
    checkpoint.save(path, model, marked(model), format=written)


def _loads(context: RankContext, *, form: Form, path: str) -> None:
    model, wanted = shaped(*form, seed=8), shaped(*form)
    optimizer, expected = fresh(model, lr=0.5), marked(wanted)
    checkpoint.load(path, model, optimizer)
    same(everything(model, optimizer), everything(wanted, expected))


@pytest.mark.parametrize("written", ["sharded", "safetensors"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("flat", (1, 2)), ("fully", (2, 1))),
        *late(
            (("fully", (2, 2)), ("original", (1, 2))),
            (("original", (2, 2)), ("plain", (1,))),
            (("plain", (2,)), ("flat", (2, 2))),
            (("fully_last_dim", (2, 2)), ("no_shard", (2, 1))),
            (("no_shard", (1, 2)), ("fully", (2, 2))),
            (("flat", (2, 1, 2)), ("tensor", (1, 2))),
            (("tensor", (1, 2)), ("original", (2, 2))),
        ),
    ],
    ids=named,
)
def test_a_directory_is_read_in_any_form(
    source: Form, target: Form, written: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    on_ranks(_saves, _world(source), form=source, path=path, written=written)
    on_ranks(_loads, _world(target), form=target, path=path)


@pytest.mark.long
def test_what_is_alike_on_several_meshes_is_written_once(tmp_path: Path) -> None:
    """Plain parameters of units lie on one mesh for each rank of tensor parallelism."""
    path = tmp_path / "saved"
    on_ranks(_saves, 4, form=("flat", (2, 2)), path=str(path), written="sharded")
    listed = FileSystemReader(path).read_metadata().storage_data
    written = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert written == sum(info.length for info in listed.values())


def _refused(context: RankContext, *, kind: str) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model, rows = nn.Module(), torch.ones(2, 2)
    if kind == "factor":
        placements = [strided_shard(0, 4), Shard(0)]
        value = DTensor.from_local(rows, mesh, placements, shape=(4, 2), stride=(2, 1))
    else:  # as no cut of four rows into two does it
        local = rows[: 1 + context.rank].repeat(1 + context.rank, 1)[: 1 + 2 * context.rank]
        value = DTensor.from_local(local, mesh["tensor"], [Shard(0)], shape=(4, 2), stride=(2, 1))
    model.register_buffer("part", value)
    return error_of(lambda: reshard(model, model))


@pytest.mark.parametrize(
    ("kind", "fragment"),
    [
        ("factor", "resharding needs a plain tensor that is cut along its dims, or whole"),
        ("sizes", "if its dims were cut one after another as torch.chunk does"),
    ],
)
def test_what_is_no_cut_of_cuts_is_refused_by_name(kind: str, fragment: str) -> None:
    errors = on_ranks(_refused, 2, kind=kind)
    named_on_every_rank(errors, NotImplementedError, fragment)
    named_on_every_rank(errors, NotImplementedError, "'part'")


def _held_by(context: RankContext) -> tuple[dict[str, list[list[int]]], Any]:
    """The table of ranks of each tensor, and the order of one that lies channels last."""
    pieces = pieces_of(shaped("flat", (2, 2)), [0, 1, 2, 3])
    (order,) = [piece.dealt.order for piece in pieces if piece.name == "picture.weight"]
    return {piece.name: piece.dealt.ranks.table.tolist() for piece in pieces}, order


@pytest.mark.long
def test_who_holds_what_follows_from_the_mesh() -> None:
    for rank, (tables, order) in enumerate(on_ranks(_held_by, 4)):
        # Boxes of tensor parallelism first: ranks 0 and 2 have the first of them.
        assert tables["layers.0.up.weight"] == [[0, 2, 1, 3]]
        assert tables["layers.0.norm.weight"] == [[0, 2], [1, 3]]
        # A rank knows the mesh of its own unit alone; ranks put theirs together.
        assert tables["layers.0.gain"] == [[rank % 2, rank % 2 + 2]]
        assert tables["scale"] == [[0], [1], [2], [3]]
        assert tuple(order) == (0, 2, 3, 1)


def _told(rows: Sequence[Sequence[int]], shape: tuple[int, ...] = (4,)) -> Told:
    dealt = by_dim(shape, Ranks(rows))
    table = tuple(tuple(row) for row in rows)
    return Told(
        names=("gain",), shape=shape, dtype=torch.float32, cut=dealt.cut, rows=table, order=None
    )


def test_meshes_of_units_are_put_together() -> None:
    one, other = _told([[0, 2]]), _told([[1, 3]])
    (found,) = _on_all_meshes(range(4), [[one], [other], [one], [other]])
    assert found.rows == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    "told",
    [
        [_told([[0, 2]]), _told([[1, 2]]), _told([[0, 2]]), _told([[1, 3]])],
        [_told([[0, 2]]), _told([[1]]), _told([[0, 2]]), _told([[1]])],
        [_told([[1, 3]]), _told([[0, 2]]), _told([[1, 3]]), _told([[0, 2]])],
        [_told([[0, 2]]), _told([[1, 3]], (5,)), _told([[0, 2]]), _told([[1, 3]], (5,))],
    ],
    ids=["overlap", "gap", "strangers", "shapes"],
)
def test_what_no_meshes_of_one_model_explain_is_refused(told: list[Told]) -> None:
    with pytest.raises(ValueError, match=r"rank 0 has .* Build the same model on all ranks"):
        _on_all_meshes(range(4), [[each] for each in told])
