"""What ``fully_shard`` is given, checked at the call and before anything changes.

Each error says what was got and what is wanted; all follow from what every rank of the mesh was
given alike, so that ranks raise together. Changes nothing; must not know groups or order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from fsdp.engine.managed import check_module, outermost
from fsdp.engine.unit import FSDPState, state_of

_POLICY_CLASSES = "policies of torch.distributed.fsdp are other classes"


def modules_of(module: Any) -> tuple[nn.Module, ...]:
    """Return the modules that one call shards.

    Raises:
        TypeError: neither a module nor modules.
        ValueError: there is none, or a container that nobody calls.
        AssertionError: one was sharded before.
    """
    if isinstance(module, nn.Module):
        given: list[Any] = [module]
    else:
        wanted = "fully_shard shards an nn.Module or a sequence of them"
        if not isinstance(module, Iterable) or isinstance(module, torch.Tensor | str | Mapping):
            raise TypeError(f"{wanted}, got {_shown(module)}")
        given = list(module)
        for each in given:
            if not isinstance(each, nn.Module):
                raise TypeError(f"{wanted}, got a sequence with {_shown(each)}")
    modules = outermost(given)
    for each in modules:
        check_module(each, "fully_shard")
        if state_of(each) is not None:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"fully_shard has already been applied to the following module:\n{each}"
            )
    if not modules:
        raise ValueError("fully_shard got an empty sequence of modules")
    return modules


def check_options(
    mp_policy: object, offload_policy: object, shard_placement_fn: object, dp_mesh_dims: object
) -> None:
    """Raise TypeError for an option of another type than it must be."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        dtype = isinstance(mp_policy, torch.dtype)
        remedy = f"pass MixedPrecisionPolicy(param_dtype={mp_policy})" if dtype else "leave it out"
        if type(mp_policy).__name__ == MixedPrecisionPolicy.__name__:
            remedy = _POLICY_CLASSES
        raise _wrong("mp_policy", mp_policy, "a MixedPrecisionPolicy of fsdp", remedy)
    if not isinstance(offload_policy, OffloadPolicy):
        remedy = "pass CPUOffloadPolicy() to offload, or leave it out"
        if type(offload_policy).__name__ in (OffloadPolicy.__name__, CPUOffloadPolicy.__name__):
            remedy = _POLICY_CLASSES
        raise _wrong("offload_policy", offload_policy, "an OffloadPolicy of fsdp", remedy)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise _wrong(
            "shard_placement_fn",
            shard_placement_fn,
            "a function of a parameter",
            "to cut all on dim 1, pass lambda param: Shard(1)",
        )
    if dp_mesh_dims is not None and not isinstance(dp_mesh_dims, DataParallelMeshDims):
        remedy = "pass DataParallelMeshDims(shard='name of a dim')"
        raise _wrong("dp_mesh_dims", dp_mesh_dims, "a DataParallelMeshDims of fsdp", remedy)


def ignored_of(ignored_params: Any) -> frozenset[nn.Parameter]:
    """Return the parameters to leave alone.

    Raises:
        TypeError: something else than parameters.
    """
    if ignored_params is None:
        return frozenset()
    wanted, remedy = "a set of parameters", "pass the parameters themselves"
    if isinstance(ignored_params, nn.Module):
        remedy = "pass set(module.parameters())"
    if isinstance(ignored_params, nn.Module | torch.Tensor | str) or not isinstance(
        ignored_params, Iterable
    ):
        raise _wrong("ignored_params", ignored_params, wanted, remedy)
    found = list(ignored_params)
    for each in found:
        if not isinstance(each, nn.Parameter):
            if isinstance(each, str):
                remedy = f"pass module.get_parameter({each!r})"
            raise _wrong("a member of ignored_params", each, "a parameter", remedy)
    return frozenset(found)


def check_mesh(mesh: Any) -> None:
    """Raise for a mesh that is none, is on devices that are not here, or lacks this rank.

    Raises:
        TypeError: no mesh.
        ValueError: a mesh on which this rank cannot shard.
    """
    if not isinstance(mesh, DeviceMesh):
        group = isinstance(mesh, torch.distributed.ProcessGroup)
        remedy = "make one with DeviceMesh.from_group" if group else "make one by init_device_mesh"
        raise _wrong("mesh", mesh, "a DeviceMesh", remedy)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if mesh.device_type not in here:
        raise ValueError(
            f"fully_shard: the mesh is of {mesh.device_type!r} devices, and here are "
            f"{' and '.join(here)}: {mesh}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: rank {torch.distributed.get_rank()} is not in the mesh, whose ranks are "
            f"{mesh.mesh.flatten().tolist()}. Call it on those ranks only, or pass a mesh with "
            "this rank in it."
        )


def check_not_sharded(
    modules: Sequence[nn.Module],
    ignored: frozenset[nn.Parameter],
    unit_of: Callable[[nn.Module], FSDPState | None],
) -> None:
    """Raise ValueError if an earlier call on a module around these has sharded a parameter.

    Args:
        modules: those whose parameters are to be sharded now.
        ignored: parameters that are left alone.
        unit_of: which unit manages a module since an earlier call.
    """
    for module in modules:
        unit = unit_of(module)
        if unit is None:
            continue
        taken = {
            name
            for group in unit.groups
            for param in group.fsdp_params
            for owner, name in param.info.owners()
            if owner is module
        }
        for name, param in module.named_parameters(recurse=False):
            if name in taken and param not in ignored:
                raise ValueError(
                    f"fully_shard: an earlier call, on {unit.name}, has sharded parameter "
                    f"'{name}' of {type(module).__name__} already. Call fully_shard on inner "
                    "modules first, then on those around them; modules that share a part go into "
                    "one call, fully_shard([module_a, module_b])."
                )


def _wrong(what: str, got: object, wanted: str, remedy: str) -> TypeError:
    return TypeError(f"fully_shard: {what} must be {wanted}, got {_shown(got)}; {remedy}")


def _shown(got: object) -> str:
    """A short text that tells type and value."""
    if isinstance(got, torch.Tensor):
        return f"{type(got).__name__} of shape {tuple(got.shape)}"
    text = repr(got).splitlines()[0][:60]
    return text if got is None or isinstance(got, type) else f"{type(got).__name__} {text}"
