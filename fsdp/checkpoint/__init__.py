"""Checkpoints: states of a model and its optimizers, in memory and in directories.

``save`` and ``load`` are for directories; any form of the model and any world loads what any other
has saved. ``in_memory`` has the functions of ``torch.distributed.checkpoint.state_dict``.

Started with ``torchrun``; what comes after ``save`` may as well be another job, of other ranks::

    import torch
    import torch.distributed as dist
    from torch import nn

    from fsdp import FullyShardedDataParallel, checkpoint, fully_shard

    dist.init_process_group("gloo")
    model = fully_shard(nn.Linear(6, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    checkpoint.save("step-1", model, optimizer)  # on every rank; whole in the end, or not there

    loaded = FullyShardedDataParallel(nn.Linear(6, 5))  # the other face, with weights of its own
    optimizer = torch.optim.AdamW(loaded.parameters())
    checkpoint.load("step-1", loaded, optimizer)
    dist.destroy_process_group()
"""

from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.in_memory import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from fsdp.checkpoint.loading import load
from fsdp.checkpoint.saving import async_save, save
from fsdp.checkpoint.states import LoadPlanner, StateDictOptions

__all__ = [
    "CheckpointError",
    "LoadPlanner",
    "StateDictOptions",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
