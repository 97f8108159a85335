"""The same training on an accelerator, where streams and events are real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp.engine.streams import make_streams
from tests.fsdp.plain import batch, build, busy, train_plain, train_sharded
from tests.fsdp.ranks import on_ranks
from tests.fsdp.test_training import shard_blocks

pytestmark = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two accelerators"
)

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"reshard_after_forward": False},
    "reshard": {"reshard_after_forward": True},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload_unpinned": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bf16_reduced": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
}


def _close(model: nn.Module, plain: nn.Module, tolerance: float) -> None:
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        local = got.full_tensor() if got.device.type != "cpu" else _gathered(got)
        torch.testing.assert_close(
            local.cpu(), want.detach(), rtol=tolerance, atol=tolerance, msg=name
        )


def _gathered(param: torch.Tensor) -> torch.Tensor:
    """An offloaded DTensor has no backend on its own device; move its local part."""
    local = param.to_local().to(param.device_mesh.device_type)
    moved = type(param.data).from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )
    return moved.full_tensor()


def _trains(context: RankContext, variant: str) -> list[float]:
    model = shard_blocks(build(blocks=4, hidden=64), **VARIANTS[variant])
    losses = train_sharded(model, context.rank, steps=4, kind="sgd")
    plain = build(blocks=4, hidden=64)
    train_plain(plain, context.world_size, steps=4, kind="sgd")
    _close(model, plain, 0.05 if "bf16" in variant else 1e-3)
    return losses


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_equals_the_unsharded_model(variant: str) -> None:
    kind = torch.accelerator.current_accelerator().type
    on_ranks(_trains, 2, device=kind, variant=variant)


def _single_parameter_units(context: RankContext) -> None:
    """Groups of one parameter are views of the gather: freed behind the kernels that read them."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    torch.manual_seed(0)
    model = shard_blocks(Wide())
    torch.manual_seed(0)
    plain = Wide().to(context.device)
    for step in range(10):
        x = [batch(step, rank, dim=512).to(context.device) for rank in range(2)]
        model(x[context.rank]).pow(2).sum().backward()
        for part in x:
            (plain(part).pow(2).sum() / 2).backward()
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-3, atol=1e-4)
        model.zero_grad()
        plain.zero_grad()


def test_views_of_the_gather_outlive_the_kernels_that_read_them() -> None:
    kind = torch.accelerator.current_accelerator().type
    on_ranks(_single_parameter_units, 2, device=kind)


def _memory(context: RankContext) -> list[int]:
    """Bytes in use after step 3 and after step 30."""
    model = shard_blocks(build(blocks=4, hidden=64))
    found = []
    for steps in (3, 27):
        train_sharded(model, context.rank, steps=steps, kind="sgd")
        torch.accelerator.synchronize()
        found.append(torch.accelerator.memory_allocated())
    return found


def test_memory_does_not_grow() -> None:
    kind = torch.accelerator.current_accelerator().type
    for early, late in on_ranks(_memory, 2, device=kind):
        assert late <= early


class _Late(nn.Module):
    """Gives the device much to do, then a tensor of `numel` elements that nobody keeps."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        much = busy(x.device)
        torch.full((self.numel,), 7.0, device=x.device).add_(much[0, 0])
        return x


def _first_gather(context: RankContext) -> None:
    """The buffer of a first gather may get the memory of a tensor that is yet to be written."""
    for _ in range(3):
        torch.manual_seed(0)
        plain = nn.Sequential(_Late(256 * 256), nn.Linear(256, 256, bias=False)).to(context.device)
        torch.manual_seed(0)
        model = nn.Sequential(_Late(256 * 256), nn.Linear(256, 256, bias=False))
        fully_shard(model[1])
        fully_shard(model)
        x = torch.ones(4, 256, device=context.device)
        torch.testing.assert_close(model(x), plain[1](x))


def test_a_first_gather_is_not_overtaken_by_kernels_given_before() -> None:
    kind = torch.accelerator.current_accelerator().type
    on_ranks(_first_gather, 2, device=kind)


def _streams_in_use(context: RankContext) -> None:
    """Streams of another device than the current one."""
    mine = torch.accelerator.current_device_index()
    other = (mine + 1) % torch.accelerator.device_count()
    streams = make_streams(torch.device(context.device.type, other))
    gather, reduce = streams.gather.stream_id, streams.reduce.stream_id

    def now() -> tuple[int, int]:
        current = torch.accelerator.current_stream(other).stream_id
        return torch.accelerator.current_device_index(), current

    before = now()

    with streams.on(streams.gather):
        assert now() == (other, gather)
        with streams.on(streams.gather), streams.on(streams.reduce):
            assert now() == (other, reduce)
        assert now() == (other, gather)
        with pytest.raises(KeyError), streams.on(streams.reduce):
            raise KeyError
        assert now() == (other, gather)
    assert now() == before


def test_a_stream_is_current_in_its_body_only() -> None:
    on_ranks(_streams_in_use, 2, device=torch.accelerator.current_accelerator().type)
