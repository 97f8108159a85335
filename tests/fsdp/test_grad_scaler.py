"""All ranks step or none does, and the factor is the same on every rank."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.ranks import RankContext
from fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
    fully_shard,
)
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import Residual, batch, build, loss_of, optimizer_of, whole
from tests.fsdp.ranks import agreed, error_of, on_ranks

INF = float("inf")
Pair = namedtuple("Pair", "first second")
FACES = ("composable", "flat", "original")


def scaler_of(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler("cpu", **{"init_scale": 8.0, **options})


# Scaling


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_scaled_tensor_keeps_its_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scaled = scaler_of().scale(torch.full(shape, 3.0, dtype=dtype))
    assert (scaled.dtype, scaled.shape, scaled.unique().tolist()) == (dtype, shape, [24.0])


def test_nested_outputs_keep_their_structure() -> None:
    one = torch.ones(())
    scaled = scaler_of().scale([one, (one, [one]), Pair(one, (one,))])
    assert scaled == [8.0, (8.0, [8.0]), Pair(8.0, (8.0,))]
    assert [type(each) for each in scaled] == [torch.Tensor, tuple, Pair]
    assert list(scaler_of().scale(iter([one]))) == [8.0]


@pytest.mark.parametrize("wrong", [1.0, None, "text", [1.0], {"loss": torch.ones(())}])
def test_only_tensors_are_scaled(wrong: Any) -> None:
    kind, text = error_of(lambda: scaler_of().scale(wrong))
    assert kind == "ValueError"
    assert "outputs must be a Tensor or an iterable of Tensors" in text


def test_a_tensor_without_values_is_refused() -> None:
    found = error_of(lambda: scaler_of().scale(torch.ones(1, device="meta")))
    assert found == ["AssertionError", "Expected supported device, got meta"]


def test_the_device_is_the_current_one_and_the_defaults_are_torchs() -> None:
    # torch that is built for one names it also on a host that has none
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    scaler = ShardedGradScaler()
    assert scaler._device == ("cpu" if accelerator is None else accelerator.type)
    assert scaler.is_enabled()
    assert scaler.state_dict() == {
        "scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    assert scaler.process_group is None


def test_a_disabled_scaler_does_nothing() -> None:
    scaler, param = scaler_of(enabled=False), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    assert scaler.scale("anything") == "anything"
    param.grad = torch.full((2,), INF)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [-INF, -INF]
    assert scaler.get_scale() == 1.0


# Deciding


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0),
    # These unscale by themselves, and the scaler only tells them what it found.
    "fused_sgd": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=1.0, fused=True),
}


def _one_finds(
    context: RankContext, kind: str, values: list[float | None], *, explicit: bool
) -> list[Any]:
    """Rank r's gradient is ``values[r]``; whether the parameter moved, and the factor after."""
    scaler, param = scaler_of(), nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[kind]([param])
    scaler.scale(torch.ones(()))
    value = values[context.rank]
    param.grad = None if value is None else torch.tensor([8.0, value, 8.0])
    if explicit:
        scaler.unscale_(optimizer)
        if value is not None:
            assert param.grad[0] == 1.0
    result = scaler.step(optimizer)
    scaler.update()
    assert result is None
    return [not torch.equal(param, torch.ones(3)), scaler.get_scale()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale"])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_one_rank_that_overflows_stops_all(kind: str, bad: float, *, explicit: bool) -> None:
    values = [8.0, bad]
    assert agreed(_one_finds, 2, kind=kind, values=values, explicit=explicit) == [False, 4.0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale"])
def test_all_ranks_step_if_none_overflows(kind: str, *, explicit: bool) -> None:
    values = [8.0, 8.0]
    assert agreed(_one_finds, 2, kind=kind, values=values, explicit=explicit) == [True, 8.0]


def test_a_rank_without_gradients_decides_too() -> None:
    assert on_ranks(_one_finds, 2, kind="sgd", values=[None, INF], explicit=False) == (
        [False, 4.0],
        [False, 4.0],
    )
    assert on_ranks(_one_finds, 2, kind="sgd", values=[None, 8.0], explicit=False) == (
        [False, 8.0],
        [True, 8.0],
    )


def _own_group(context: RankContext) -> list[Any]:
    """Ranks 0 and 1 decide together, and ranks 2 and 3."""
    groups = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rank"))
    scaler, param = scaler_of(process_group=groups.get_group("rank")), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((1,), INF if context.rank == 3 else 8.0)
    scaler.step(optimizer)
    scaler.update()
    return [param.item() == 0.0, scaler.get_scale()]


def test_only_the_group_decides() -> None:
    found = on_ranks(_own_group, 4)
    assert found == ([True, 8.0], [True, 8.0], [False, 4.0], [False, 4.0])


def _mixed_places(context: RankContext) -> list[Any]:
    """Float16, float64 and sparse float16 gradients, of which each rank has others."""
    scaler = scaler_of()
    params = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float16, torch.float64)]
    table = nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
    optimizer = torch.optim.SGD([*params, table], lr=1.0)
    scaler.scale(torch.ones(()))
    params[context.rank].grad = torch.full_like(params[context.rank], 16.0)
    rows = torch.tensor([[1, 1]])
    values = torch.full((2, 2), 12.0, dtype=torch.float16)
    with torch.sparse.check_sparse_tensor_invariants():
        table.grad = torch.sparse_coo_tensor(rows, values, (3, 2))
    scaler.unscale_(optimizer)
    seen = [
        str(p.grad.to_dense().tolist())
        for p in optimizer.param_groups[0]["params"]
        if p.grad is not None
    ]
    return [seen, scaler.get_scale()]


def test_gradients_of_any_dtype_and_layout_are_unscaled() -> None:
    wanted = ["[2.0, 2.0, 2.0]", "[[0.0, 0.0], [3.0, 3.0], [0.0, 0.0]]"]
    assert agreed(_mixed_places, 2) == [wanted, 8.0]


def _duplicates(context: RankContext, rows: list[float]) -> list[Any]:
    """Rank 1's gradient of one row of a table is the sum of ``rows``, each finite in float16."""
    scaler, table = scaler_of(), nn.Parameter(torch.ones(3, 1, dtype=torch.float16))
    optimizer = torch.optim.SGD([table], lr=1.0)
    scaler.scale(torch.ones(()))
    values = torch.tensor(rows if context.rank else [8.0], dtype=torch.float16).view(-1, 1)
    indices = torch.ones(1, len(values), dtype=torch.long)
    with torch.sparse.check_sparse_tensor_invariants():
        table.grad = torch.sparse_coo_tensor(indices, values, (3, 1))
    scaler.step(optimizer)
    scaler.update()
    return [table[1].item(), scaler.get_scale()]


def test_the_sum_of_duplicate_rows_is_checked() -> None:
    assert agreed(_duplicates, 2, rows=[60000.0, 60000.0]) == [1.0, 4.0]


def test_duplicate_rows_are_added_in_float32() -> None:
    found = on_ranks(_duplicates, 2, rows=[60000.0, 60000.0, -60000.0])
    assert found == ([0.0, 8.0], [-7500.0, 8.0])  # 1 - 7500, rounded to float16


# The factor


def _grows(context: RankContext) -> list[float]:
    scaler = scaler_of(growth_interval=2, growth_factor=4.0, backoff_factor=0.25)
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    found = []
    for bad in (False, False, False, True, False, False):
        scaler.scale(torch.ones(()))
        param.grad = torch.full((1,), INF if bad and context.rank == 1 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    scaler.update(16.0)
    found.append(scaler.get_scale())
    scaler.update(torch.full((1,), 2.0))
    found.append(scaler.get_scale())
    return found


def test_the_factor_grows_after_the_interval_and_backs_off_at_once() -> None:
    assert agreed(_grows, 2) == [8.0, 32.0, 32.0, 8.0, 8.0, 32.0, 16.0, 2.0]


def _near_the_largest(context: RankContext) -> float:
    del context
    scaler, param = scaler_of(init_scale=3e38, growth_interval=1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.ones(1)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_the_factor_stays_finite() -> None:
    assert agreed(_near_the_largest, 2) == pytest.approx(3e38)


def _two_optimizers(context: RankContext) -> list[Any]:
    """Each is judged by its own gradients; the factor by all of them."""
    scaler = scaler_of()
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in params]
    scaler.scale(torch.ones(()))
    for index, param in enumerate(params):
        param.grad = torch.full((1,), INF if (index, context.rank) == (0, 1) else 8.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return [[p.item() for p in params], scaler.get_scale()]


def test_optimizers_are_judged_one_by_one() -> None:
    assert agreed(_two_optimizers, 2) == [[1.0, 0.0], 4.0]


def _misused(context: RankContext) -> list[list[str]]:
    del context
    scaler, param = scaler_of(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    found = [error_of(lambda: scaler.unscale_(optimizer))]
    scaler.scale(torch.ones(()))
    param.grad = torch.ones(1)
    found.append(error_of(scaler.update))
    scaler.unscale_(optimizer)
    found.append(error_of(lambda: scaler.unscale_(optimizer)))
    scaler.step(optimizer)
    found.append(error_of(lambda: scaler.unscale_(optimizer)))
    found.append(error_of(lambda: scaler.step(optimizer)))
    found.append(error_of(lambda: scaler.update(torch.ones(2))))
    return found


def test_misuse_is_named() -> None:
    wanted = [
        ("AssertionError", "Attempted unscale_ but _scale is None"),
        ("AssertionError", "No inf checks were recorded prior to update."),
        ("RuntimeError", "unscale_() has already been called on this optimizer"),
        ("RuntimeError", "unscale_() is being called after step()."),
        ("RuntimeError", "step() has already been called since the last update()."),
        ("AssertionError", "new_scale should be a float or a 1-element"),
    ]
    for (kind, text), (wanted_kind, fragment) in zip(agreed(_misused, 1), wanted, strict=True):
        assert kind == wanted_kind
        assert fragment in text


# Training


def make(face: str, **options: Any) -> nn.Module:
    model = build()
    if face == "composable":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "FSDP is switching")
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Residual}),
            use_orig_params=face == "original",
            **options,
        )


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def train(model: nn.Module, rank: int, scaler: Any, bad: tuple[int, int]) -> list[float]:
    """Four steps; in one of them, one rank's gradients overflow. The factors after each."""
    optimizer = optimizer_of(model.parameters(), "sgd")
    factors = []
    for step in range(4):
        loss = loss_of(model, batch(step, rank))
        scaler.scale(loss * INF if (step, rank) == bad else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        factors.append(scaler.get_scale())
    return factors


def train_plain(world: int, bad: tuple[int, int]) -> tuple[nn.Module, list[float]]:
    model, scaler = build(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = optimizer_of(model.parameters(), "sgd")
    factors = []
    for step in range(4):
        for rank in range(world):
            loss = loss_of(model, batch(step, rank)) / world
            scaler.scale(loss * INF if (step, rank) == bad else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        factors.append(scaler.get_scale())
    return model, factors


def _trains(context: RankContext, face: str, options: dict[str, Any], tolerance: float) -> None:
    bad = (2, context.world_size - 1)
    model = make(face, **options)
    factors = train(model, context.rank, scaler_of(growth_interval=2), bad)
    plain, wanted = train_plain(context.world_size, bad)
    assert factors == wanted == [8.0, 16.0, 8.0, 8.0]
    got = whole_parameters(model)
    assert list(got) == [name for name, _ in plain.named_parameters()]
    for name, param in plain.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_trains_like_the_plain_scaler(face: str, world: int) -> None:
    on_ranks(_trains, world, face=face, options={}, tolerance=2e-6)


@pytest.mark.parametrize("face", ["flat", "original"])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"cpu_offload": CPUOffload(offload_params=True)}, 2e-6),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, 2e-6),
        ({"mixed_precision": MixedPrecision(param_dtype=torch.float16)}, 5e-3),
    ],
    ids=["offload", "replicas", "float16"],
)
def test_it_works_with_the_options(face: str, options: dict[str, Any], tolerance: float) -> None:
    on_ranks(_trains, 2, face=face, options=options, tolerance=tolerance)


def _hybrid(context: RankContext, face: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    _trains(context, face, options, 2e-6)


@pytest.mark.parametrize("face", ["flat", "original"])
def test_replicas_of_shards_decide_together(face: str) -> None:
    on_ranks(_hybrid, 4, face=face)


def _few_elements(context: RankContext) -> list[Any]:
    """Rank 0 holds both elements of the only parameter, and the others none."""
    scaler = scaler_of()
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model = FullyShardedDataParallel(model, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for factor in (INF, 1.0):
        loss = model(torch.ones(1, 2)).sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    (weight,) = whole_parameters(model).values()
    return [weight.flatten().tolist(), scaler.get_scale()]


def test_ranks_without_elements_follow() -> None:
    assert agreed(_few_elements, 3) == [[0.0, 0.0], 4.0]
