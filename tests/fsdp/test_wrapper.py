"""The wrapper face trains like one unsharded model, in every strategy and setting."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from conformance.ranks import RankContext
from fsdp.wrap import ModuleWrapPolicy
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from fsdp.wrapper_options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from tests.fsdp.plain import Residual, batch, build, loss_of, optimizer_of, train_plain
from tests.fsdp.ranks import agreed, on_ranks

POLICY = ModuleWrapPolicy({Residual})
ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])


def wrapped(kind: Any = None, **options: Any) -> FSDP:
    model = build(**({} if kind is None else {"kind": kind}))
    options.setdefault("auto_wrap_policy", POLICY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "FSDP is switching")
        return FSDP(model, **options)


def train(model: FSDP, rank: int, *, micro: int = 1) -> list[float]:
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(3):
        for part in range(micro):
            if part < micro - 1:
                with model.no_sync():
                    loss = loss_of(model, batch(step, rank, part))
                    loss.backward()
            else:
                loss = loss_of(model, batch(step, rank, part))
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def agrees(model: FSDP, plain: nn.Module, tolerance: float = 2e-6) -> None:
    with FSDP.summon_full_params(model, writeback=False):
        got = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert list(got) == [name for name, _ in plain.named_parameters()]
    for name, want in plain.named_parameters():
        torch.testing.assert_close(
            got[name],
            want.detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicas": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "no_prefetch": {"backward_prefetch": None, "limit_all_gathers": False},
    "forward_prefetch": {"forward_prefetch": True},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "one_unit": {"auto_wrap_policy": None},
    "reduce": {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
    "device_id": {"device_id": torch.device("cpu")},
}


def _trains(context: RankContext, name: str, *, original: bool, micro: int) -> None:
    model = wrapped(use_orig_params=original, **OPTIONS[name])
    plain = build()
    losses = train(model, context.rank, micro=micro)
    wanted = train_plain(plain, context.world_size, micro=micro)
    agrees(model, plain)
    if context.rank == 0:
        torch.testing.assert_close(losses, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", OPTIONS)
@ORIGINAL
@pytest.mark.parametrize("micro", [1, 2])
def test_it_trains_like_the_oracle(name: str, *, original: bool, micro: int) -> None:
    on_ranks(_trains, 2, name=name, original=original, micro=micro)


def _backward(context: RankContext, prefetch: BackwardPrefetch | None) -> list[str]:
    """What backward gathers by itself, gathers ahead, and reduces: root, then blocks 1 and 0."""
    model = wrapped(backward_prefetch=prefetch)
    loss = loss_of(model, batch(0, context.rank))
    events: list[str] = []
    for name, unit in zip("r01", FSDP.fsdp_modules(model), strict=True):
        (group,) = unit._state.groups
        _record(group, name, events)
    loss.backward()
    return events


def _record(group: Any, name: str, events: list[str]) -> None:
    unshard, reduce = group.unshard, group._reduce

    def recorded(**options: Any) -> None:
        if group.sharded_state.name == "SHARDED" and not group.pending:
            events.append(("gather" if options.get("phase") is None else "prefetch") + name)
        unshard(**options)

    def reduced(**options: Any) -> None:
        events.append(f"reduce{name}")
        reduce(**options)

    group.unshard, group._reduce = recorded, reduced


@pytest.mark.parametrize(
    ("prefetch", "wanted"),
    [
        (BackwardPrefetch.BACKWARD_PRE, "prefetch1 prefetch0 reduce1 reduce0 reducer"),
        (BackwardPrefetch.BACKWARD_POST, "gather1 reduce1 prefetch0 reduce0 reducer"),
        (None, "gather1 reduce1 gather0 reduce0 reducer"),
    ],
)
def test_backward_gathers_ahead_when_it_is_told_to(
    prefetch: BackwardPrefetch | None, wanted: str
) -> None:
    assert agreed(_backward, 2, prefetch=prefetch) == wanted.split()


@pytest.mark.parametrize("world", [1, 3])
@ORIGINAL
def test_it_trains_on_any_number_of_ranks(world: int, *, original: bool) -> None:
    on_ranks(_trains, world, name="default", original=original, micro=2)
