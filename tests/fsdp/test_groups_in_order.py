"""Which groups are gathered ahead in backward, and how many reductions are in flight."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from conformance.ranks import RankContext
from fsdp import FSDPMeshInfo, ShardPlacementResult, fully_shard
from fsdp.engine.buffer import Buffer
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import BackwardPrefetch
from tests.fsdp.plain import DIM, Residual, Stack, batch, build, loss_of
from tests.fsdp.ranks import agreed
from tests.fsdp.test_training import shard_blocks
from tests.fsdp.test_wrapper import POLICY, _record


def _from_the_first(context: RankContext) -> list[str]:
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(Residual(), Residual()),
        auto_wrap_policy=POLICY,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    )
    loss = loss_of(model, batch(0, context.rank))
    events: list[str] = []
    for name, unit in enumerate(FSDP.fsdp_modules(model)[1:]):
        _record(unit._state.groups[0], str(name), events)
    loss.backward()
    return events


def test_the_first_unit_of_all_is_gathered_ahead_as_well() -> None:
    assert agreed(_from_the_first, 2) == ["gather1", "reduce1", "prefetch0", "reduce0"]


def _two_groups(context: RankContext) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    info = FSDPMeshInfo(mesh["two"], shard_mesh_dim=0)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    for layer in model:
        fully_shard(
            layer,
            mesh=mesh["one"],
            reshard_after_forward=True,
            shard_placement_fn=lambda p: (
                ShardPlacementResult(Shard(0), info) if p.ndim == 1 else None
            ),
        )
    fully_shard(model, mesh=mesh["one"])
    loss = loss_of(model, batch(0, context.rank))
    events: list[str] = []
    for name, layer in enumerate(model):
        for letter, group in zip("ab", fully_shard.state(layer).groups, strict=True):
            _record(group, f"{name}{letter}", events)
    loss.backward()
    return events


def test_all_groups_of_the_unit_before_are_gathered_ahead_and_no_other() -> None:
    events = agreed(_two_groups, 2)
    first = next(n for n, event in enumerate(events) if event.startswith("reduce2"))
    ahead = ["prefetch1b", "prefetch1a", "prefetch0b", "prefetch0a"]
    assert [event for event in events if event.startswith("prefetch")] == ahead
    assert [event for event in events[:first] if event.startswith("prefetch")] == ahead[:2]


def _peak(context: RankContext, blocks: int) -> int:
    """The most bytes that are behind the engine's buffers during a backward."""
    buffers: list[Buffer] = []
    held: list[int] = []
    usual = Buffer.allocate

    def watched(buffer: Buffer) -> None:
        usual(buffer)
        if buffer not in buffers:
            buffers.append(buffer)
        held.append(sum(each.data.untyped_storage().nbytes() for each in buffers))

    model = shard_blocks(build(Stack, blocks=blocks), reshard_after_forward=True)
    loss_of(model, batch(0, context.rank)).backward()
    loss = loss_of(model, batch(0, context.rank))
    Buffer.allocate = watched  # type: ignore[method-assign]
    try:
        loss.backward()
    finally:
        Buffer.allocate = usual  # type: ignore[method-assign]
    return max(held)


def test_the_memory_of_a_backward_does_not_grow_with_the_units() -> None:
    assert agreed(_peak, 2, blocks=3) == agreed(_peak, 2, blocks=6)
