"""One plain model in every form, over any ranks; and an optimizer whose state is known exactly."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fsdp.engine.mesh import default_device
from fsdp.wrap import ModuleWrapPolicy
from tests.fsdp.plain import Residual

DIM = 6
FLAT = {
    "flat": {"auto_wrap_policy": ModuleWrapPolicy({Residual})},
    "flat_norm": {"auto_wrap_policy": ModuleWrapPolicy({nn.LayerNorm})},
    "flat_one": {},
    "original": {"auto_wrap_policy": ModuleWrapPolicy({Residual}), "use_orig_params": True},
    "original_one": {"use_orig_params": True},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "original_no_shard": {
        "sharding_strategy": ShardingStrategy.NO_SHARD,
        "use_orig_params": True,
    },
    "flat_keep": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True},
}


class Counter(nn.Module):
    """Something that is no tensor and belongs to the state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Odd(nn.Module):
    """Tied weights, sizes that no world divides, a single gain, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, DIM)
        self.blocks = nn.ModuleList(Residual(DIM, 5) for _ in range(2))
        self.gain = nn.Parameter(torch.rand(1))
        self.out = nn.Linear(DIM, 7, bias=False)
        self.out.weight = self.emb.weight
        self.counter = Counter()
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("cache", torch.rand(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x * self.gain)


class Marks(torch.optim.Optimizer):
    """Its state is an exact function of each element, however the parameter is cut."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.5, 0.25)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if not param.numel():
                    continue  # an original parameter without elements here never has a gradient
                state = self.state[param]
                state["step"] = torch.tensor(3.0)
                state["twice"] = param * 2
                state["exact"] = (param * 4).double()
                state["word"] = "kept"


def plain(seed: int = 7) -> Odd:
    torch.manual_seed(seed)
    model = Odd()
    model.counter.count = seed
    return model


QUICK = ["flat", "original", "fully", "plain"]
ALL = [
    *QUICK,
    "ddp",
    "flat_norm",
    "flat_one",
    "original_one",
    "no_shard",
    "original_no_shard",
    "fully_root",
    "fully_last_dim",
]


def made(
    face: str,
    ranks: Sequence[int],
    seed: int = 7,
    model: nn.Module | None = None,
    group: dist.ProcessGroup | None = None,
) -> nn.Module | None:
    """The model in form ``face`` over ``ranks``; None on other ranks. Collective over all.

    ``group``: of these ranks, where making one for each model would take long.
    """
    if face in ("hybrid", "fully_hybrid"):
        return _hybrid(face, ranks, plain(seed) if model is None else model)
    if group is None:
        group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return None
    module = (plain(seed) if model is None else model).to(default_device())
    if face == "plain":
        return module
    if face == "ddp":
        return DistributedDataParallel(module, process_group=group)
    if face in FLAT:
        return _quiet(module, process_group=group, **FLAT[face])
    return _composable(face, module, DeviceMesh.from_group(group, default_device().type))


def _quiet(module: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "FSDP is switching")
        return FullyShardedDataParallel(module, **options)


def _composable(face: str, module: Any, mesh: DeviceMesh) -> nn.Module:
    options: dict[str, Any] = {"mesh": mesh}
    if face == "fully_keep":
        options["reshard_after_forward"] = False
    if face == "fully_last_dim":
        size = mesh.size()

        def last(param: nn.Parameter) -> Shard | None:
            divides = param.dim() > 1 and param.shape[-1] % size == 0
            return Shard(param.dim() - 1) if divides else None

        options["shard_placement_fn"] = last
    for block in module.blocks if face != "fully_root" else ():
        fully_shard(block, **options)
    fully_shard(module, **options)
    return module


def _hybrid(face: str, ranks: Sequence[int], module: nn.Module) -> nn.Module | None:
    half = len(ranks) // 2
    rows = [list(ranks[:half]), list(ranks[half:])]
    shards = [dist.new_group(row) for row in rows]
    replicas = [dist.new_group([a, b]) for a, b in zip(*rows, strict=True)]
    rank = dist.get_rank()
    if rank not in ranks:
        return None
    shard = shards[0 if rank in rows[0] else 1]
    module = module.to(default_device())
    replica = replicas[(rows[0] if rank in rows[0] else rows[1]).index(rank)]
    if face == "hybrid":
        return _quiet(module, process_group=(shard, replica), **FLAT[face])
    mesh = DeviceMesh.from_group(
        [replica, shard],
        default_device().type,
        mesh=torch.tensor(rows),
        mesh_dim_names=("replicate", "shard"),
    )
    return _composable(face, module, mesh)


def marked(model: nn.Module | None, lr: float = 1.0) -> Marks | None:
    """An optimizer that has stepped."""
    optimizer = fresh(model, lr)
    if optimizer is not None:
        optimizer.step()
    return optimizer


def fresh(model: nn.Module | None, lr: float = 1.0) -> Marks | None:
    return Marks(model.parameters(), lr) if model is not None else None


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Copies of all that a rank holds: parameters, buffers, states, options, extra state."""
    found: dict[str, Any] = {n: local(p).detach().clone() for n, p in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if not name.endswith("cache"):
            found[name] = buffer.clone()
    for module in model.modules():
        if isinstance(module, Counter):
            found["count"] = module.count
    names = {p: n for n, p in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        found[f"options {number}"] = {k: v for k, v in group.items() if k != "params"}
        for param in group["params"]:
            for key, value in optimizer.state.get(param, {}).items():
                copy = local(value)
                found[f"{names[param]} {key}"] = (
                    copy.clone() if isinstance(copy, torch.Tensor) else copy
                )
    return found


def same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Bit for bit, whatever a rank holds."""
    assert sorted(got) == sorted(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype, name
            assert got[name].device == value.device, name
            assert torch.equal(got[name], value), f"{name}: {got[name]} is not {value}"
        else:
            assert got[name] == value, name
