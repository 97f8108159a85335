"""Load: check the files, read into memory of its own, agree, and only then change anything."""

from __future__ import annotations

import os
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
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.request import Request
from fsdp.checkpoint.safe_file import is_safe
from fsdp.checkpoint.safe_read import SafeCatalog
from fsdp.checkpoint.saving import Optimizers, share
from fsdp.reshard.side import Local, agreed_side
from fsdp.reshard.together import Group, own_rank, ranks_of, together, told_by


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

    Args:
        path: a directory that all ranks see.
        model: of the same plain model as was saved.
        optimizers: of the same parameters; None: optimizer states are not read.
        process_group: the ranks that have the model; None: all.
        model_key: under which key of the saved dict the model's state is; levels are separated by
            dots, empty: at the top. For ``save``'s own checkpoints: the default.
        optimizer_key: the same of the optimizers' state.

    *Collective*. *Memory*: on the host, what this rank holds, and one box as it was saved. *Blocks*
    the host.

    Raises:
        FileNotFoundError: no checkpoint is there.
        CheckpointError: a file is missing, short, or has other bits than were written.
        ValueError: it is of another model or of other optimizers.

    Whatever is raised is raised on all ranks, and nothing was changed.
    """
    group, ranks = process_group, ranks_of(process_group)
    where = _checked(Path(path).resolve(), group)
    local = together(lambda: Local(model, optimizers, ranks), group)
    agreed_side(together(lambda: local.told, group), ranks, group)

    def look() -> Request:
        keys = (model_key, optimizer_key)
        return Request(local, _catalog(where, group, keys))

    request = together(look, group)
    objects = request.catalog.read(request.wanted)

    def fit() -> Commit:
        request.put_aside(objects)
        return Commit(local, request.staged)

    together(fit, group).run()


def _catalog(where: Path, group: Group, keys: tuple[str, str]) -> Catalog:
    if is_safe(where):
        return SafeCatalog(where, group)
    return sharded.ShardedCatalog(where, sharded.metadata_of(where), group, keys)


def _checked(path: Path, group: Group) -> Path:
    """Return where the checkpoint is, once all its files are seen to be whole."""
    first = ranks_of(group)[0]

    def inspect() -> tuple[Path, Digests] | None:
        return _inspected(path) if own_rank() == first else None

    found: tuple[Path, Digests] = told_by(first, together(inspect, group), group)
    where, digests = found

    def check() -> None:
        mine = {name: digests[name] for name in share(sorted(digests), group)}
        check_sizes(where, {name: size for name, (size, _) in mine.items()}, exact=True)
        check_digests(where, mine)

    together(check, group)
    return where


def _inspected(path: Path) -> tuple[Path, Digests]:
    """Return where the checkpoint is, and its digests; none if another package has written it.

    Raises:
        FileNotFoundError: no checkpoint is there.
        CheckpointError: it has no digests and should have, or lacks files or parts of them.
    """
    where = directory.complete(path)
    digests = read_digests(where)
    if digests is not None:
        return where, digests
    if is_safe(where):
        raise CheckpointError(f"{where / DIGESTS} is missing; take another checkpoint")
    metadata = sharded.metadata_of(where)
    if sharded.is_own(metadata):
        raise CheckpointError(
            f"{where / DIGESTS} is missing, which is written last: the checkpoint is not complete; "
            "take another one"
        )
    check_sizes(where, sharded.least_sizes(metadata), exact=False)
    return where, {}
