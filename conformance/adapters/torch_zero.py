"""PyTorch's ``ZeroRedundancyOptimizer`` on ``DistributedDataParallel``: sharded optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from conformance.adapter import (
    BuildConfig,
    OptimizerFactory,
    StateKind,
    Wrapped,
    named_parameters,
    to_cpu,
)
from conformance.adapters.side_doors import gathered, merged
from conformance.adapters.torch_checkpoint import from_rank0
from conformance.adapters.torch_ddp import ReplicatedAdapter


class ZeroRedundancyAdapter(ReplicatedAdapter):
    """Whole parameters are dealt out to ranks, each of which steps its own and broadcasts them."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "parameters_as_bucket_view=True": {"parameters_as_bucket_view": True},
    }
    capabilities = frozenset(
        {
            "gradients",
            "no_sync",
            "no_sync.dropped",
            "clip.gradients",
            "clip.p1",
            "clip.p2",
            "clip.pinf",
            # no "two_forwards": docs/findings/ddp-two-forwards.md
            "unused_parameters",
            "unused_parameters.varying",
            "unused_parameters.ranks",
            "optimizer.whole",
            "shard.optimizer",
            "hooks.parameters",
            "scaler",
            "model_state.full",
            "optim_state.full",
        }
    )

    def build(
        self, model: nn.Module, make_optimizer: OptimizerFactory, config: BuildConfig
    ) -> Wrapped:
        """Replicate the model, shard the optimizer."""
        wrapped, remarks = self.wrap(model, config, {})
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            optimizer_class=make_optimizer.optimizer_class,
            **config.options,
            **make_optimizer.defaults,
        )
        return Wrapped(module=wrapped, optimizer=optimizer, native=wrapped, remarks=remarks)

    def full_optimizer_state(self, w: Wrapped) -> dict[str, dict[str, Any]]:
        """Every rank's local optimizer, each parameter's state from the rank that steps it.

        Collective: one object all-gather.
        """
        held = self._local_state(w)
        own = {
            fqn: {k: to_cpu(v) if torch.is_tensor(v) else v for k, v in held[p].items()}
            for fqn, p in named_parameters(self.bare(w))
            if p in held
        }
        return merged(gathered(own, dist.group.WORLD))

    def local_tensors(self, w: Wrapped) -> dict[str, list[torch.Tensor]]:
        """The local optimizer's state; the outer one's is empty until asked, and has gaps then."""
        state = [v for s in self._local_state(w).values() for v in s.values() if torch.is_tensor(v)]
        return {
            "parameters": [p.detach() for p in self.bare(w).parameters()],
            "optimizer": [v for v in state if v.dim() > 0],
        }

    def _local_state(self, w: Wrapped) -> Mapping[Any, Mapping[str, Any]]:
        state: Mapping[Any, Mapping[str, Any]] = w.optimizer.optim.state  # type: ignore[attr-defined]
        return state

    def optim_state(
        self, w: Wrapped, kind: StateKind, *, cpu: bool = False, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Consolidated on rank 0, then sent to the others unless rank 0 alone shall have it."""
        self._plain(kind, "optim_state")
        optimizer: Any = w.optimizer
        optimizer.consolidate_state_dict(to=0)
        state = dict(optimizer.state_dict()) if dist.get_rank() == 0 else {}
        return state if rank0_only else from_rank0(state)

    def load_optim_state(self, w: Wrapped, kind: StateKind, state: Mapping[str, Any]) -> None:
        """Every rank loads the whole state and keeps its part."""
        self._plain(kind, "load_optim_state")
        w.optimizer.load_state_dict(from_rank0(state))
