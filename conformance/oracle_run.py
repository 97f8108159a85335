"""The oracle's run of a scenario: the common program, plus what helps to name a defect's cause."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from conformance import models
from conformance.adapter import Wrapped, named_parameters, to_cpu
from conformance.oracle import VirtualRanks, trainable
from conformance.per_rank import PerRank
from conformance.scenarios.run import Clip, Run, Watch


@dataclass(kw_only=True)
class OracleWatch(Watch):
    """Also copies every rank's own gradient before reduction."""

    of_rank: Any = None
    last_micro: Any = None

    def __call__(self, moment: str, index: int = 0) -> None:
        """See `Watch`."""
        super().__call__(moment, index)
        if moment == "gradients":
            oracle = cast(VirtualRanks, self.run.adapter)
            self.of_rank = oracle.rank_gradients(self.wrapped)
            self.last_micro = oracle.reduced_last_micro(self.wrapped)


@dataclass(kw_only=True)
class OracleRun(Run):
    """A `Run` whose adapter is the oracle.

    Attributes:
        suspects: whether to record what defects would have produced; one of the three runs does.
    """

    suspects: bool = False
    _before: list[Tensor] | None = field(default=None, init=False)
    _big: dict[str, Tensor | None] | None = field(default=None, init=False)

    def train_step(self, w: Wrapped, step: int, clip: Clip | None = None) -> None:
        """One step, with the values that known defects would have given."""
        several = step == 0 and self.case.accumulation > 1 and self.model.concatenate
        self._big = self._big_batch(w) if several else None
        if not self.suspects:
            super().train_step(w, step, clip)
            return
        self._stale_losses(w, step)
        self._before = [p.detach().clone() for p in w.module.parameters()]
        super().train_step(w, step, clip)

    def watch(self, w: Wrapped, step: int) -> Watch:
        """The observer of one step."""
        return (
            OracleWatch(run=self, wrapped=w, step=step) if self.suspects else super().watch(w, step)
        )

    def observe_gradients(self, seen: Watch, step: int) -> None:
        """Reduced gradients, and each rank's own."""
        if self._big is not None:
            self.writer.write("gradients_big_batch", self._big, step=step)
        super().observe_gradients(seen, step)
        if isinstance(seen, OracleWatch):
            self.writer.write("gradients_of_rank", seen.of_rank, step=step)
            self.writer.write("gradients_last_micro", seen.last_micro, step=step)

    def _stale_losses(self, w: Wrapped, step: int) -> None:
        """Losses of this step's batches with the parameters of the step before."""
        if self._before is None:
            return
        stale = copy.deepcopy(w.module)
        with torch.no_grad(), torch.random.fork_rng():
            for parameter, value in zip(stale.parameters(), self._before, strict=True):
                parameter.copy_(value)
            for micro, batch in enumerate(self.micro_batches(step)):
                losses = PerRank(tuple(self.model.loss(stale, b) for b in batch.values))
                self.writer.write("stale_loss", losses, step=step, micro=micro)

    def _big_batch(self, w: Wrapped) -> dict[str, Tensor | None]:
        """Reduced gradient of one batch that holds all micro-batches of the step."""
        module: nn.Module = copy.deepcopy(w.module)
        oracle = cast(VirtualRanks, self.adapter)
        micro = self.micro_batches(0)
        parameters = trainable(module)
        total: list[list[Tensor | None]] = []
        with torch.random.fork_rng():
            for rank in range(self.world):
                batch = models.concatenate([m.values[rank] for m in micro])
                loss = self.model.loss(module, batch)
                total.append(list(torch.autograd.grad(loss, parameters, allow_unused=True)))
        reduced = oracle.reduced(w, total)
        by_id = {id(p): gradient for p, gradient in zip(parameters, reduced, strict=True)}
        return {
            fqn: None if by_id.get(id(p)) is None else to_cpu(cast(Tensor, by_id[id(p)]))
            for fqn, p in named_parameters(module)
        }
