"""Save, load into a freshly built pair whose weights and hyper-parameters differ, train on.

Options of the case: ``kind`` is full, sharded, local or save (a directory); ``options`` is default
(the wrapper's own) or explicit (state on CPU, full state on rank 0 only).

At the end a full state with explicit options, or a second directory, is loaded once more, into what
has trained by then, between two evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from conformance.adapter import StateKind, Wrapped, ignore, to_cpu
from conformance.optimizers import with_other_hyperparameters
from conformance.per_rank import each
from conformance.scenarios.run import Run
from conformance.scenarios.states import (
    content,
    layout,
    numbering,
    optimizer_content,
    sharded_elements,
)
from conformance.scenarios.surroundings import left_alone

STEPS_BEFORE = 2
STEPS_AFTER = 2
UNTIL_SAVE = "until the save"
"""Name of what this and other scenarios do up to there."""
BEFORE_LOAD, AFTER_LOAD = 0, 1
"""Indices of the evaluations around a load."""
LATER = "checkpoint_later"
"""Name of the second directory."""
RATE_FACTOR = 0.5
"""What the learning rate is multiplied by between steps, as a scheduler does."""


def checkpoint(run: Run) -> None:
    """Two steps, save, build anew, load, two more steps.

    After a save into a directory the saved pair takes a step before the load, and is saved into
    another one, which is loaded at the very end: what is on disk must not follow, nor stay. States
    in memory may be the wrapper's own tensors, so there it takes none.
    """
    w = run.shared(UNTIL_SAVE, train_until_save)
    in_directory = run.case.option("kind") == "save"
    explicit = run.case.option("kind") == "full" and run.case.option("options") == "explicit"
    with run.phase("save"):
        with left_alone(run, w, "save"):
            saved = _save(run, w)
        run.observe_state(w, step=STEPS_BEFORE - 1, prefix="kept_")
    if run.case.option("kind") == "full":
        with run.phase("bare load"):
            run.writer.write("bare", each(saved.model, lambda state: _in_bare(run, state)))
    if in_directory:
        with run.phase("go on"):
            _go_on(run, w)
            run.adapter.save(w, run.scratch / LATER)
    # in whatever form it was saved, the same comes back, but for buffers that only rank 0 has saved
    from_one = explicit and "buffers" in run.model.traits
    name = "from rank 0's buffers" if from_one else "from the saved state"
    fresh = run.shared(name, partial(_resume, saved=saved))
    if in_directory or explicit:
        with run.phase("load again"):
            _load_again(run, fresh, saved)


def _resume(run: Run, saved: Saved) -> Wrapped:
    """Build another pair, load and train on."""
    with run.phase("build again"):
        fresh = run.build(optimizer=with_other_hyperparameters(run.optimizer), perturbed=True)
        if run.case.option("kind") == "save":
            remember_rates(fresh)  # a directory is read into what is there
    with run.phase("load"):
        with left_alone(run, fresh, "load"):
            _load(run, fresh, saved)
        run.observe_state(fresh, step=STEPS_BEFORE - 1, prefix="loaded_")
        run.observe_stored(fresh, step=STEPS_BEFORE - 1)
    train_on(run, fresh)
    return fresh


def train_until_save(run: Run) -> Wrapped:
    """Build a pair and train it as far as it is saved."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
        remember_rates(w)
    for step in range(STEPS_BEFORE):
        with run.phase(f"step {step}"):
            if step:
                _lower_rates(w)
            run.train_step(w, step)
    return w


def train_on(run: Run, w: Wrapped) -> None:
    """The steps after the load."""
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        with run.phase(f"step {step}"):
            _lower_rates(w)
            run.train_step(w, step)


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
    model = run.asked("model_state", w, state_kind, cpu=cpu, rank0_only=rank0_only)
    run.writer.write("model_state_layout", each(model, layout))
    if kind == "sharded":
        run.writer.write("model_state_pieces", each(model, content))
    elif kind == "local":
        run.writer.write("model_state_elements", each(model, sharded_elements))
    optimizer = run.asked("optim_state", w, state_kind, cpu=cpu, rank0_only=rank0_only)
    if kind != "local":
        _write_optimizer(run, w, optimizer)
    return Saved(model=model, optimizer=optimizer)


def _write_optimizer(run: Run, w: Wrapped, state: Any) -> None:
    numbered = numbering(run.adapter.bare(w), w.optimizer)
    held = each(state, lambda own: optimizer_content(own, numbered))
    run.writer.write("optim_state_layout", each(held, lambda own: layout(own.entries)))
    run.writer.write("optim_state_known", each(held, lambda own: own.known))
    run.writer.write("optim_state_options", each(held, lambda own: list(own.options)))
    run.writer.write("optim_state_pieces", each(held, lambda own: content(own.entries)))


def _go_on(run: Run, w: Wrapped) -> None:
    """One step of the saved pair."""
    w.observe = ignore  # the observer of the step before
    _lower_rates(w)
    result = run.adapter.step(w, run.micro_batches(STEPS_BEFORE), run.model.loss)
    for micro, loss in enumerate(result.losses):
        run.writer.write("kept_loss", loss, step=STEPS_BEFORE, micro=micro)
    run.observe_state(w, step=STEPS_BEFORE, prefix="kept_")


def _load(run: Run, w: Wrapped, saved: Saved) -> None:
    kind = run.case.option("kind")
    if kind == "save":
        run.adapter.load(w, run.scratch / "checkpoint")
        return
    state_kind = cast(StateKind, kind)
    run.adapter.load_model_state(w, state_kind, saved.model)
    run.adapter.load_optim_state(w, state_kind, saved.optimizer)


def _load_again(run: Run, w: Wrapped, saved: Saved) -> None:
    """The second directory, or the full model state; the loss of one batch before and after."""

    def evaluate(index: int) -> None:
        loss = run.asked("evaluate", w, run.batch(99, 0), run.model.loss)
        run.writer.write("eval_loss", loss, index=index)

    evaluate(BEFORE_LOAD)
    if run.case.option("kind") == "save":
        run.adapter.load(w, run.scratch / LATER)
        run.observe_state(w, step=STEPS_BEFORE, prefix="loaded_")
    else:  # optimizers may go on with the very tensors of a state that was loaded
        run.adapter.load_model_state(w, "full", saved.model)
    evaluate(AFTER_LOAD)


def remember_rates(w: Wrapped) -> None:
    """What a scheduler does to an optimizer when it is made."""
    for group in w.optimizer.param_groups:
        group["initial_lr"] = group["lr"]


def _lower_rates(w: Wrapped) -> None:
    for group in w.optimizer.param_groups:
        group["lr"] *= RATE_FACTOR


def _in_bare(run: Run, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A bare, perturbed module's state after a strict load of `state`; empty if there is none."""
    if not state:
        return {}
    bare = run.bare_model(perturbed=True)
    _untie(bare)
    bare.load_state_dict(dict(state), strict=True)
    return {key: to_cpu(value) for key, value in bare.state_dict().items()}


def _untie(module: nn.Module) -> None:
    """Give each name a parameter of its own: else of two entries the second hides the first."""
    seen: set[int] = set()
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) in seen:
                owner._parameters[name] = nn.Parameter(parameter.detach().clone())
            seen.add(id(parameter))
