"""What training loops put around steps: a loss scaler, an average of weights, a model on meta."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.gather import held
from conformance.per_rank import PerRank, each
from conformance.scenarios.run import Run, unsaved_buffers

OVERFLOW = 1
"""The step in which one rank's loss is infinite, and with it every gradient."""
ROW_OVERFLOW = 2
"""The step in which one row of the first layer has infinite gradients: if cut, on one rank only."""
SCALED_STEPS = 4
AVERAGED_STEPS = 3
DECAY = 0.5


def scaled(run: Run) -> None:
    """Four steps with a scaled loss: an infinite one in the second, infinite rows in the third."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
        scaler = run.adapter.make_scaler(w, run.device)
    for step in range(SCALED_STEPS):
        with run.phase(f"step {step}"):
            run.mark(f"step {step}/micro 0")
            bare = run.adapter.bare(w)
            with _row_overflows(bare) if step == ROW_OVERFLOW else nullcontext():
                loss = run.adapter.forward(w, run.batch(step, 0), run.model.loss)
            run.writer.write("loss", each(loss, lambda own: own.detach()), step=step, micro=0)
            if step == OVERFLOW:
                loss = _on_last_rank(run, loss, lambda own: own * math.inf)
            run.adapter.backward(w, each(loss, scaler.scale))
            if step == 0 and run.recorder is None:  # what the truth alone needs to show
                run.writer.write("gradients_scaled", held(run.adapter.full_gradients(w)), step=step)
            run.adapter.scaled_step(w, scaler)
            scaler.update()
            run.adapter.zero_grad(w)
            run.writer.write("scale", float(scaler.get_scale()), step=step)
            run.observe_parameters(w, step=step)


def _on_last_rank(run: Run, loss: Any, change: Callable[[Any], Any]) -> Any:
    """`loss` with the last rank's changed."""
    if isinstance(loss, PerRank):
        return PerRank((*loss.values[:-1], change(loss.values[-1])))
    rank: int = getattr(run.adapter, "rank", dist.get_rank())  # the baseline may play another
    return change(loss) if rank == run.world - 1 else loss


@contextmanager
def _row_overflows(module: nn.Module) -> Iterator[None]:
    """A forward inside gives the first layer's last row infinite gradients, and no other.

    It hands no gradient on, and the last rows of its weight and bias are in one rank's shards, also
    where both are cut as one.
    """

    def overflow(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[..., -1] = math.inf
        return gradient

    def watch(layer: nn.Module, arguments: Any, output: Tensor) -> None:
        output.register_hook(overflow)

    first = next(layer for layer in module.modules() if isinstance(layer, nn.Linear))
    handle = first.register_forward_hook(watch)
    try:
        yield
    finally:
        handle.remove()


def averaged(run: Run) -> None:
    """Three steps with a running average of the weights, which then take its place."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
    average: list[Tensor] = []
    for step in range(AVERAGED_STEPS):
        with run.phase(f"step {step}"):
            run.train_step(w, step)
            weights = run.adapter.weights(w)
            average = average or [weight.detach().clone() for weight in weights]
            for kept, weight in zip(average, weights, strict=True):
                kept.mul_(DECAY).add_(weight.detach(), alpha=1 - DECAY)
    with run.phase("average"):
        with torch.no_grad():
            for weight, kept in zip(run.adapter.weights(w), average, strict=True):
                weight.copy_(kept)
        run.observe_parameters(w, "averaged_parameters", index=0)
        run.evaluate(w, 0)


def materialised(run: Run) -> None:
    """A step, then its state goes into a pair that was wrapped without storage; two more steps."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
    with run.phase("step 0"):
        run.train_step(w, 0)
    with run.phase("save"):
        state = run.asked("model_state", w, "full")
    with run.phase("build again"):
        fresh = run.build(meta=True)
    with run.phase("load"):
        run.adapter.load_model_state(fresh, "full", state)
        run.observe_parameters(fresh, "materialised_parameters", step=0)
        unsaved = unsaved_buffers(run.adapter.bare(fresh))
        buffers = each(
            run.asked("buffers", fresh),
            lambda own: {fqn: buffer for fqn, buffer in own.items() if fqn in unsaved},
        )
        run.writer.write("materialised_buffers", buffers, step=0)
    for step in (1, 2):
        with run.phase(f"step {step}"):
            run.train_step(fresh, step)
