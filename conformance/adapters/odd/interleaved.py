"""Sharding in no layout that anybody uses: each rank keeps every W-th element of each parameter.

Parameters are whole from forward to the end of backward, and in evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.adapter import (
    BuildConfig,
    Conventions,
    LossFn,
    OptimizerFactory,
    StateKind,
    Wrapped,
    named_parameters,
    offered,
    received,
    to_cpu,
)
from conformance.adapters.odd.by_hand import ByHand, Gradients


class InterleavedShards(ByHand):
    """Rank r stores the elements r, r + W, r + 2W, ... of each parameter and of its state."""

    capabilities = frozenset(
        {
            "gradients",
            "clip.gradients",
            "clip.p1",
            "clip.p2",
            "clip.pinf",
            "unused_parameters",
            "unused_parameters.varying",
            "unused_parameters.ranks",
            "shard.parameters",
            "shard.optimizer",
            "model_state.full",
            "optim_state.full",
        }
    )
    conventions = Conventions(gathers="once", reduces="whole")

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Remember the shapes, keep the shards, make the optimizer over them."""
        w = super().build(model, make_optimizer, config)
        self._shapes = {p: p.shape for p in model.parameters()}
        self._strides = {p: p.stride() for p in model.parameters()}
        self._shards: dict[nn.Parameter, Tensor] = {}
        self._reshard(w)
        return w

    # -- whole and in parts ------------------------------------------------------------------------

    def part(self, whole: Tensor) -> Tensor:
        """This rank's elements, padded to as many as rank 0 has."""
        world = dist.get_world_size()
        flat = whole.detach().reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % world))
        return padded[dist.get_rank() :: world].clone()

    def joined(self, part: Tensor, shape: torch.Size) -> Tensor:
        """The whole tensor. *Collective*: one all-gather."""
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.stack(parts, dim=1).reshape(-1)[: shape.numel()].reshape(shape)

    def _unshard(self, w: Wrapped) -> None:
        for parameter in self.bare(w).parameters():
            if parameter not in self._shards:
                self._shards[parameter] = parameter.data
                whole = self.joined(parameter.data, self._shapes[parameter])
                strided = torch.empty_strided(
                    whole.shape, self._strides[parameter], dtype=whole.dtype, device=whole.device
                )
                parameter.data = strided.copy_(whole)

    def _reshard(self, w: Wrapped) -> None:
        for parameter in self.bare(w).parameters():
            parameter.grad = None  # of the whole; `_show_gradients` brings the part back
            kept = self._shards.pop(parameter, None)
            parameter.data = self.part(parameter.data) if kept is None else kept

    # -- training ----------------------------------------------------------------------------------

    def forward(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """With whole parameters."""
        self._unshard(w)
        return super().forward(w, batch, loss_fn)

    def backward(self, w: Wrapped, loss: Tensor) -> None:
        """Reduce whole gradients, then keep parts of everything."""
        trained: list[nn.Parameter] = w.native.parameters
        for parameter in trained:
            parameter.grad = None  # the part of earlier micro-batches is kept elsewhere
        loss.backward()
        fresh: Gradients = self.reduce(w, [p.grad for p in trained])
        self._reshard(w)
        kept: Gradients = w.native.reduced
        for index, gradient in enumerate(fresh):
            if gradient is not None:
                part, before = self.part(gradient), kept[index]
                kept[index] = part if before is None else before + part
        self._show_gradients(w)

    def _show_gradients(self, w: Wrapped) -> None:
        for parameter, gradient in zip(w.native.parameters, w.native.reduced, strict=True):
            parameter.grad = gradient

    def optimizer_step(self, w: Wrapped) -> None:
        """Give up what a forward without a backward has left whole, then step."""
        if self._shards:
            self._reshard(w)
            self._show_gradients(w)
        super().optimizer_step(w)

    def evaluate(self, w: Wrapped, batch: Any, loss_fn: LossFn) -> Tensor:
        """With whole parameters, which are given up again."""
        self._unshard(w)
        loss = super().evaluate(w, batch, loss_fn)
        self._reshard(w)
        self._show_gradients(w)
        return loss

    def clip_grad_norm(self, w: Wrapped, max_norm: float, norm_type: float) -> Tensor:
        """The norm of all parts of all ranks."""
        gradients = [p.grad for p in w.native.parameters if p.grad is not None]
        own = torch.stack([torch.linalg.vector_norm(g, norm_type) for g in gradients])
        total: Tensor = torch.linalg.vector_norm(own, norm_type)
        if norm_type == float("inf"):
            dist.all_reduce(total, dist.ReduceOp.MAX)
        else:
            total = total.pow(norm_type)
            dist.all_reduce(total)
            total = total.pow(1.0 / norm_type)
        nn.utils.clip_grads_with_norm_(w.native.parameters, max_norm, total)
        return total

    # -- side doors and states ---------------------------------------------------------------------

    def full_parameters(self, w: Wrapped) -> dict[str, Tensor]:
        """Joined, or as they are while they are whole."""
        return {fqn: to_cpu(self._whole(p)) for fqn, p in named_parameters(self.bare(w))}

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        if parameter in self._shards:
            return parameter.detach()
        return self.joined(parameter.detach(), self._shapes[parameter])

    def full_gradients(self, w: Wrapped) -> dict[str, Tensor | None]:
        """Joined."""
        return {
            fqn: None if p.grad is None else to_cpu(self.joined(p.grad, self._shapes[p]))
            for fqn, p in named_parameters(self.bare(w))
        }

    def full_optimizer_state(self, w: Wrapped) -> dict[str, dict[str, Any]]:
        """Joined where it has elements."""
        state = w.optimizer.state
        return {
            fqn: {k: self._whole_state(v, self._shapes[p]) for k, v in state[p].items()}
            for fqn, p in named_parameters(self.bare(w))
            if p in state
        }

    def _whole_state(self, value: Any, shape: torch.Size) -> Any:
        if not isinstance(value, Tensor):
            return value
        return to_cpu(self.joined(value, shape) if value.dim() else value)

    def model_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Whole parameters beside the buffers."""
        self._plain(kind, "model_state")
        self._unshard(w)
        state = {k: v.detach().clone() for k, v in self.bare(w).state_dict().items()}
        self._reshard(w)
        return offered(state, cpu=cpu, rank0_only=rank0_only)

    def load_model_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Into whole parameters, of which parts are kept."""
        self._unshard(w)
        self._shards.clear()
        self.bare(w).load_state_dict(received(state))
        self._reshard(w)

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Whole, by the optimizer's own numbers."""
        self._plain(kind, "optim_state")
        state = w.optimizer.state_dict()
        shapes = [self._shapes[p] for group in w.optimizer.param_groups for p in group["params"]]
        whole = {
            index: {k: self._whole_state(v, shapes[index]) for k, v in values.items()}
            for index, values in state["state"].items()
        }
        return offered({**state, "state": whole}, cpu=cpu, rank0_only=rank0_only)

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Parts of it; what belongs to a 0-dim parameter is as little a counter as others."""
        whole = received(state)
        parts = {
            index: {
                k: self.part(v) if isinstance(v, Tensor) and k != "step" else v
                for k, v in values.items()
            }
            for index, values in whole["state"].items()
        }
        w.optimizer.load_state_dict({**whole, "state": parts})
