"""Checkpoints of ``torch.distributed.checkpoint``, written and read: every rank its own part.

PyTorch's own readers and writers do the work: ranges of files, one box at a time.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from fsdp.checkpoint.boxed import BoxedLoadPlanner, SavePlanner
from fsdp.checkpoint.contents import Entries
from fsdp.checkpoint.digests import Digests, digest_files
from fsdp.checkpoint.directory import METADATA
from fsdp.checkpoint.errors import CheckpointError

MARK = "fsdp_checkpoint"  # says that a digest file belongs to the checkpoint


class Part(NamedTuple):
    """What one rank has written."""

    plan: SavePlan
    results: list[WriteResult]
    digests: Digests


def write(directory: Path, state: dict[str, Any], number: int) -> Part:
    """Write what one rank has of a state, into a file that has its number.

    Every rank does so alone: what it writes no other does. *Blocks* the host until it is stored.

    Raises:
        CheckpointError: the directory is not there, or the file cannot be written.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}, which the first rank has made, is not there; do all ranks give the same "
            "path, on a file system that all of them see, and does no other save go there?"
        )
    with _one_kind_of_error(f"{directory} cannot be written"):
        planner = SavePlanner()
        planner.set_up_planner(state if number else {**state, MARK: {"version": 1}})
        writer = FileSystemWriter(directory, sync_files=False)  # the digests' task
        writer.set_up_storage_writer(False, rank=number, use_collectives=False)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        results = writer.write_data(plan, planner).wait() if plan.items else []
        files = {result.storage_data.relative_path for result in results}
        return Part(plan, results, digest_files(directory, sorted(files)))


def finish(directory: Path, parts: Mapping[int, Part], wanted: Iterable[str]) -> Digests:
    """Write what the checkpoint consists of, once every rank has written its part.

    Args:
        directory: where they are.
        parts: by rank.
        wanted: keys that the checkpoint must have.

    Returns:
        The digests of all files.

    Raises:
        CheckpointError: it cannot be written, or the parts are not all there is.
    """
    for rank, part in parts.items():
        _check_there(directory, rank, part.digests)
    with _one_kind_of_error(f"{directory} cannot be written"):
        plans = [part.plan for part in parts.values()]
        _, metadata = SavePlanner().create_global_plan(plans)
    lacking = next((key for key in wanted if key not in metadata.state_dict_metadata), None)
    if lacking is not None:
        raise CheckpointError(f"no rank has written '{lacking}' into {directory}")
    with _one_kind_of_error(f"{directory} cannot be written"):
        writer = FileSystemWriter(directory, sync_files=False)
        writer.finish(metadata, [part.results for part in parts.values()])
        own = digest_files(directory, [METADATA])
    return dict(ChainMap(own, *(part.digests for part in parts.values())))


def _check_there(directory: Path, rank: int, digests: Digests) -> None:
    """Refuse files of a rank that are not, as it has written them, in the directory seen here."""
    for name, (wanted, _) in digests.items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != wanted:
            what = "is missing" if found is None else f"has {found} bytes instead of {wanted}"
            raise CheckpointError(
                f"'{name}', which rank {rank} has written, {what} in {directory} as the first rank "
                "sees it; do all ranks give the same path, on a file system that all of them see?"
            )


def metadata_of(directory: Path) -> Metadata:
    """Return what the checkpoint consists of.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = directory / METADATA
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; take another checkpoint")
    try:
        return FileSystemReader(directory).read_metadata()
    except Exception as error:  # whatever damaged bytes make of a pickle
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); take another checkpoint"
        ) from error


def is_own(metadata: Metadata) -> bool:
    """Whether this package has written the checkpoint, and so a digest file with it."""
    return any(key.startswith(f"{MARK}.") for key in metadata.state_dict_metadata)


def least_sizes(metadata: Metadata) -> dict[str, int]:
    """Return how many bytes each file must have at least."""
    found: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = info.offset + info.length
        found[info.relative_path] = max(found.get(info.relative_path, 0), end)
    return dict(sorted(found.items()))


class ShardedCatalog:
    """What is in a directory of ``torch.distributed.checkpoint``.

    Args:
        directory: where it is.
        metadata: what it consists of.
        keys: under which keys model and optimizer states were saved; dots separate levels, and an
            empty key is the top.
    """

    def __init__(self, directory: Path, metadata: Metadata, keys: tuple[str, str]) -> None:
        self._directory, self._metadata = directory, metadata
        self.entries: Entries = {}
        self._keys: dict[str, str] = {}
        self._nested: dict[str, dict[tuple[Any, ...], str]] = {}
        self._tensors: Entries = {}
        paths = metadata.planner_data or {}
        for key, entry in metadata.state_dict_metadata.items():
            place = _place(tuple(paths.get(key, (key,))), keys)
            if place is None:
                continue
            found = (
                (tuple(entry.size), entry.properties.dtype)
                if isinstance(entry, TensorStorageMetadata)
                else None
            )
            ours, inside = place
            if inside:
                # A container as a value (extra state of a module) is saved leaf by leaf.
                self._nested.setdefault(ours, {})[inside] = key
                self._tensors[key] = found
                self.entries[ours] = None
            else:
                self._keys[ours] = key
                self.entries[ours] = found

    def read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Fill the boxes and tensors of ``wanted``; return what is no tensor.

        *Memory*: one box as it was saved at a time, beside what is filled. *Blocks* the host.

        Raises:
            CheckpointError: it cannot be read.
        """
        state = {self._keys[k]: v for k, v in wanted.items() if k not in self._nested}
        for leaf in (leaf for key in wanted for leaf in self._nested.get(key, {}).values()):
            entry = self._tensors[leaf]
            state[leaf] = None if entry is None else torch.zeros(entry[0], dtype=entry[1])
        with _one_kind_of_error(f"{self._directory} cannot be read"):
            planner = BoxedLoadPlanner(state, self._metadata)
            reader = FileSystemReader(self._directory)
            reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            reader.read_data(planner.create_local_plan(), planner).wait()
        objects = [key for key, value in wanted.items() if value is None]
        return {
            key: _container({path: state[leaf] for path, leaf in self._nested[key].items()})
            if key in self._nested
            else state[self._keys[key]]
            for key in objects
        }


def _place(path: tuple[Any, ...], keys: tuple[str, str]) -> tuple[str, tuple[Any, ...]] | None:
    """Return the key of a catalog and the way from there to a leaf, if it is a container.

    None for what belongs to neither model nor optimizers.
    """
    # The longer one first: a model at the top has its optimizers' state beside its tensors.
    for prefix, name in sorted(
        zip(keys, ("model", "optim"), strict=True), key=lambda k: -len(k[0])
    ):
        levels = tuple(prefix.split(".")) if prefix else ()
        rest = path[len(levels) :]
        if path[: len(levels)] != levels or not rest or path[0] == MARK:
            continue
        # Nested: "state", tensor, entry. Flattened by the user: all in one string.
        depth = 3 if name == "optim" and rest[0] in ("state", "param_groups") else 1
        return ".".join(map(str, (name, *rest[:depth]))), rest[depth:]
    return None


def _container(leaves: dict[tuple[Any, ...], Any]) -> Any:
    """Return the containers whose leaves these are: lists where the ways are numbers."""
    if () in leaves:
        return leaves[()]
    below: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (first, *rest), value in leaves.items():
        below.setdefault(first, {})[tuple(rest)] = value
    made = {key: _container(inner) for key, inner in below.items()}
    return [made[i] for i in sorted(made)] if all(isinstance(i, int) for i in made) else made


@contextmanager
def _one_kind_of_error(what: str) -> Iterator[None]:
    """Say in one sentence what failed, whatever PyTorch makes of a full disk or damaged bytes."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
