"""Helpers for tests of wrappers: full parameters, zeroing, state across ranks, readable names.

Wrappers are recognised by what they offer (`summon_full_params`, DTensor parameters), not by class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import whole

__all__ = [
    "_assert_module_states",
    "_broadcast_state_dict",
    "_zero_model",
    "check_sharded_parity",
    "get_full_params",
    "subtest_name",
]


def subtest_name(test_name_mapping: Mapping[str, str], *args: Any) -> str:
    """Name of a set of values for `parametrize`: ``name_fn=partial(subtest_name, mapping)``.

    Args:
        test_name_mapping: text of a value to what stands for it.
        *args: the values; None is "none".

    Raises:
        KeyError: a value that the mapping lacks.
    """
    return "_".join("none" if arg is None else test_name_mapping[str(arg)] for arg in args)


def get_full_params(model: nn.Module, recurse: bool = True) -> list[Tensor]:  # noqa: FBT001, FBT002 - positional in PyTorch's helper
    """Copies of all unsharded parameters, in the order of `parameters()`.

    Args:
        model: wrapped in any way, or not at all.
        recurse: also those of nested wrapped modules.

    Collective: as the wrapper's summon, or one all-gather per DTensor.
    """
    with _summoned(model, recurse=recurse):
        return [copy.deepcopy(whole(p)) for p in model.parameters(recurse=True)]


def _zero_model(
    model: nn.Module,
    zero_buffers: bool = False,  # noqa: FBT001, FBT002 - positional in PyTorch's helper
    summon_full: bool = True,  # noqa: FBT001, FBT002
) -> None:
    """Set all parameters, and buffers if asked, to zero in place.

    Collective: as the wrapper's summon, if `summon_full`.
    """
    context = _summoned(model, recurse=True) if summon_full else nullcontext()
    with context, torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        if zero_buffers:
            for buffer in model.buffers():
                buffer.zero_()


def _broadcast_state_dict(
    rank: int, state_dict: Mapping[str, Any], device: torch.device | None = None
) -> dict[str, Any]:
    """Rank 0's state dict on every rank.

    Args:
        rank: this rank.
        state_dict: counts on rank 0 only.
        device: where tensors go; None for the accelerator if the default group needs it, else CPU.

    Collective: one object broadcast.
    """
    if device is None:
        device = dist.distributed_c10d._get_pg_default_device()
    values = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state_dict.items()}
    box: list[Any] = [values if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in box[0].items()}


def _assert_module_states(
    model: nn.Module,
    process_group: dist.ProcessGroup,
    assert_fn: Callable[[Tensor, Tensor], None],
) -> None:
    """Call `assert_fn` with each parameter and buffer of rank 0 and that of each other rank.

    Collective: one object all-gather over `process_group`.

    Raises:
        AssertionError: the ranks hold different names.
    """
    here = {
        name: tensor.detach().cpu()
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    }
    gathered: list[Any] = [None] * process_group.size()
    dist.all_gather_object(gathered, here, group=process_group)
    first = gathered[0]
    for rank, other in enumerate(gathered[1:], start=1):
        if first.keys() != other.keys():
            names = sorted(first.keys() ^ other.keys())
            raise AssertionError(f"ranks 0 and {rank} of the group hold different names: {names}")
        for name in first:
            assert_fn(first[name], other[name])


def check_sharded_parity(
    cls: Any,
    replicated_module: nn.Module,
    sharded_module: nn.Module,
    prefixes_to_ignore: Sequence[str] = (),
) -> None:
    """Fail unless every parameter and gradient is its part of the replicated module's.

    Args:
        cls: the test, for its asserts.
        replicated_module: the same on all ranks.
        sharded_module: with DTensor parameters of the same names, in the same order.
        prefixes_to_ignore: removed from the names of the sharded module.

    Raises:
        AssertionError: the test's; or a parameter is no DTensor.
        ValueError: a placement that `distribute_tensor` lays out in another order.
    """
    pairs = zip(
        replicated_module.named_parameters(), sharded_module.named_parameters(), strict=True
    )
    for (name, whole_one), (sharded_name, sharded) in pairs:
        for prefix in prefixes_to_ignore:
            sharded_name = sharded_name.replace(prefix, "")
        cls.assertEqual(name, sharded_name)  # noqa: PT009 - the test's own assert
        _check_part(cls, name, whole_one, sharded)
        if whole_one.grad is None or sharded.grad is None:
            kinds = [type(p.grad).__name__ for p in (whole_one, sharded)]
            cls.assertEqual(*kinds, f"gradient of {name}")  # noqa: PT009
        else:
            _check_part(cls, f"gradient of {name}", whole_one.grad, sharded.grad)


def _check_part(cls: Any, what: str, whole_one: Tensor, sharded: Tensor) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # takes a second

    if not isinstance(sharded, DTensor):
        raise AssertionError(f"{what}: got {type(sharded).__name__}, wanted a DTensor")
    mesh, placements = sharded.device_mesh, sharded.placements
    if tuple(placements) == (Shard(0), Shard(0)):
        raise ValueError(
            f"{what}: {placements} on {mesh}: rows are dealt to both dimensions in another order "
            "than distribute_tensor deals them; compare full tensors"
        )
    # No source rank: every rank cuts its own copy, so nothing is sent that could hide an error.
    part = distribute_tensor(whole_one.detach(), mesh, placements, src_data_rank=None)
    cls.assertEqual(sharded.to_local().detach(), part.to_local(), what)  # noqa: PT009


def _summoned(model: nn.Module, *, recurse: bool) -> AbstractContextManager[Any]:
    """Full parameters inside, where the wrapper has a context for that."""
    for module in model.modules():
        summon = getattr(type(module), "summon_full_params", None)
        if summon is not None:
            context: AbstractContextManager[Any] = summon(model, recurse=recurse)
            return context
    return nullcontext()
