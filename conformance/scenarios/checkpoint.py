"""Save, load into a freshly built pair whose weights and hyper-parameters differ, train on.

Options of the case: ``kind`` is full, sharded, local or save (a directory); ``options`` is default
(the wrapper's own) or explicit (state on CPU, full state on rank 0 only).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from conformance.adapter import StateKind, Wrapped, to_cpu
from conformance.optimizers import with_other_hyperparameters
from conformance.per_rank import each
from conformance.scenarios.run import Run

STEPS_BEFORE = 2
STEPS_AFTER = 2


def checkpoint(run: Run) -> None:
    """Two steps, save, build anew, load, two more steps."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
    for step in range(STEPS_BEFORE):
        with run.phase(f"step {step}"):
            run.train_step(w, step)
    with run.phase("save"):
        saved = _save(run, w)
    if run.case.option("kind") == "full":
        with run.phase("bare load"):
            run.writer.write("bare", each(saved.model, lambda state: _in_bare(run, state)))
    with run.phase("build again"):
        fresh = run.build(optimizer=with_other_hyperparameters(run.optimizer), perturbed=True)
    with run.phase("load"):
        _load(run, fresh, saved)
        run.observe_state(fresh, step=STEPS_BEFORE - 1, prefix="loaded_")
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        with run.phase(f"step {step}"):
            run.train_step(fresh, step)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """States in memory; both empty when the checkpoint is a directory."""

    model: Any = None
    optimizer: Any = None


def _save(run: Run, w: Wrapped) -> Saved:
    kind = run.case.option("kind")
    if kind == "save":
        run.adapter.save(w, run.scratch / "checkpoint")
        return Saved()
    state_kind = cast(StateKind, kind)
    explicit = run.case.option("options") == "explicit"
    cpu, rank0_only = explicit, explicit and kind == "full"
    model = run.adapter.model_state(w, state_kind, cpu=cpu, rank0_only=rank0_only)
    optimizer = run.adapter.optim_state(w, state_kind, cpu=cpu, rank0_only=rank0_only)
    run.writer.write("model_state_layout", each(model, layout))
    return Saved(model=model, optimizer=optimizer)


def _load(run: Run, w: Wrapped, saved: Saved) -> None:
    kind = run.case.option("kind")
    if kind == "save":
        run.adapter.load(w, run.scratch / "checkpoint")
        return
    state_kind = cast(StateKind, kind)
    run.adapter.load_model_state(w, state_kind, saved.model)
    run.adapter.load_optim_state(w, state_kind, saved.optimizer)


def _in_bare(run: Run, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A bare, perturbed module's state after a strict load of `state`; empty if there is none."""
    if not state:
        return {}
    bare = run.bare_model(perturbed=True)
    bare.load_state_dict(dict(state), strict=True)
    return {key: to_cpu(value) for key, value in bare.state_dict().items()}


def layout(state: Mapping[str, Any]) -> dict[str, Any]:
    """Key to global shape, dtype and device type of each entry of a model state."""
    return {
        key: {
            "shape": list(value.size()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": device_type(value),
        }
        for key, value in state.items()
        if hasattr(value, "size")
    }


def device_type(value: Any) -> str | None:
    """Device type of a tensor, a DTensor or a sharded tensor; ``None`` without a local shard."""
    shards = getattr(value, "local_shards", None)
    if shards is not None:
        return ",".join(sorted({shard.tensor.device.type for shard in shards()})) or None
    return torch.device(value.device).type
