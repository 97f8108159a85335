"""Load: check the files, read into memory of its own, agree, and only then change anything."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch.distributed as dist
from torch import nn

from fsdp.checkpoint import directory, sharded
from fsdp.checkpoint.commit import Commit
from fsdp.checkpoint.contents import Catalog
from fsdp.checkpoint.digests import (
    DIGESTS,
    Digests,
    check_digests,
    check_sizes,
    read_digests,
)
from fsdp.checkpoint.directory import METADATA
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.reading import Reading
from fsdp.checkpoint.safe_file import MODEL_FILE, OPTIMIZER_FILE, is_safe
from fsdp.checkpoint.safe_read import SafeCatalog
from fsdp.checkpoint.saving import Optimizers, share
from fsdp.engine.agreement import exchanged, together
from fsdp.reshard.agreed import agreed_tensors, number_of
from fsdp.reshard.side import Local
from fsdp.reshard.telling import Group, heard, own_rank, ranks_of


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizers = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    model_key: str = "model",
    optimizer_key: str = "optim",
) -> None:
    """Load a model and its optimizers, whichever way they are and were sharded.

    Reads what ``save`` has written in both formats, and what PyTorch's wrappers have written with
    ``torch.distributed.checkpoint``: sharded states of ``FullyShardedDataParallel``, of
    ``fully_shard`` and of plain models, in any world. A parameter that had no optimizer state has
    none afterwards.

    Optimizers get the options that were saved, and what those switch on or off: with ``amsgrad`` or
    ``momentum`` here and not there, a parameter goes on without. An option that was not saved, of
    another version of torch, stays what it is here. Optimizers of another kind are refused: those
    that keep an entry that was not saved, with the saved options, and those that lack options that
    were saved while others were not; Adam, AdamW and RAdam keep the same, and take each other's.

    Args:
        path: a directory that all ranks see.
        model: of the same plain model as was saved.
        optimizers: of the same parameters and kind; None: optimizer states are not read.
        process_group: the ranks that have the model; None: all.
        model_key: under which key of the saved dict the model's state is; levels are separated by
            dots, empty: at the top. For ``save``'s own checkpoints: the default.
        optimizer_key: the same of the optimizers' state.

    *Collective*. *Memory*: on the host, what this rank holds, and one box as it was saved. *Blocks*
    the host.

    Only files that the digest file lists are read, if there is one.

    Raises:
        FileNotFoundError: no checkpoint is there.
        CheckpointError: a file is missing, short, has other bits than were written, or is not
            listed; or another checkpoint took the place of this one meanwhile.
        ValueError: it is of another model, of other optimizers or of another kind of them.
        RuntimeError: the model is in forward or backward, or inside ``summon_full_params``.

    Whatever is raised is raised on all ranks, and nothing was changed.
    """
    group, ranks = process_group, ranks_of(process_group)
    target, leads = Path(path).resolve(), own_rank() == ranks[0]

    def look() -> tuple[tuple[Local, bytes], tuple[int, ...]]:
        found = pickle.dumps(_inspected(target)) if leads else b""
        local = Local(model, optimizers, ranks)
        return (local, found), (number_of(local.told.tensors), len(found))

    (local, found), told = exchanged(look, group, 2)
    agreed_tensors(local.told, [number for number, _ in told], ranks, group)
    where, digests, seal = pickle.loads(heard(ranks[0], found, told[0][1], group))
    # Nobody reads, and unpickles, what somebody knows to be damaged.
    together(lambda: _check_bits(where, digests, group), group)

    def read() -> Commit:
        reading = Reading(local, _catalog(where, digests, (model_key, optimizer_key)))
        reading.put_aside(reading.catalog.read(reading.wanted))
        _check_seal(where, seal)
        return Commit(local, reading.staged)

    together(read, group).run()


def _catalog(where: Path, digests: Digests, keys: tuple[str, str]) -> Catalog:
    """Return what the checked files have; without digests: those of another package.

    Raises:
        CheckpointError: something would be read that the digests do not list.
    """
    if MODEL_FILE in digests:
        return SafeCatalog(where, with_optimizer=OPTIMIZER_FILE in digests)
    if digests and METADATA not in digests:
        raise CheckpointError(
            f"{where / DIGESTS} lists neither {METADATA} nor {MODEL_FILE}; take another checkpoint"
        )
    metadata = sharded.metadata_of(where)
    for name in sharded.least_sizes(metadata) if digests else ():
        if name not in digests:
            raise CheckpointError(
                f"{where / name} is not listed in {DIGESTS}, so nobody has checked its bits; take "
                "another checkpoint"
            )
    return sharded.ShardedCatalog(where, metadata, keys)


def _seal_of(where: Path) -> bytes | None:
    """Return what tells one checkpoint from the next at its place; None if there is none."""
    for name in (DIGESTS, METADATA):
        if (where / name).is_file():
            return name.encode() + (where / name).read_bytes()
    return None


def _check_seal(where: Path, seal: bytes | None) -> None:
    """Refuse what was read while another checkpoint took the place of the checked one."""
    if _seal_of(where) != seal:
        raise CheckpointError(
            f"{where} was replaced or changed while it was read: {DIGESTS} is not what it was. "
            "Load again when nobody writes there."
        )


def _check_bits(where: Path, digests: Digests, group: Group) -> None:
    """Look through this rank's share of the files."""
    mine = {name: digests[name] for name in share(sorted(digests), group)}
    check_sizes(where, {name: size for name, (size, _) in mine.items()}, exact=True)
    check_digests(where, mine)


def _inspected(path: Path) -> tuple[Path, Digests, bytes | None]:
    """Return where the checkpoint is, its digests, and its seal.

    By the seal a later look sees that it is still the same. No digests: another package's.

    Raises:
        FileNotFoundError: no checkpoint is there.
        CheckpointError: it has no digests and should have, or lacks files or parts of them.
    """
    # The seal first: a checkpoint that takes this one's place later has another one.
    seal = _seal_of(directory.complete(path))
    where = directory.complete(path)
    digests = read_digests(where)
    if digests is not None and not digests:
        raise CheckpointError(f"{where / DIGESTS} lists no files; take another checkpoint")
    if digests is not None:
        return where, digests, seal
    if is_safe(where):
        raise CheckpointError(f"{where / DIGESTS} is missing; take another checkpoint")
    metadata = sharded.metadata_of(where)
    if sharded.is_own(metadata):
        raise CheckpointError(
            f"{where / DIGESTS} is missing, which is written last: the checkpoint is not complete; "
            "take another one"
        )
    check_sizes(where, sharded.least_sizes(metadata), exact=False)
    return where, {}, seal
