"""Data parallel by hand: gradients are reduced after backward, one collective per parameter.

What the other odd wrappers vary. Gradients that wait unreduced are kept apart from reduced ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import Adapter, BuildConfig, OptimizerFactory, Wrapped, toggled

Gradients = list[Tensor | None]


@dataclass(kw_only=True)
class Replica:
    """What a model trained by hand has besides itself.

    Attributes:
        model: the user's module.
        parameters: those that train, each once.
        reduces: whether the next backward reduces.
        own: this rank's gradients that wait, one entry per parameter.
        reduced: what has been reduced since gradients were dropped.
    """

    model: nn.Module
    parameters: list[nn.Parameter]
    reduces: bool = True
    own: Gradients = field(default_factory=list)
    reduced: Gradients = field(default_factory=list)

    def drop(self) -> None:
        """Forget all gradients."""
        self.own = [None] * len(self.parameters)
        self.reduced = [None] * len(self.parameters)

    def set_reduces(self, reduces: bool) -> None:  # noqa: FBT001 - the form `toggled` calls
        """Whether backwards reduce from now on."""
        self.reduces = reduces


class ByHand(Adapter):
    """Every rank has the whole model; each parameter's gradient is averaged on its own."""

    capabilities = frozenset(
        {
            "gradients",
            "no_sync",
            "no_sync.dropped",
            "clip.gradients",
            "clip.p1",
            "clip.p2",
            "clip.pinf",
            "two_forwards",
            "unused_parameters",
            "unused_parameters.varying",
            "unused_parameters.ranks",
            "optimizer.whole",
            "hooks.parameters",
            "scaler",
            "model_state.full",
            "optim_state.full",
        }
    )

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Nothing is wrapped; the optimizer is made over all parameters."""
        replica = Replica(
            model=model, parameters=[p for p in model.parameters() if p.requires_grad]
        )
        replica.drop()
        return Wrapped(module=model, optimizer=make_optimizer(model.parameters()), native=replica)

    def bare(self, w: Wrapped) -> nn.Module:
        """The user's module."""
        model: nn.Module = w.native.model
        return model

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Backward on this rank alone, then reduce what has been waiting."""
        replica: Replica = w.native
        for parameter, waiting in zip(replica.parameters, replica.own, strict=True):
            parameter.grad = waiting
        loss.backward()
        replica.own = [p.grad for p in replica.parameters]
        if replica.reduces:
            fresh = self.reduce(w, replica.own)
            replica.own = [None] * len(fresh)
            pairs = zip(replica.reduced, fresh, strict=True)
            replica.reduced = [b if a is None else a if b is None else a + b for a, b in pairs]
        for parameter, value in zip(replica.parameters, replica.reduced, strict=True):
            parameter.grad = value

    def reduce(self, w: Wrapped, own: Sequence[Tensor | None]) -> Gradients:
        """The ranks' gradients made one; ``None`` where no rank has any.

        *Collective*: one small all-reduce, then what `reduce_all` issues.
        """
        replica: Replica = w.native
        used = torch.tensor([int(g is not None) for g in own], device=replica.parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        indices = [index for index, anywhere in enumerate(used.tolist()) if anywhere]
        filled = [
            torch.zeros_like(replica.parameters[i]) if (g := own[i]) is None else g.clone()
            for i in indices
        ]
        found: Gradients = [None] * len(own)
        for index, value in zip(indices, self.reduce_all(w, filled), strict=True):
            found[index] = value
        return found

    def reduce_all(self, w: Wrapped, gradients: list[Tensor]) -> list[Tensor]:
        """The means over ranks of what every rank has; may work in place."""
        return [self.mean(gradient) for gradient in gradients]

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over ranks. *Collective*: one all-reduce."""
        contiguous = tensor.contiguous()
        dist.all_reduce(contiguous)
        return contiguous / dist.get_world_size()

    def no_sync(self, w: Wrapped) -> AbstractContextManager[Any]:
        """Backwards inside leave their gradients to the next one that reduces."""
        return toggled(w.native.set_reduces)

    def zero_grad(self, w: Wrapped) -> None:
        """Drop the waiting ones as well."""
        super().zero_grad(w)
        w.native.drop()
