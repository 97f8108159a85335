"""Names parameters that an optimizer must not hold, at its first step. Knows no sharding.

An optimizer that was made before sharding, or while parameters are whole, would step on tensors
that nobody reads afterwards: silently, for a whole training run.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_MARK = "_fsdp_not_for_optimizers"
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_guarding = False


def refuse_in_optimizers(param: nn.Parameter, name: str, reason: str) -> None:
    """Let an optimizer that holds ``param`` raise at its first step."""
    global _guarding
    setattr(param, _MARK, (name, reason))
    if not _guarding:
        _guarding = True
        register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: Optimizer, *_args: Any) -> None:
    if optimizer in _checked:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    marks = [mark for param in params if (mark := getattr(param, _MARK, None)) is not None]
    if marks:
        shown = ", ".join(name for name, _ in marks[:3]) + (", ..." if len(marks) > 3 else "")
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(marks)} parameters that {marks[0][1]} "
            f"({shown}): its steps would change nothing. Make the optimizer over the sharded "
            "parameters, after sharding."
        )
    _checked.add(optimizer)
