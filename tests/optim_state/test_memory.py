"""What a save and a load of optimizer states take beside what goes in and comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.ranks import RankContext
from conformance.scenarios.live_bytes import metering
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_wrapper import ORIGINAL
from tests.optim_state.running import FULL, SHARDED, form
from tests.state_dict.test_sharded import LAYER, Inner, Peak, Wide

UNIT = 4 * LAYER  # the root, one state of it


def _bytes(state: dict[str, Any]) -> int:
    """Of all large tensors, chunks counted as what is here."""
    found = 0
    for entry in state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor) and value.dim():
                parts = value.local_shards() if hasattr(value, "local_shards") else [value]
                found += sum(getattr(p, "tensor", p).numel() * 4 for p in parts)
    return found


def _costs(context: RankContext, what: str, *, original: bool) -> int:
    """Bytes at the most beside parameters, states, input and result."""
    policy = ModuleWrapPolicy({Inner})
    model = FSDP(Wide(), auto_wrap_policy=policy, use_orig_params=original)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)  # three states
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    kind = SHARDED if what.endswith("chunks") else FULL
    options = {"offload_to_cpu": what != "save_stays"}
    if what.endswith("first"):
        options["rank0_only"] = True
    with form(model, kind, **options):
        found = FSDP.optim_state_dict(model, optimizer)  # also: what is done once
        with metering(torch.device("cpu")), Peak() as meter:
            _ = [param.sum() for param in model.parameters()]
            _ = [v.sum() for e in optimizer.state.values() for v in e.values()]
            base = meter.uncollected()
            if what.startswith("load"):
                _ = [chunk.sum() for chunk in _chunks(found)]
                base = meter.uncollected()
                meter.peak = 0
                result = FSDP.optim_state_dict_to_load(model, optimizer, found)
            else:
                del found
                meter.peak = 0
                result = FSDP.optim_state_dict(model, optimizer)
            return meter.peak - base - _bytes(result.get("state", {}))


def _chunks(found: dict[str, Any]) -> list[torch.Tensor]:
    values = [value for entry in found.get("state", {}).values() for value in entry.values()]
    return [
        getattr(part, "tensor", part)
        for value in values
        for part in (value.local_shards() if hasattr(value, "local_shards") else [value])
    ]


def _least(what: str, *, original: bool) -> list[int]:
    """On each rank, of three times: the backend lets go of what it has sent a moment later."""
    found = [on_ranks(_costs, 2, what=what, original=original) for _ in range(3)]
    return [min(costs) for costs in zip(*found, strict=True)]


SMALL = 4096  # counts of steps, reports of ranks


@ORIGINAL
@pytest.mark.parametrize("what", ["save", "save_first", "save_chunks"])
def test_a_save_gathers_one_state_of_one_unit_at_a_time(what: str, *, original: bool) -> None:
    # Whole, and this rank's part of it where parameters have to be put side by side; the backend
    # may not yet have let go of the one before.
    bound = 2 * UNIT + UNIT // 2 + SMALL
    assert all(cost <= bound for cost in _least(what, original=original))


@ORIGINAL
@pytest.mark.parametrize(("what", "layers"), [("load", 0), ("load_chunks", 4)])
def test_a_load_takes_one_state_of_one_parameter(what: str, layers: int, *, original: bool) -> None:
    # Twice while it is put together of chunks, and this rank's own; the backend may not yet have
    # let go of the one before.
    bound = layers * LAYER + LAYER + SMALL
    assert all(cost <= bound for cost in _least(what, original=original))


@ORIGINAL
def test_runs_from_the_first_rank_arrive_where_they_stay(*, original: bool) -> None:
    # What is sent is put together before the first rank has room for its own.
    found = _least("load_first", original=original)
    assert all(cost <= SMALL for cost in found), found


@ORIGINAL
def test_a_save_that_stays_takes_no_more_than_its_result(*, original: bool) -> None:
    # Beside the last states nothing more is to come, in whose place they could be gathered.
    found = _least("save_stays", original=original)
    assert all(cost <= SMALL for cost in found), found
