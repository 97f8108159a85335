"""Ours and torch's ``fully_shard`` are exchangeable: same bits, keys, placements, checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as helpers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp
from conformance.ranks import RankContext
from tests.fsdp.plain import DIM, Stack, batch, build, loss_of, optimizer_of, train_sharded, whole
from tests.fsdp.ranks import agreed

PACKAGES: dict[str, Any] = {"ours": fsdp, "torch": torch_fsdp}


def shard(package: Any, model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        package.fully_shard(block, **options)
    return package.fully_shard(model, **options)


def _options(package: Any, variant: str) -> dict[str, Any]:
    bf16 = torch.bfloat16
    return {
        "default": {},
        "keep": {"reshard_after_forward": False},
        "reshard": {"reshard_after_forward": True},
        "bf16": {"mp_policy": package.MixedPrecisionPolicy(bf16, torch.float32)},
        "bf16_reduce": {"mp_policy": package.MixedPrecisionPolicy(bf16, output_dtype=bf16)},
        "fp16_reduce": {"mp_policy": package.MixedPrecisionPolicy(reduce_dtype=torch.float16)},
        "offload": {"offload_policy": package.CPUOffloadPolicy(pin_memory=False)},
        "dim1": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
    }[variant]


def _train(
    package: Any, rank: int, variant: str, *, micro: int = 1, hidden: int = 13
) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    model = shard(package, build(hidden=hidden), **_options(package, variant))
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(3):
        for part in range(micro):
            model.set_requires_gradient_sync(part == micro - 1)
            loss = loss_of(model, batch(step, rank, part))
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses.append(whole(norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model, optimizer


def _same_bits(context: RankContext, variant: str, micro: int) -> list[bool]:
    hidden = 12 if variant == "dim1" else 13
    if variant == "dim1":  # the sizes must divide
        results = [_dim1(package, context.rank) for package in PACKAGES.values()]
    else:
        results = [
            _train(package, context.rank, variant, micro=micro, hidden=hidden)[:2]
            for package in PACKAGES.values()
        ]
    (ours, our_model), (theirs, their_model) = results
    pairs = list(zip(our_model.named_parameters(), their_model.named_parameters(), strict=True))
    return [
        ours == theirs,
        all(a[0] == b[0] for a, b in pairs),
        all(torch.equal(a.to_local(), b.to_local()) for (_, a), (_, b) in pairs),
        all(a.placements == b.placements and a.dtype == b.dtype for (_, a), (_, b) in pairs),
        all(a.to_local().is_contiguous() for (_, a), _ in pairs),
    ]


def _dim1(package: Any, rank: int) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 12), nn.Tanh(), nn.Linear(12, 4))
    package.fully_shard(model, **_options(package, "dim1"))
    return train_sharded(model, rank), model


VARIANTS = ["default", "keep", "reshard", "bf16", "bf16_reduce", "fp16_reduce", "offload", "dim1"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_train_to_the_same_bits(variant: str) -> None:
    assert agreed(_same_bits, 2, variant=variant, micro=1) == [True] * 5


@pytest.mark.parametrize("variant", ["default", "bf16"])
def test_accumulation_gives_the_same_bits(variant: str) -> None:
    assert agreed(_same_bits, 2, variant=variant, micro=3) == [True] * 5


def _gradient_placements(context: RankContext) -> list[bool]:
    found = []
    for package in PACKAGES.values():
        model = shard(package, build())
        loss_of(model, batch(0, context.rank)).backward()
        found.append(
            [
                (n, str(p.grad.placements), p.grad.shape, p.grad.stride(), p.grad.dtype)
                for n, p in model.named_parameters()
            ]
        )
    return [found[0] == found[1]]


def test_gradients_have_the_same_placements() -> None:
    assert agreed(_gradient_placements, 3) == [True]


def _checkpoints(context: RankContext, source: str, target: str) -> list[bool]:
    _, model, optimizer = _train(PACKAGES[source], context.rank, "default")
    path = str(context.directory / "checkpoint")
    saved = helpers.get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optim": saved[1]}, checkpoint_id=path)
    other = shard(PACKAGES[target], build())
    other_optimizer = optimizer_of(other.parameters())
    state = dict(
        zip(("model", "optim"), helpers.get_state_dict(other, other_optimizer), strict=True)
    )
    dcp.load(state, checkpoint_id=path)
    helpers.set_state_dict(
        other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    losses = []
    for each, opt in ((model, optimizer), (other, other_optimizer)):
        opt.zero_grad()
        for step in range(3, 5):
            loss = loss_of(each, batch(step, context.rank))
            loss.backward()
            losses.append(loss.item())
            opt.step()
            opt.zero_grad()
    same = zip(model.parameters(), other.parameters(), strict=True)
    return [losses[:2] == losses[2:], all(torch.equal(a.to_local(), b.to_local()) for a, b in same)]


@pytest.mark.parametrize(("source", "target"), [("ours", "torch"), ("torch", "ours")])
def test_a_checkpoint_of_one_loads_into_the_other(source: str, target: str) -> None:
    assert agreed(_checkpoints, 2, source=source, target=target) == [True, True]


def _state_dicts(context: RankContext) -> list[bool]:
    found = []
    for package in PACKAGES.values():
        model = shard(package, build())
        found.append(model.state_dict())
    ours, theirs = found
    model = shard(fsdp, Stack())
    model.load_state_dict(theirs)
    other = shard(torch_fsdp, Stack())
    other.load_state_dict(ours)
    x = batch(0, 0)
    return [list(ours) == list(theirs), torch.equal(model(x), other(x))]


def test_state_dicts_are_exchangeable() -> None:
    assert agreed(_state_dicts, 3) == [True, True]


def _hybrid(context: RankContext) -> bool:
    results = []
    for package in PACKAGES.values():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = shard(package, build(), mesh=mesh)
        optimizer = optimizer_of(model.parameters())
        for step in range(2):
            loss_of(model, batch(step, context.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([(str(p.placements), p.to_local()) for p in model.parameters()])
    ours, theirs = results
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(ours, theirs, strict=True))


def test_hybrid_sharding_trains_to_the_same_bits() -> None:
    assert agreed(_hybrid, 4) is True


def _graphs(context: RankContext) -> list[int]:
    """How many graphs the compiler makes of blocks that were compiled and then sharded."""
    found = []
    for package in PACKAGES.values():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")  # it counts what comes before any backend
        model = build(blocks=2)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=counter, fullgraph=True)
        shard(package, model)
        for step in range(2):
            loss_of(model, batch(step, context.rank)).backward()
        found.append(counter.frame_count)
    return found


def test_the_compiler_makes_as_many_graphs_as_for_torchs() -> None:
    ours, theirs = agreed(_graphs, 2, fresh=True)
    assert 0 < ours <= theirs


PUBLIC = [
    "fully_shard",
    "FSDPModule",
    "UnshardHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def _public_names(context: RankContext) -> list[str]:
    missing = [n for n in PUBLIC if not hasattr(fsdp, n)]
    methods = [
        name
        for name, member in vars(torch_fsdp.FSDPModule).items()
        if inspect.isfunction(member)
        and not name.startswith("_")
        and not hasattr(fsdp.FSDPModule, name)
    ]
    return missing + methods


def test_every_public_name_and_method_exists() -> None:
    assert agreed(_public_names, 1) == []


def _signatures() -> list[str]:
    def parameters(function: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(function).parameters)

    def known(name: str) -> list[str]:
        """Parameters of ours, without those that this version of torch does not have yet."""
        theirs = parameters(getattr(torch_fsdp, name))
        return [each for each in parameters(getattr(fsdp, name)) if each in theirs]

    return [
        name
        for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
        if known(name) != parameters(getattr(torch_fsdp, name))
    ]


def test_functions_take_the_same_arguments() -> None:
    assert _signatures() == []
