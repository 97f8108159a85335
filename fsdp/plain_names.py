"""What modules and tensors are called by the plain model, whatever wraps its modules.

Paths are compared part by part: a module of the user may have the name of a wrapper in its own.
Knows paths and trees of modules; reads no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

WRAPPED = "_fsdp_wrapped_module"
CHECKPOINTED = "_checkpoint_wrapped_module"
PREFIX = f"{WRAPPED}."
WRAPPERS = frozenset({WRAPPED, CHECKPOINTED})
# Compilers put a part into names too. State dicts of modules have it, those of tools do not.
WRAPPERS_AND_COMPILERS = WRAPPERS | {"_orig_mod"}


def clean(name: str, parts: Collection[str] = WRAPPERS) -> str:
    """Return a path, of a tensor or module or up to a dot, without ``parts`` where they stand."""
    return ".".join(part for part in name.split(".") if part not in parts)


def plain(name: str) -> str:
    """Return a path without any wrapper or compiler."""
    return clean(name, WRAPPERS_AND_COMPILERS)


def joined(path: str, name: str) -> str:
    """Return the path of ``name`` on the module at ``path``."""
    return f"{path}.{name}" if path else name


def named_plainly(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its plain path, those that are used twice under every path.

    Wrappers for sharding, replication, checkpointing and compiling have the path of what is inside.
    """
    yield from _below(root, "")


def _below(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    replicates = isinstance(module, DistributedDataParallel)
    for name, child in module._modules.items():
        if child is None:
            continue
        hidden = name in WRAPPERS_AND_COMPILERS or (replicates and name == "module")
        yield from _below(child, path if hidden else joined(path, name))
