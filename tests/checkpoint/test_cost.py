"""What a save and a load cost besides the bytes: collectives, waits for the disk, readings.

Counted, not timed. No count depends on how many tensors or ranks there are.
"""

from __future__ import annotations

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.ranks import RankContext
from fsdp import checkpoint
from fsdp.checkpoint.contents import written_by
from fsdp.reshard.optimizer import Saved
from fsdp.reshard.runs import whole_cut
from fsdp.reshard.side import Side, Told
from tests.fsdp.ranks import agreed, on_ranks
from tests.reshard.faces import fresh, made, marked

# What each rank claims; how much it has to say of its file, and that; the checkpoint is sealed.
SAVE = ["all_gather", "all_gather", "gather", "all_gather"]
# The files are made, filled in one round and closed by one rank; the others help with the digests.
SAVE_WHOLE = ["all_gather", "all_gather", "all_to_all", *SAVE]
# Ranks without elements of a parameter have other states: those of all are put together.
STATES = ["all_gather", "all_gather"]
# What each rank claims; where the checkpoint is; its bits are right; it is read, and fits.
LOAD = ["all_gather", "broadcast", "all_gather", "all_gather"]


def _collectives(context: RankContext, *, path: str, face: str, form: str) -> list[list[str]]:
    ranks = list(range(context.world_size))
    model, again = made(face, ranks), made(face, ranks, seed=8)
    assert model is not None
    assert again is not None
    optimizer, other = marked(model), fresh(again)
    records = context.recorder.records
    start = len(records)
    checkpoint.save(path, model, optimizer, format=form)
    middle = len(records)
    checkpoint.load(path, again, other)
    return [[record.op for record in part] for part in (records[start:middle], records[middle:])]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("face", "form", "save"),
    [
        ("flat", "sharded", SAVE),
        ("fully", "sharded", SAVE),
        ("ddp", "sharded", SAVE),
        ("original_one", "sharded", [*SAVE[:1], *STATES, *SAVE[1:]]),
        ("flat", "safetensors", SAVE_WHOLE),
    ],
)
def test_ranks_talk_as_often_as_is_named_here(
    face: str, form: str, save: list[str], world: int, tmp_path: Path
) -> None:
    found = agreed(_collectives, world, path=str(tmp_path / "saved"), face=face, form=form)
    assert found == [save, LOAD]


def _waits(context: RankContext, *, path: str) -> list[str]:
    model = made("flat", [0, 1])
    assert model is not None
    found: list[str] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    with mock.patch("os.fsync", seen):
        checkpoint.save(path, model, marked(model))
    return found


def test_each_file_is_brought_to_the_disk_once_and_before_it_gets_its_name(tmp_path: Path) -> None:
    first, second = on_ranks(_waits, 2, path=str(tmp_path / "saved"))
    fresh_place = first[3]
    assert fresh_place.startswith(".saved.saving-")
    assert first == [
        "__0_0.distcp",
        ".metadata",
        "digests.json.tmp",
        fresh_place,
        tmp_path.name,
    ]
    assert second == ["__1_0.distcp"]


def _copies(context: RankContext, *, path: str) -> int:
    model = made("flat", [0, 1])
    assert model is not None
    optimizer, group = marked(model), dist.new_group(backend="gloo")
    with mock.patch("fsdp.checkpoint.contents.pickle", wraps=pickle) as copier:
        checkpoint.async_save(path, model, optimizer, process_group=group).result()
    dist.destroy_process_group(group)
    return copier.dumps.call_count


def test_what_is_not_dealt_out_is_copied_where_it_is_written(tmp_path: Path) -> None:
    assert on_ranks(_copies, 2, path=str(tmp_path / "saved")) == (1, 0)


def _readings(context: RankContext, *, path: str) -> int:
    model = made("fully", [0, 1])
    assert model is not None
    checkpoint.save(path, model)
    real = FileSystemReader.read_metadata
    with mock.patch.object(FileSystemReader, "read_metadata", autospec=True) as read:
        read.side_effect = real
        checkpoint.load(path, model)
    return read.call_count


def test_what_a_checkpoint_consists_of_is_read_once(tmp_path: Path) -> None:
    assert agreed(_readings, 2, path=str(tmp_path / "saved")) == 1


class DTensorOperators(TorchDispatchMode):
    """Counts the operators that are asked of DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def _operators_of_loading(context: RankContext, *, path: str) -> dict[str, int]:
    ranks = list(range(context.world_size))
    model, again = made("fully", ranks), made("fully", ranks, seed=8)
    assert model is not None
    assert again is not None
    checkpoint.save(path, model, marked(model))
    other = fresh(again)
    with DTensorOperators() as operators:
        checkpoint.load(path, again, other)
    assert other.state
    return dict(+operators.calls)


def test_a_load_asks_no_operator_of_dtensors(tmp_path: Path) -> None:
    assert agreed(_operators_of_loading, 2, path=str(tmp_path / "saved")) == {}


# Which of several replicas writes


def _told(name: str, numel: int, rows: list[list[int]], dtype: Any = torch.float32) -> Told:
    cut = whole_cut(numel)
    table = tuple(tuple(row) for row in rows)
    return Told(names=(name,), shape=(numel,), dtype=dtype, cut=cut, rows=table, order=None)


def _shares(side: Side, ranks: range) -> list[set[str]]:
    return [written_by(side, rank) for rank in ranks]


def test_replicas_write_alike_much() -> None:
    everywhere = [[0], [1], [2]]
    sizes = {"a": 60, "b": 10, "c": 20, "d": 20, "e": 40, "f": 30}
    tensors = tuple(_told(name, size, everywhere) for name, size in sizes.items())
    shares = _shares(Side(tensors=tensors), range(3))
    assert shares == [{"a"}, {"b", "d", "f"}, {"c", "e"}]  # 60 elements each


def test_optimizer_states_and_dtypes_count_as_bytes() -> None:
    everywhere = [[0], [1]]
    tensors = (
        _told("trained", 10, everywhere, torch.bfloat16),
        _told("frozen", 20, everywhere),
        _told("other", 10, everywhere),
        _told("last", 1, everywhere),
    )
    states = {
        "trained": Saved(elements={"mean": torch.float32, "square": torch.float32}, values={})
    }
    first, second = _shares(Side(tensors=tensors, states=states), range(2))
    assert first == {"trained", "last"}  # 100 bytes before the last one
    assert second == {"frozen", "other"}  # 80, then 120


def test_a_shard_is_written_by_all_ranks_of_one_replica() -> None:
    rows = [[0, 2], [1, 3]]
    tensors = tuple(_told(name, 8, rows) for name in "abc")
    assert _shares(Side(tensors=tensors), range(5)) == [
        {"a", "c"},
        {"b"},
        {"a", "c"},
        {"b"},
        set(),
    ]


def _files(context: RankContext, *, path: str) -> None:
    model = made("ddp", [0, 1])
    assert model is not None
    checkpoint.save(path, model, marked(model))


def test_what_all_ranks_hold_is_in_one_file_each(tmp_path: Path) -> None:
    on_ranks(_files, 2, path=str(tmp_path / "saved"))
    metadata = FileSystemReader(tmp_path / "saved").read_metadata()
    places: dict[str, set[str]] = {}
    for index, info in metadata.storage_data.items():
        places.setdefault(index.fqn, set()).add(info.relative_path)
    assert all(len(files) == 1 for files in places.values())
    held = {key: places[key] for key in places if key.endswith(".weight")}
    assert set().union(*held.values()) == {"__0_0.distcp", "__1_0.distcp"}
