"""`FullyShardedDataParallel` over one dim of a mesh, and tensor parallelism over the other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from conformance.ranks import RankContext
from fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from tests.fsdp.parallel import (
    Block,
    Net,
    assert_equal,
    data_rank,
    parallel,
    square,
    train,
    train_plain,
    whole_parameters,
    wrapped,
)
from tests.fsdp.plain import batch, build, loss_of, optimizer_of
from tests.fsdp.ranks import agreed, error_of, named_on_every_rank, on_ranks

LONG = pytest.mark.long
KINDS = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicas": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "no_prefetch": {"backward_prefetch": None, "limit_all_gathers": False},
    "bf16": {"mixed_precision": LOW},
}

ROUNDING = {True: 5e-6, False: 1e-4}
"""On the CPU, which the plain model computes on too, and where other kernels compute."""


def _trained(
    context: RankContext,
    *,
    options: str,
    original: bool,
    micro: int,
    sizes: list[int],
) -> list[Any]:
    names = ("dp", "tp") if len(sizes) == 2 else ("replicate", "shard", "tp")
    given = dict(OPTIONS.get(options, {}))
    if options in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        given["sharding_strategy"] = ShardingStrategy[options]
    mesh = square(sizes, names, context.device.type)
    rank, world = data_rank(context, mesh), mesh.size() // mesh.size(mesh.ndim - 1)
    model, plain = wrapped(mesh, use_orig_params=original, **given), build(Net)
    tolerance = 2e-2 if options == "bf16" else ROUNDING[context.device.type == "cpu"]
    got, _ = train(model, rank, micro=micro)
    want, _ = train_plain(plain, world, rank, micro=micro)
    assert got == pytest.approx(want, rel=tolerance, abs=tolerance)
    assert_equal(model, plain, tolerance)
    kinds = {type(p).__name__ for p in model.parameters()}
    return [sorted(kinds), [round(norm, 6) for norm in got[1::2]]]


@KINDS
@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize(
    "options", ["full", *(pytest.param(name, marks=LONG) for name in list(OPTIONS)[1:])]
)
def test_losses_norms_and_parameters_are_those_of_the_plain_model(
    *, options: str, micro: int, original: bool
) -> None:
    given = {"options": options, "micro": micro, "original": original, "sizes": [2, 2]}
    kinds, norms = agreed(_trained, 4, **given)
    assert kinds == ["Parameter"]
    assert len(norms) == 2


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
@KINDS
@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "bf16"])
@pytest.mark.parametrize("sizes", [[1, 2], [2, 1], [2, 2]], ids=str)
def test_the_same_holds_on_accelerators(*, sizes: list[int], options: str, original: bool) -> None:
    world = math.prod(sizes)
    if torch.accelerator.device_count() < world:
        pytest.skip(f"needs {world} accelerators")
    kind = torch.accelerator.current_accelerator().type
    given = {"options": options, "micro": 2, "original": original, "sizes": sizes}
    agreed(_trained, world, fresh=True, device=kind, **given)


@LONG
@KINDS
@pytest.mark.parametrize("options", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_replicas_of_shards_train_beside_tensor_parallelism_too(
    *, options: str, original: bool
) -> None:
    given = {"options": options, "micro": 2, "original": original, "sizes": [2, 2, 2]}
    agreed(_trained, 8, **given)


def _norms(context: RankContext, norm_type: float, options: str) -> list[float]:
    mesh = square()
    model, plain = wrapped(mesh, **OPTIONS[options]), build(Net)
    loss_of(model, batch(0, data_rank(context, mesh))).backward()
    for rank in range(2):
        (loss_of(plain, batch(0, rank)) / 2).backward()
    got = model.clip_grad_norm_(0.01, norm_type).item()
    after = model.clip_grad_norm_(1e9, norm_type).item()
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type).item()
    assert got == pytest.approx(want, rel=1e-5)
    assert after == pytest.approx(0.01, rel=1e-3)
    return [got, after]


@LONG
@pytest.mark.parametrize("options", ["full", pytest.param("replicas", marks=LONG)])
@pytest.mark.parametrize(
    "norm_type", [pytest.param(1.0, marks=LONG), pytest.param(3.0, marks=LONG), float("inf")]
)
def test_a_norm_counts_every_element_once(norm_type: float, options: str) -> None:
    agreed(_norms, 4, norm_type=norm_type, options=options)


# Whole parameters


def _summoned(context: RankContext, *, original: bool) -> list[str]:
    mesh = square()
    model, plain = wrapped(mesh, use_orig_params=original), build(Net)
    for unit in (model, plain):
        unit.apply(lambda module: isinstance(module, nn.Linear) and module.bias.data.fill_(2.5))
    assert_equal(model, plain, 0)
    with FSDP.summon_full_params(model):
        seen = [
            f"{name}: {tuple(p.shape)} {getattr(p, 'placements', 'plain')}"
            for name, p in model.named_parameters()
            if name.startswith("blocks.0")
        ]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        # What replaces a parameter may be whole, as that of the plain model is.
        other = torch.full((10,), 7.0)
        model.blocks[0].module.up.bias = nn.Parameter(other)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2)
        plain.blocks[0].up.bias.fill_(7)
    assert_equal(model, plain, 0)
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        names = [name for name, _ in model.named_parameters()]
    assert ("blocks.0.up.weight" in names) or context.rank > 1
    assert_equal(model, plain, 0)
    return seen


@LONG
@KINDS
def test_a_summon_shows_what_tensor_parallelism_has_made(*, original: bool) -> None:
    assert agreed(_summoned, 4, original=original) == [
        "blocks.0.up.weight: (10, 10) (Shard(dim=0),)",
        "blocks.0.up.bias: (10,) (Shard(dim=0),)",
        "blocks.0.down.weight: (10, 10) (Shard(dim=1),)",
        "blocks.0.down.bias: (10,) (Replicate(),)",
        "blocks.0.norm.weight: (10,) (Replicate(),)",
        "blocks.0.norm.bias: (10,) (Replicate(),)",
    ]


def _gradients(context: RankContext, *, low: bool) -> list[str]:
    mesh = square()
    given = {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)} if low else {}
    model, plain = wrapped(mesh, use_orig_params=True, **given), build(Net)
    loss_of(model, batch(0, data_rank(context, mesh))).backward()
    for rank in range(2):
        (loss_of(plain, batch(0, rank)) / 2).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, p), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            got = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
            torch.testing.assert_close(got, want.grad, msg=lambda m, n=name: f"{n}: {m}")
            p.grad.mul_(3)
    for param in plain.parameters():
        param.grad.mul_(3)
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(model.clip_grad_norm_(1e9), norm)
    return sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})


@LONG
@pytest.mark.parametrize("low", [False, pytest.param(True, marks=LONG)])
def test_gradients_are_shown_and_changed_beside_whole_parameters(*, low: bool) -> None:
    assert agreed(_gradients, 4, low=low) == ["torch.float32"]


def _held(context: RankContext, *, original: bool) -> None:
    """Gradients that wait for a reduction are scaled by the user, and then reduced."""
    mesh = square()
    model, plain = wrapped(mesh, use_orig_params=original), build(Net)
    rank = data_rank(context, mesh)
    with model.no_sync():
        loss_of(model, batch(0, rank)).backward()
        loss_of(model, batch(1, rank)).backward()
    for param in model.parameters():
        param.grad.mul_(0.5)
    loss_of(model, batch(2, rank)).backward()
    for other in range(2):
        for step, factor in enumerate((0.5, 0.5, 1.0)):
            (loss_of(plain, batch(step, other)) * factor / 2).backward()
    for each in (model, plain):
        optimizer_of(each.parameters(), "sgd").step()
    assert_equal(model, plain)


@LONG
@KINDS
def test_gradients_that_wait_are_the_users_to_change(*, original: bool) -> None:
    agreed(_held, 4, original=original)


def _one_start(context: RankContext) -> list[float]:
    mesh = square()
    module = parallel(mesh["tp"])
    with torch.no_grad():
        for param in module.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.fill_(context.rank)
    model = wrapped(mesh, module, sync_module_states=True)
    with FSDP.summon_full_params(model):
        return sorted(
            {
                (p.to_local() if isinstance(p, DTensor) else p).unique().item()
                for p in model.parameters()
            }
        )


@LONG
def test_states_are_synchronised_over_the_data_alone() -> None:
    assert on_ranks(_one_start, 4) == ([0.0], [1.0], [0.0], [1.0])


def _from_meta(context: RankContext) -> list[str]:
    mesh = square()
    with torch.device("meta"):
        module = parallel(mesh["tp"])

    def init(each: nn.Module) -> None:
        if any(p.is_meta for p in each.parameters(recurse=False)):
            each.to_empty(device="cpu", recurse=False)
            with torch.no_grad():
                for param in each.parameters(recurse=False):
                    param.fill_(0.25)

    model = wrapped(mesh, module, param_init_fn=init)
    train(model, data_rank(context, mesh), steps=1)
    return [
        f"{name} {tuple(value.shape)}"
        for name, value in whole_parameters(model).items()
        if torch.equal(value, torch.full_like(value, 0.25)) or not value.isfinite().all()
    ]


@LONG
def test_a_model_may_come_from_meta() -> None:
    assert agreed(_from_meta, 4) == []


# What is refused, on all ranks


def _lone(placement: Any, *, dims: tuple[int, ...] = (2,), rows: int = 4) -> nn.Module:
    module = nn.Linear(4, rows)
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("tp", "ep")[: len(dims)])
    spread = distribute_tensor(module.weight.detach(), mesh, [Replicate()] * len(dims))
    module.weight = nn.Parameter(DTensor.from_local(spread.to_local(), mesh, placement))
    return module


def _uneven() -> tuple[nn.Module, Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(4, 5)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["tp"], [Shard(0)]))
    return module, mesh["dp"]


def _one_mesh() -> tuple[nn.Module, Any]:
    module = _lone([Replicate()])
    return module, module.weight.device_mesh


def _line(*ranks: int) -> Any:
    return DeviceMesh("cpu", [list(ranks or (0, 1))], mesh_dim_names=("dp", "tp"))["dp"]


BAD: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], type[Exception], str]] = {
    "no_mesh": (lambda: (_lone([Replicate()]), None), ValueError, "no device_mesh was given"),
    "other_mesh": (
        lambda: (_lone([Shard(0)]), _line(1, 0)),
        ValueError,
        "is not cut out of the same mesh as device_mesh",
    ),
    "overlap": (_one_mesh, ValueError, "shares the ranks [0, 1] with device_mesh"),
    "two_dims": (
        lambda: (_lone([Replicate(), Shard(0)], dims=(1, 2)), _line()),
        NotImplementedError,
        "wanted a mesh of one dim",
    ),
    "partial": (
        lambda: (_lone([Partial()]), _line()),
        NotImplementedError,
        "wanted Shard or Replicate",
    ),
    "uneven": (_uneven, NotImplementedError, "dim 0 is not cut evenly over 2 ranks"),
}


def _refused(context: RankContext, *, case: str, original: bool) -> list[str]:
    module, mesh = BAD[case][0]()
    before = [id(param) for param in module.parameters()]
    error = error_of(lambda: FSDP(module, device_mesh=mesh, use_orig_params=original))
    assert [id(param) for param in module.parameters()] == before
    return error


@LONG
@KINDS
@pytest.mark.parametrize("case", BAD)
def test_other_cuts_and_meshes_are_refused_before_anything_happens(
    *, case: str, original: bool
) -> None:
    _, kind, fragment = BAD[case]
    errors = on_ranks(_refused, 2, case=case, original=original)
    named_on_every_rank(errors, kind, fragment)


def _one_rank_differs(context: RankContext) -> list[str]:
    mesh = square()
    model = wrapped(mesh, use_orig_params=True)
    if context.rank == 3:
        model.out.weight.requires_grad_(False)
    return error_of(lambda: model(batch(0, 0)))


@LONG
def test_what_one_rank_does_is_told_to_all_dims_of_the_mesh() -> None:
    for kind, text in on_ranks(_one_rank_differs, 4):
        assert kind == "ValueError"
        assert re.search("out.weight.*trainable", text), text


def _early_optimizer(context: RankContext) -> list[str]:
    mesh = square()
    module = parallel(mesh["tp"])
    optimizer = optimizer_of(module.parameters())
    model = wrapped(mesh, module, use_orig_params=True)
    loss_of(model, batch(0, 0)).backward()
    return error_of(optimizer.step)


@LONG
def test_an_optimizer_over_what_was_cut_before_is_refused() -> None:
    errors = on_ranks(_early_optimizer, 4)
    named_on_every_rank(errors, ValueError, "were flattened after it was made")


def _whole_tensors(context: RankContext, *, plain: bool) -> list[str]:
    """Without shards an optimizer that needs whole tensors gets them, but for what was cut."""
    mesh = square()
    module = Block() if plain else parallel(mesh["tp"]).blocks[0]
    model = wrapped(mesh, module, use_orig_params=True, **OPTIONS["replicas"])
    optimizer = torch.optim.Adafactor(model.parameters())
    loss_of(model, batch(0, 0)).backward()
    return error_of(optimizer.step)


@LONG
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=LONG)])
def test_optimizers_that_need_whole_tensors_are_refused_on_parts(*, plain: bool) -> None:
    kind = "" if plain else "NotImplementedError"
    for name, text in on_ranks(_whole_tensors, 4, plain=plain):
        assert name == kind, text


def _counted(context: RankContext) -> list[dict[str, int]]:
    """Collectives of one iteration, by the dim of the mesh over which they go."""
    mesh = square()
    model = wrapped(mesh)
    train(model, data_rank(context, mesh), steps=1)
    start = len(context.recorder.records)
    loss_of(model, batch(1, data_rank(context, mesh))).backward()
    dims = {
        tuple(dist.get_process_group_ranks(mesh.get_group(name))): name for name in ("dp", "tp")
    }
    found: dict[str, int] = {}
    for record in context.recorder.records[start:]:
        key = f"{record.op} {dims.get(tuple(record.group_ranks), 'other')}"
        found[key] = found.get(key, 0) + 1
    return {key: number for key, number in found.items() if key.endswith("dp")}


@LONG
def test_units_communicate_over_their_own_dim_alone() -> None:
    found = agreed(_counted, 4)
    # Three units: gathered in forward, the blocks again in backward; each reduced once.
    assert found == {"all_gather dp": 5, "reduce_scatter dp": 3}
