"""Checkpoints: states of a model and its optimizers, in memory and in directories.

``save`` and ``load`` are for directories; any form of the model and any world loads what any other
has saved. ``in_memory`` has the functions of ``torch.distributed.checkpoint.state_dict``.
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
