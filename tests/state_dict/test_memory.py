"""What saving and loading take beside shards, input and result, for both faces. Two ranks.

Sharded saves and loads of the wrapper are in `test_sharded.py`, its optimizer's in
`optim_state/test_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from conformance.ranks import RankContext
from conformance.scenarios.live_bytes import metering
from fsdp import FullStateDictConfig, fully_shard, get_state_dict, set_state_dict
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.ranks import on_ranks
from tests.state_dict import cells
from tests.state_dict.test_sharded import LAYER, Inner, Peak, Wide

ROOT = 4 * LAYER  # bytes of the largest group
SMALL = 4096  # counts of steps, what ranks tell each other


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The memory behind the values of a state."""
    if isinstance(tree, dict):
        return [each for value in tree.values() for each in tensors_in(value)]
    if isinstance(tree, DTensor):
        return [tree.to_local()]
    return [tree] if isinstance(tree, torch.Tensor) else []


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def above(there: list[torch.Tensor], call: Callable[[], Any]) -> int:
    """Bytes at the most beside what is ``there`` and what ``call`` returns, beyond that."""
    with metering(torch.device("cpu")), Peak() as meter:
        _ = [tensor.sum() for tensor in there]
        meter.peak = 0
        made = tensors_in(call())
    old = {tensor.untyped_storage().data_ptr() for tensor in there}
    new = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in old]
    return meter.peak - size_of(there) - size_of(new)


def _wrapper(context: RankContext, *, original: bool, what: str) -> int:
    policy = ModuleWrapPolicy({Inner})
    model = cells.wrap(Wide(), nested=False, auto_wrap_policy=policy, use_orig_params=original)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=what == "first")
    cells.saved(model, cells.FULL, config)  # what is done once
    shards = [group.shard.data for unit in FSDP.fsdp_modules(model) for group in unit._state.groups]
    if what == "load":
        state = cells.saved(model, cells.FULL, config)
        given = tensors_in(dict(state))
        return above([*shards, *given], lambda: cells.load(model, cells.FULL, state))
    return above(shards, lambda: dict(cells.saved(model, cells.FULL, config)))


@cells.grid(original=cells.ORIGINAL, what={"first": "first", "all": "all", "load": "load"})
def test_a_full_state_takes_the_units_that_the_recursion_is_inside_of(
    *, original: bool, what: str
) -> None:
    found = on_ranks(_wrapper, 2, original=original, what=what)
    # The root, and one of the units of one layer while it is inside; all copies are there by then.
    # A thread of gloo may still hold the other one.
    assert all(cost <= ROOT + 2 * LAYER + SMALL for cost in found), found
    # On the rank that only takes part, and in a load, nothing else is.
    if what != "all":
        assert max(found) >= ROOT


def _composable() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Wide()
    for unit in (model.inner, model.other, model):
        fully_shard(unit)
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _both(context: RankContext, *, full: bool, loads: bool) -> int:
    """Model and optimizer of the composable face, in memory."""
    model, optimizer = _composable()
    options = StateDictOptions(full_state_dict=full)
    get_state_dict(model, optimizer, options=options)  # what is done once
    there = [*tensors_in(dict(model.named_parameters())), *tensors_in(dict(optimizer.state))]
    if loads:
        one, two = get_state_dict(model, optimizer, options=options)
        given = {"model_state_dict": one, "optim_state_dict": two, "options": options}
        there += [*tensors_in(one), *tensors_in(two)]
        return above(there, lambda: set_state_dict(model, optimizer, **given))
    return above(there, lambda: dict(enumerate(get_state_dict(model, optimizer, options=options))))


@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_parts_of_the_composable_face_are_saved_as_they_are(*, loads: bool) -> None:
    found = on_ranks(_both, 2, full=False, loads=loads)
    assert all(cost <= SMALL for cost in found), found


@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_whole_states_of_the_composable_face_take_one_parameter_at_a_time(*, loads: bool) -> None:
    found = on_ranks(_both, 2, full=True, loads=loads)
    # A load makes two states per parameter anew, of which each of the two ranks has a half.
    bound = 2 * 6 * LAYER // 2 if loads else 0
    # Twice while it is put together; the backend may not yet have let go of the one before.
    assert all(cost <= bound + 4 * LAYER + SMALL for cost in found), found
