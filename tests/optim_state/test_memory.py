"""What a save and a load of optimizer states take beside what goes in and comes out."""

from __future__ import annotations

import pytest
import torch

from conformance.ranks import RankContext
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.optim_state.running import FULL, SHARDED, form
from tests.state_dict.peaks import LAYER, ROOT, SMALL, Inner, Wide, above


def _above(context: RankContext, what: str, *, original: bool, allowed: int) -> int:
    """Bytes at the most beside parameters, states, input and result."""
    policy = ModuleWrapPolicy({Inner})
    model = FSDP(Wide(), auto_wrap_policy=policy, use_orig_params=original)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)  # three states
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    there = [*model.parameters(), optimizer.state]
    kind = SHARDED if what.endswith("chunks") else FULL
    options = {"offload_to_cpu": what != "save_stays"}
    if what.endswith("first"):
        options["rank0_only"] = True
    with form(model, kind, **options):
        if what.startswith("save"):
            return above(lambda: there, lambda: FSDP.optim_state_dict(model, optimizer), allowed)
        given = FSDP.optim_state_dict(model, optimizer)
        return above(
            lambda: [*there, given],
            lambda: FSDP.optim_state_dict_to_load(model, optimizer, given),
            allowed,
        )


def _check(what: str, allowed: int, *, original: bool) -> None:
    found = on_ranks(_above, 2, what=what, original=original, allowed=allowed)
    assert all(cost <= allowed for cost in found), found


@ORIGINAL
@pytest.mark.parametrize("what", ["save", "save_first", "save_chunks"])
def test_a_save_gathers_one_state_of_one_unit_at_a_time(what: str, *, original: bool) -> None:
    # Whole, and this rank's part of it where parameters have to be put side by side.
    _check(what, ROOT + ROOT // 2 + SMALL, original=original)


@ORIGINAL
@pytest.mark.parametrize(("what", "halves"), [("load", 0), ("load_chunks", 5)])
def test_a_load_takes_one_state_of_one_parameter(what: str, halves: int, *, original: bool) -> None:
    # Twice while it is put together of chunks, and this rank's own.
    _check(what, halves * LAYER // 2 + SMALL, original=original)


@ORIGINAL
def test_runs_from_the_first_rank_arrive_where_they_stay(*, original: bool) -> None:
    # What is sent is put together before the first rank has room for its own.
    _check("load_first", SMALL, original=original)


@ORIGINAL
def test_a_save_that_stays_takes_no_more_than_its_result(*, original: bool) -> None:
    # Beside the last states nothing more is to come, in whose place they could be gathered.
    _check("save_stays", SMALL, original=original)
