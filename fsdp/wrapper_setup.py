"""What happens to a module before it becomes a unit: it is checked, made real, broadcast.

Knows modules, tensors and groups; no engine state is made here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.torch_private import local_tensor
from fsdp.engine.tree import cast_floats, map_tensors
from fsdp.engine.unit import state_of
from fsdp.flat_parameter import check_flattenable
from fsdp.wrap import Targets
from fsdp.wrapper_owned import owned_modules, owned_params


def check_units(
    root: nn.Module,
    targets: Targets,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    *,
    use_orig_params: bool,
) -> None:
    """Refuse a division into units that would train something else; nothing is changed.

    Raises:
        ValueError: a unit below, a parameter in two units, or frozen and trainable ones in one.
    """
    for name, module in root.named_modules():
        if module not in ignored_modules and state_of(module) is not None:
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in\n{root}"
            )
    seen: dict[nn.Parameter, str] = {}
    for unit, kwargs in [*targets.items(), (root, {})]:
        params = owned_params(owned_modules(unit, ignored_modules, targets), ignored_params)
        for param, name in params.items():
            if param in seen:
                raise ValueError(
                    f"parameter {name} of shape {tuple(param.shape)} is shared between two units "
                    f"of the auto_wrap_policy ({seen[param]}, {type(unit).__name__}): one copy "
                    "would be trained without the other. Wrap both in one unit."
                )
            seen[param] = type(unit).__name__
        keeps = kwargs.get("use_orig_params", use_orig_params)
        if unit is not root:
            _check_frozen(unit, params, flat=not keeps)
        check_flattenable(list(params), use_orig_params=keeps)


def _check_frozen(unit: nn.Module, params: Mapping[nn.Parameter, str], *, flat: bool) -> None:
    frozen = {p: name for p, name in params.items() if not p.requires_grad}
    if not frozen or len(frozen) == len(params):
        return
    trainable = [name for p, name in params.items() if p.requires_grad]
    numel = sum(p.numel() for p in params)
    text = (
        f"{type(unit).__name__} has both parameters with requires_grad=True and False.\n"
        f"The following parameters have requires_grad=True: {trainable}\n"
        f"The following parameters have requires_grad=False: {list(frozen.values())}\n"
    )
    if flat:
        raise ValueError(
            f"{text}We do not support wrapping such modules with use_orig_params=False: wrap the "
            "frozen part by itself, or pass use_orig_params=True."
        )
    warnings.warn(
        f"{text}The gradients of all {numel} elements are reduced, of which "
        f"{sum(p.numel() for p in frozen)} are frozen. Wrap the frozen part by itself to save it.",
        stacklevel=5,
    )


def materialize(
    modules: Sequence[nn.Module], device: torch.device, init: Callable[[nn.Module], None] | None
) -> None:
    """Give parameters and buffers on meta memory and values: by ``init``, or as the modules do.

    Raises:
        AttributeError: a module cannot initialise itself.
    """
    tensors = [t for m in modules for t in (*m.parameters(False), *m.buffers(False))]
    if not any(tensor.is_meta for tensor in tensors):
        return
    if init is not None:
        for module in modules:
            init(module)
        return
    with torch.no_grad():
        for module in modules:
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if not own:
                continue
            module.to_empty(device=device, recurse=False)
            try:
                module.reset_parameters()  # type: ignore[operator]
            except BaseException as error:
                warnings.warn(
                    "Unable to call `reset_parameters()` for module on meta device with error "
                    f"{error}. Please ensure that {type(module).__name__} implements it.",
                    stacklevel=4,
                )
                raise


def keep_precise(modules: Iterable[nn.Module]) -> None:
    """Let ``modules`` compute in float32 inside a model of lower precision, and say so."""
    modules = list(modules)
    kinds = sorted({type(module).__name__ for module in modules})
    warnings.warn(
        "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped "
        f"module has submodules of type:\n{kinds}\nThese modules will be wrapped as separate FSDP "
        "instances with mixed precision disabled.",
        stacklevel=4,
    )
    for module in modules:
        given: list[torch.dtype] = []  # of the call under way

        def before(_: nn.Module, args: Any, kwargs: Any, given: list[torch.dtype] = given) -> Any:
            floats = [t for t in tensors_of((args, kwargs)) if t.is_floating_point()]
            given[:] = [floats[0].dtype] if floats else []
            return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

        def after(_: nn.Module, __: Any, output: Any, given: list[torch.dtype] = given) -> Any:
            return cast_floats(output, given[0]) if given else output

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after)


def broadcast_states(
    tensors: Sequence[torch.Tensor], info: DataParallelMeshInfo, device: torch.device
) -> None:
    """Overwrite ``tensors`` by those of the first rank; of DTensors, the parts.

    *Collective*: one broadcast per tensor, over the shard group and then over the replicas.

    Raises:
        ValueError: a tensor is on the CPU although the unit computes elsewhere.
    """
    if device.type != "cpu" and any(tensor.device.type == "cpu" for tensor in tensors):
        raise ValueError(
            "The module has CPU parameters or buffers when `sync_module_states=True`, which "
            "requires them to be on the accelerator. Pass `device_id` to move them."
        )
    parts = [local_tensor(t) if isinstance(t, DTensor) else t for t in tensors]
    for group in info.groups:
        first = dist.get_process_group_ranks(group)[0]
        for part in parts:
            dist.broadcast(part.detach(), src=first, group=group)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors inside ``tree``, in order."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, tree)
    return found
