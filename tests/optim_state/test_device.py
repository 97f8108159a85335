"""Optimizer states on an accelerator: where values lie, and loads from host memory and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp import CPUOffload
from fsdp.engine.mesh import default_device
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.plain import batch, loss_of
from tests.fsdp.ranks import on_ranks
from tests.optim_state.running import (
    FULL,
    OPTIMIZERS,
    SHARDED,
    assert_equal,
    form,
    optimizer_for,
    params_of,
    wrapped,
)
from tests.optim_state.test_forms import chunk_of

pytestmark = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two accelerators"
)


def _step(model: FSDP, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    loss_of(model, batch(number, rank).to(default_device())).backward()
    optimizer.step()
    optimizer.zero_grad()


def _lies(
    context: RankContext, name: str, kind: str, *, offload: bool, on_host: bool, original: bool
) -> None:
    device = default_device()
    given: dict[str, Any] = {"use_orig_params": original, "device_id": device}
    if kind == "mesh":
        given["device_mesh"] = init_device_mesh(device.type, (context.world_size,))
    given["cpu_offload"] = CPUOffload(offload_params=on_host)
    if on_host:
        del given["device_id"]
    model = wrapped(**given)
    first = optimizer_for(model, name)
    for number in range(2):
        _step(model, first, number, context.rank)
    type_ = FULL if kind in ("full", "rank0") else SHARDED
    options = {"rank0_only": True} if kind == "rank0" else {}
    with form(model, type_, offload_to_cpu=offload, **options):
        found = FSDP.optim_state_dict(model, first)
        if kind != "rank0" or context.rank == 0:
            for entry in found["state"].values():
                for state, value in entry.items():
                    if state == "step":
                        assert value.device.type == "cpu"
                        continue
                    local = chunk_of(value) if type_ is SHARDED else value
                    wanted = "cpu" if offload or not local.numel() else device.type
                    assert local.device.type == wanted or not local.numel()
        second = optimizer_for(model, name)
        FSDP.optim_state_dict_to_load(model, second, found, load_directly=True)
    for param, entry in second.state.items():
        for state, value in entry.items():
            if state != "step":
                assert value.device == param.device
            else:
                assert value.device == first.state[param][state].device
    full = FSDP.optim_state_dict(model, first)
    assert_equal(FSDP.optim_state_dict(model, second)["state"], full["state"])
    _step(model, second, 2, context.rank)
    assert all(value.isfinite().all() for value in params_of(model).values())


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("offload", [True, False], ids=["offload", "stay"])
@pytest.mark.parametrize("kind", ["full", "rank0", "sharded", "mesh"])
def test_states_lie_where_they_should(
    kind: str, *, offload: bool, on_host: bool, original: bool
) -> None:
    on_ranks(
        _lies,
        2,
        device=default_device().type,
        name="adam",
        kind=kind,
        offload=offload,
        on_host=on_host,
        original=original,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_loads_on_an_accelerator(name: str) -> None:
    on_ranks(
        _lies,
        2,
        device=default_device().type,
        name=name,
        kind="full",
        offload=True,
        on_host=False,
        original=True,
    )
