"""Save: into a directory beside, digests last, then one rename; until then the old one stays."""

from __future__ import annotations

import os
import pickle
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp.checkpoint import directory, safe, sharded
from fsdp.checkpoint.contents import keys_of, state_of, within
from fsdp.checkpoint.digests import Digests, digest_files, write_digests
from fsdp.engine.agreement import exchanged, together
from fsdp.reshard.agreed import Claim, agreed_side
from fsdp.reshard.side import Local, Side
from fsdp.reshard.telling import Group, own_rank, ranks_of, told_to

FORMATS = ("sharded", "safetensors")
Optimizers = Optimizer | Iterable[Optimizer] | None


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizers = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    format: str = "sharded",
) -> None:
    """Save a model and its optimizers, whichever way they are sharded.

    Names and shapes are those of the plain model, so any other form and world can load it, and
    PyTorch's own tools can. A checkpoint that was at ``path`` before is replaced in the end; if a
    rank dies on the way, it is still there. One save at a time for one path. Extra state of modules
    may differ between ranks; that of the first rank is saved.

    Args:
        path: a directory that all ranks see.
        model: with units of either face, beside tensor parallelism too, DTensors cut along dims,
            or plain tensors, which count as equal on all ranks.
        optimizers: one or several.
        process_group: the ranks that have the model; None: all.
        format: ``"sharded"``: a directory of ``torch.distributed.checkpoint`` to which every rank
            writes its own part; ``"safetensors"``: whole tensors, written by the first rank.

    *Collective*. *Memory*: one box; for safetensors one round of elements, and on the first rank
    one tensor with its optimizer state. *Blocks* the host until the files are stored.

    Raises:
        FileExistsError: something is at ``path`` that is no checkpoint.
        OSError: it cannot be written.
        CheckpointError: a rank could not write its part, or does not see where.
        ValueError: an unknown format, or ranks have other models, optimizer options, or values
            (step counts) in the states of optimizers; or ``process_group`` has no whole replica.
        TypeError: what an optimizer or module keeps cannot be pickled.
        RuntimeError: the model is in forward or backward, or inside ``summon_full_params``.
        NotImplementedError: tensors or states that are no cut of one dim.
    """
    _check_format(format)
    target = Path(path).resolve()
    local, side, fresh = _begun(target, model, optimizers, process_group)
    if format == "safetensors":
        _save_whole(target, fresh, local, side, process_group)
        return
    leads, keys = _leads(process_group), keys_of(side)
    _save_parts(target, fresh, lambda: state_of(local, side, leads=leads), keys, process_group)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizers = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Future[None]:
    """Copy a model and its optimizers to the host and save them while training goes on.

    Args:
        path: as for ``save``.
        model: as for ``save``.
        optimizers: as for ``save``.
        process_group: a group of these ranks that nothing else uses meanwhile and that works on
            the host (``dist.new_group(backend="gloo")``). Needed with several ranks: collectives of
            training and of the save must not meet in one group.

    *Collective* twice: the copy at once, over ``process_group``, and then the save. *Memory*: on
    the host, what this rank writes. *Blocks* the host until it is copied.

    Returns:
        A future that has no value; its ``result()`` raises what is wrong with the files. Whatever
        else ``save`` raises is raised at once.
    """
    if dist.is_initialized() and process_group is None:
        raise ValueError(
            "async_save needs a process_group of its own, with a backend for the host: make it "
            'once with torch.distributed.new_group(backend="gloo")'
        )
    target = Path(path).resolve()
    local, side, fresh = _begun(target, model, optimizers, process_group)
    leads, keys = _leads(process_group), keys_of(side)
    with _given_up(fresh, process_group):
        state = together(lambda: state_of(local, side, leads=leads, copy=True), process_group)
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fsdp-save")
        future = pool.submit(_save_parts, target, fresh, lambda: state, keys, process_group)
    pool.shutdown(wait=False)
    return future


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format must be one of {FORMATS}, got {format!r}")


def _begun(
    target: Path, model: nn.Module, optimizers: Optimizers, group: Group
) -> tuple[Local, Side, Path]:
    """Return what this rank saves, what all say of it, and where it is written.

    Ranks that differ, and a target that cannot be replaced, are refused, and nothing of it is left.
    """
    ranks = ranks_of(group)
    number = directory.number_of_a_save()
    fresh = directory.fresh(target, number)

    def look() -> tuple[tuple[Local, Claim], tuple[int, ...]]:
        local = Local(model, optimizers, ranks)
        claim = Claim(local.told)
        if _leads(group):
            directory.begin(fresh, target)
        return (local, claim), (*claim.numbers, number)

    with _given_up(fresh, group):
        (local, claim), told = exchanged(look, group, Claim.NUMBERS + 1)
        # Of what all agree on, so that all refuse it.
        side = within(agreed_side(claim, [own for *own, _ in told], ranks, group), ranks)
    return local, side, directory.fresh(target, told[0][-1])


def _save_parts(
    target: Path,
    fresh: Path,
    state: Callable[[], dict[str, Any]],
    keys: Iterable[str],
    group: Group,
) -> None:
    ranks = ranks_of(group)
    with _given_up(fresh, group):
        number = ranks.index(own_rank())
        told = told_to(ranks[0], lambda: sharded.write(fresh, state(), number), group)

        def finish() -> Digests:
            parts = dict(zip(ranks, map(pickle.loads, told), strict=True))
            return sharded.finish(fresh, parts, keys)

        _seal(target, fresh, finish, group)


def _save_whole(target: Path, fresh: Path, local: Local, side: Side, group: Group) -> None:
    first = ranks_of(group)[0]
    with _given_up(fresh, group):
        names = safe.write(fresh, local, side, group)
        found = told_to(first, lambda: digest_files(fresh, share(names, group)), group)
        _seal(target, fresh, lambda: dict(ChainMap(*map(pickle.loads, found))), group)


@contextmanager
def _given_up(fresh: Path, group: Group) -> Iterator[None]:
    """Leave nothing of a save that fails."""
    try:
        yield
    except BaseException:
        if _leads(group):
            directory.give_up(fresh)
        raise


def _seal(target: Path, fresh: Path, digests: Callable[[], Digests], group: Group) -> None:
    """Write the digests and let the checkpoint take its place."""

    def close() -> None:
        if _leads(group):
            write_digests(fresh, digests())
            directory.finish(fresh, target)

    together(close, group)


def _leads(group: Group) -> bool:
    return own_rank() == ranks_of(group)[0]


def share(names: list[str], group: Group) -> list[str]:
    """Return which of ``names`` this rank looks after."""
    ranks = ranks_of(group)
    return names[ranks.index(own_rank()) :: len(ranks)]
