"""What the parameters of a wrapped model are called without wrappers and compilers, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fsdp.plain_names import clean, plain
from fsdp.wrapper import FullyShardedDataParallel
from fsdp.wrapper_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)


def as_registered(model: nn.Module) -> Callable[[str], str]:
    """Return what gives a plain name the parts that compilers have put into it."""
    # A compiled module and the one inside have one plain name; the inner one comes last.
    paths = {plain(path): clean(f"{path}.") for path, _ in model.named_modules()}

    def rename(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        return f"{paths[path].removeprefix('.')}{leaf}" if path in paths else name

    return rename


@contextmanager
def form(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    """Set the form of states that ``options`` ask for, for the body."""
    offload = options.cpu_offload
    if options.full_state_dict:
        alone = offload or options.broadcast_from_rank0
        context = FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=alone),
        )
    else:
        context = FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=offload),
            ShardedOptimStateDictConfig(offload_to_cpu=offload),
        )
    with context:
        yield
