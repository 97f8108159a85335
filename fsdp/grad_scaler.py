"""Loss scaling for float16 training on several ranks: all ranks step, or none.

Knows gradients and one process group; it must not know a face. Stands on one private method of
``torch.amp.GradScaler``: ``_unscale_grads_``, through which every check for infinities goes, also
that of an optimizer which unscales by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from fsdp.engine.mesh import default_device

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks decide together whether to step.

    For gradients of either face, of replicas, on the host or on an accelerator, in any mix. The
    group must hold every rank that holds a part of the model; all ranks, by default.

    Args:
        device: type of the device that ``process_group`` communicates on. Default: the current
            accelerator, "cpu" if there is none.
        init_scale: the first factor.
        backoff_factor: multiplies the factor after a step that was skipped; below 1.
        growth_factor: multiplies it after ``growth_interval`` steps in a row; above 1.
        growth_interval: how many steps that are.
        enabled: whether anything is done at all.
        process_group: the ranks that decide together. Default: all ranks.

    *Collective*: ``unscale_`` and ``step`` all-reduce one number over the group, once per
    optimizer, on every rank of it, also on one that holds no gradient. ``step`` does so only if
    ``unscale_`` has not been called.
    """

    def __init__(  # noqa: PLR0913 - torch's interface
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if device is None:
            device = default_device().type
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group
        self._communicates_on = device

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` times the factor, each tensor in its own dtype.

        Args:
            outputs: a tensor, or an iterable of tensors and iterables, of any depth. Lists and
                tuples, named ones too, keep their type; of anything else comes an iterator.

        Raises:
            ValueError: something that is neither.
            AssertionError: a tensor without values, on the meta device.
        """
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            if outputs.is_meta:
                raise AssertionError(f"Expected supported device, got {outputs.device}")
            scaled: torch.Tensor = super().scale(outputs)
            # The factor is float32: a loss without dims would take its dtype.
            return scaled.to(outputs.dtype)
        # Text is an iterable of itself, and a dict one of its keys.
        if not isinstance(outputs, Iterable) or isinstance(outputs, (str, Mapping)):
            raise ValueError(
                "outputs must be a Tensor or an iterable of Tensors, got "
                f"{type(outputs).__name__} in `scale`"
            )
        inner = map(self.scale, outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*inner)
        return type(outputs)(inner) if isinstance(outputs, (list, tuple)) else inner

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the factor for the next iteration: smaller after an overflow, or as given.

        Args:
            new_scale: a number, or a tensor of one element and any shape, on the scaler's device.

        Raises:
            AssertionError: no optimizer was checked, or ``new_scale`` is something else.
        """
        if isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1:
            new_scale = new_scale.reshape(())
        super().update(new_scale)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,  # noqa: FBT001 - torch's interface
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients and return what any rank of the group has found."""
        del allow_fp16  # the parameters themselves may be float16
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            _coalesce_half(param)
        place = found_inf.device
        if any(param.grad is not None and param.grad.device.type == "cpu" for param in params):
            # torch copies both to the gradients' device without waiting for it, and the host would
            # read them, and write what it found, before they have arrived.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        return self._agreed(found, place)

    def _agreed(
        self, found: dict[torch.device, torch.Tensor], device: torch.device
    ) -> dict[torch.device, torch.Tensor]:
        """Replace what each device of this rank has found, if any, by what the group has.

        One all-reduce whatever ``found`` holds: ranks may have gradients on different devices.
        """
        if device.type == "cpu":
            device = torch.device(self._communicates_on)
        each = [value.to(device, torch.float32).reshape(()) for value in found.values()]
        total = torch.stack([*each, torch.zeros((), device=device)]).amax()  # (), 1.0 if inf
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self.process_group)
        return {place: total.to(place) for place in (found or {device: total})}


def _coalesce_half(param: torch.Tensor) -> None:
    """Add up the duplicate rows of a sparse float16 gradient in float32.

    Each may be finite and their sum not; only the sum is what the optimizer sees.
    """
    grad = param.grad
    if grad is not None and grad.is_sparse and grad.dtype is torch.float16:
        param.grad = grad.float().coalesce().half()
