"""Names as the plain model has them, whatever wraps its modules. No tensors are read."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp.wrapper_unit import WRAPPED

_TRANSPARENT = frozenset({WRAPPED, "_checkpoint_wrapped_module", "_orig_mod"})


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its name, those that are used twice under every name.

    Wrappers for sharding, replication, checkpointing and compiling have the name of what is inside.
    """
    yield from _below(root, "")


def _below(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    replicates = isinstance(module, DistributedDataParallel)
    for child_name, child in module._modules.items():
        if child is None:
            continue
        hidden = child_name in _TRANSPARENT or (replicates and child_name == "module")
        yield from _below(child, name if hidden else joined(name, child_name))


def joined(path: str, name: str) -> str:
    """Return the name of ``name`` on the module at ``path``."""
    return f"{path}.{name}" if path else name
