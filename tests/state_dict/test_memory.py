"""What saving and loading take beside shards, input and result, for both faces. Two ranks.

Sharded saves and loads of the wrapper are in `test_sharded.py`, its optimizer's in
`optim_state/test_memory.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from conformance.ranks import RankContext
from fsdp import FullStateDictConfig, fully_shard, get_state_dict, set_state_dict
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.ranks import on_ranks
from tests.state_dict import cells
from tests.state_dict.peaks import LAYER, ROOT, SMALL, Inner, Wide, above

NESTED = ROOT + LAYER + SMALL
"""The root, and a unit while the recursion is inside it."""


def _wrapper(context: RankContext, *, original: bool, what: str) -> int:
    policy = ModuleWrapPolicy({Inner})
    model = cells.wrap(Wide(), nested=False, auto_wrap_policy=policy, use_orig_params=original)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=what == "first")
    shards = [group.shard.data for unit in FSDP.fsdp_modules(model) for group in unit._state.groups]
    if what == "load":
        state = cells.saved(model, cells.FULL, config)
        return above(lambda: [*shards, state], lambda: cells.load(model, cells.FULL, state), NESTED)
    return above(lambda: shards, lambda: dict(cells.saved(model, cells.FULL, config)), NESTED)


@cells.grid(original=cells.ORIGINAL, what={"first": "first", "all": "all", "load": "load"})
def test_a_full_state_takes_the_units_that_the_recursion_is_inside_of(
    *, original: bool, what: str
) -> None:
    found = on_ranks(_wrapper, 2, original=original, what=what)
    # All copies are there by then.
    assert all(cost <= NESTED for cost in found), found
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


def _both(context: RankContext, *, full: bool, loads: bool, allowed: int) -> int:
    """Model and optimizer of the composable face, in memory."""
    model, optimizer = _composable()
    options = StateDictOptions(full_state_dict=full)

    def there() -> list[Any]:
        return [*model.parameters(), optimizer.state]

    if loads:
        one, two = get_state_dict(model, optimizer, options=options)
        given = {"model_state_dict": one, "optim_state_dict": two, "options": options}
        call = partial(set_state_dict, model, optimizer, **given)
        return above(lambda: [*there(), one, two], call, allowed)
    return above(there, lambda: [*get_state_dict(model, optimizer, options=options)], allowed)


@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_parts_of_the_composable_face_are_saved_as_they_are(*, loads: bool) -> None:
    found = on_ranks(_both, 2, full=False, loads=loads, allowed=SMALL)
    assert all(cost <= SMALL for cost in found), found


@pytest.mark.parametrize("loads", [False, True], ids=["save", "load"])
def test_whole_states_of_the_composable_face_take_one_parameter_at_a_time(*, loads: bool) -> None:
    # Twice while it is put together. A load takes a copy of it apart, beside the two states per
    # parameter that it makes anew, of which each of the two ranks has a half.
    allowed = 3 * LAYER + 2 * 6 * LAYER // 2 if loads else 2 * LAYER
    allowed += SMALL
    found = on_ranks(_both, 2, full=True, loads=loads, allowed=allowed)
    assert all(cost <= allowed for cost in found), found
