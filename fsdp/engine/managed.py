"""Which modules, parameters and buffers one call manages, and whether it can. No sharding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp.engine.torch_private import has_replicate
from fsdp.engine.unit import state_of


def check_module(module: nn.Module, function: str) -> None:
    """Raise ValueError if ``module`` is a container that nobody calls."""
    container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{function} does not support containers that do not implement forward: {module}. "
            "Shard its members, or pass them as a list."
        )


def outermost(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return those of ``modules`` that no other one contains, each once, in order."""
    given = list(dict.fromkeys(modules))
    below = {inner for module in given for inner in module.modules() if inner is not module}
    return tuple(module for module in given if module not in below)


def managed_modules(
    roots: Sequence[nn.Module], ignored: frozenset[nn.Parameter]
) -> list[nn.Module]:
    """Return the modules below ``roots`` that no inner unit owns, children before parents.

    ``roots`` do not contain each other, as ``outermost`` returns them.
    """
    found: list[nn.Module] = []
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if has_replicate(module):
            return
        if module not in roots and state_of(module) is not None:
            return
        visited.add(module)
        for child in module.children():
            if child not in visited:
                visit(child)
        found.append(module)

    for root in roots:
        visit(root)
    if not ignored:
        return found
    return [module for module in found if not _all_ignored(module, ignored)]


def _all_ignored(module: nn.Module, ignored: frozenset[nn.Parameter]) -> bool:
    no_buffers = next(module.buffers(), None) is None
    return no_buffers and all(param in ignored for param in module.parameters())


def managed_states(
    modules: Iterable[nn.Module], ignored: frozenset[nn.Parameter], function: str = "FSDP"
) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Return parameters and buffers of ``modules``, each once, in traversal order.

    Raises:
        ValueError: a parameter without dims.
    """
    params: dict[nn.Parameter, None] = {}
    buffers: dict[torch.Tensor, None] = {}
    for module in modules:
        for name, param in module.named_parameters(recurse=False):
            if param in ignored:
                continue
            if param.dim() == 0:
                raise ValueError(
                    f"{function} doesn't support scalar parameters. "
                    f"Change {name} to a 1D tensor with numel equal to 1."
                )
            params[param] = None
        for buffer in module.buffers(recurse=False):
            buffers[buffer] = None
    return list(params), list(buffers)


def _has_inner_tensors(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a subclass around others, whose ``data`` cannot be set."""
    return is_traceable_wrapper_subclass(tensor)


def move_to(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move ``tensors`` to ``device`` in place; those on meta stay there.

    Raises:
        ValueError: a DTensor on a mesh of another device type.
    """
    for tensor in tensors:
        if tensor.device == device or tensor.device.type == "meta":
            continue
        if isinstance(tensor, DTensor):
            kind = tensor.device_mesh.device_type
            if kind != device.type:
                raise ValueError(
                    "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                    f"{kind} for DTensor and {device.type} for FSDP"
                )
            raise AssertionError(f"Expects DTensor to be moved to {kind} but got {tensor.device}")
        if _has_inner_tensors(tensor):
            with torch.no_grad():
                moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)
        else:
            tensor.data = tensor.to(device)
