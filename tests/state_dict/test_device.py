"""States on an accelerator: where values lie, and loads from host memory and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
)
from fsdp.engine.mesh import default_device
from tests.fsdp.ranks import on_ranks
from tests.state_dict import cells

pytestmark = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two accelerators"
)

CONFIGS = {
    "full": FullStateDictConfig,
    "local": LocalStateDictConfig,
    "sharded": ShardedStateDictConfig,
    "mesh": ShardedStateDictConfig,
}


def _round_trip(context: RankContext, form: str, *, offload: bool, shards_on_host: bool) -> None:
    device = default_device()
    given: dict[str, Any] = {"device_id": device}
    if form == "mesh":
        given["device_mesh"] = init_device_mesh(device.type, (2,))
    given["cpu_offload"] = CPUOffload(offload_params=shards_on_host)
    if shards_on_host:
        del given["device_id"]
    kind = cells.KINDS[form.replace("mesh", "sharded")]
    model = cells.wrap(cells.plain(buffers=True), **given)
    state = cells.saved(model, kind, CONFIGS[form](offload_to_cpu=offload))
    on_host = offload or (shards_on_host and form == "local")
    for name, value in cells.locals_of(state).items():
        if name.endswith(("weight", "_flat_param")) and value.numel():
            assert value.device.type == ("cpu" if on_host else device.type), name
    if form in ("local", "sharded"):
        value = state["blocks.0._flat_param" if form == "local" else "inp.weight"]
        places = [str(each.placement) for each in value.metadata().shards_metadata]
        wanted = "cpu" if on_host else device.type
        assert [place.split(":")[1] for place in places] == [
            f"{rank}/{wanted}" for rank in range(2)
        ]
    if form == "local":
        state = {
            name: value.clone() if type(value) is torch.Tensor else value
            for name, value in state.items()
        }
    else:
        cells.spoil(model)
    cells.load(model, kind, state)
    for name, want in cells.plain().named_parameters():
        assert torch.equal(cells.whole(model)[name].cpu(), want.detach()), name


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offload"])
@pytest.mark.parametrize("shards_on_host", [False, True], ids=["device", "host"])
def test_values_lie_where_they_should_and_load_back(
    form: str, *, offload: bool, shards_on_host: bool
) -> None:
    kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    on_ranks(_round_trip, 2, device=kind, form=form, offload=offload, shards_on_host=shards_on_host)


def _two_backends(context: RankContext) -> None:
    device = default_device()
    backends = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    group = dist.new_group([0, 1], backend=backends)
    model = cells.wrap(cells.plain(), process_group=group, device_id=device)
    for offload in (False, True):
        state = cells.saved(model, cells.SHARDED, ShardedStateDictConfig(offload_to_cpu=offload))
        cells.spoil(model)
        cells.load(model, cells.SHARDED, state)
        for name, want in cells.plain().named_parameters():
            assert torch.equal(cells.whole(model)[name].cpu(), want.detach()), name


def test_a_group_of_several_backends_loads_from_either_memory() -> None:
    kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    on_ranks(_two_backends, 2, device=kind, fresh=True)


def _offloaded_on_host(context: RankContext) -> bool:
    host = torch.device("cpu")  # else the accelerator computes
    offload = CPUOffload(offload_params=True)
    model = cells.wrap(cells.plain(), cpu_offload=offload, device_id=host)
    for kind in cells.KINDS.values():
        state = cells.saved(model, kind)
        held = [each for value in state.values() for each in cells.held(value)]
        assert held
        assert not any(each.is_pinned() for each in held)
    return True


def test_ranks_that_compute_on_the_host_pin_nothing_beside_an_accelerator() -> None:
    assert on_ranks(_offloaded_on_host, 2) == (True, True)
