"""The wrappers that the tests of this folder are about; knows no test framework."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard

WORLD = 2
DIM = 6
STRATEGIES = {True: ShardingStrategy.FULL_SHARD, False: ShardingStrategy.SHARD_GRAD_OP}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def here() -> torch.device:
    """The device of this rank, already current."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return torch.device("cpu")
    return torch.device(current.type, torch.accelerator.current_device_index())


def shard(
    kind: str,
    model: nn.Module,
    unit: type[nn.Module],
    *,
    reshard: bool = True,
    use_orig_params: bool = True,
    **options: Any,
) -> nn.Module:
    """`model`, sharded by the "wrapper" or by the "composable" function, units first."""
    units = [(name, child) for name, child in model.named_children() if isinstance(child, unit)]
    if kind == "wrapper":
        common = {
            "device_id": here(),
            "sharding_strategy": STRATEGIES[reshard],
            "use_orig_params": use_orig_params,
            **options,
        }
        for name, child in units:
            setattr(model, name, FSDP(child, **common))
        return FSDP(model, **common)
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    for _, child in units:
        fully_shard(child, mesh=mesh, reshard_after_forward=reshard, **options)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, **options)


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, defaults = OPTIMIZERS[name]
    return kind(model.parameters(), **defaults)


def batch(rank: int, step: int, micro: int = 0) -> Tensor:
    """Different on every rank, step and micro-batch; (3, DIM)."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(3, DIM, generator=generator).to(here())


def step_alone(
    model: nn.Module, optim: torch.optim.Optimizer, step: int, accumulation: int = 1
) -> Tensor:
    """One step of the unsharded model on the batches of all ranks; the losses, one per rank."""
    losses = []
    for rank in range(WORLD):
        loss = sum(loss_of(model, batch(rank, step, i)) for i in range(accumulation))
        losses.append(loss)
    (sum(losses) / WORLD).backward()
    optim.step()
    optim.zero_grad()
    return torch.stack([loss.detach() for loss in losses])


def step_sharded(
    model: nn.Module, optim: torch.optim.Optimizer, rank: int, step: int, accumulation: int = 1
) -> Tensor:
    """The same on this rank's batches; its loss."""
    total = torch.zeros((), device=here())
    for index in range(accumulation):
        loss = loss_of(model, batch(rank, step, index))
        loss.backward()
        total += loss.detach()
    optim.step()
    optim.zero_grad()
    return total


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Unsharded copies by name."""
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
                for name, parameter in model.named_parameters()
            }
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}
