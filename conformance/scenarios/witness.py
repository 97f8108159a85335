"""Two steps, watched from inside the model: what its modules see, and how often hooks run.

The second step's forward runs under autocast. Hooks are registered on the wrapped model, on the
modules that the user's model has and on the parameters that the wrapper shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conformance.adapter import Wrapped, clean_fqn
from conformance.per_rank import PerRank, each
from conformance.scenarios.run import Run

STEPS = 2
FORWARD, RECOMPUTE = "forward", "recompute"


@dataclass(kw_only=True)
class Witness:
    """Counts and remembers what hooks are called with.

    Attributes:
        part: what the scenario is doing.
        calls: by module and part, how often its forward began.
        backward: by module, how often its backward ended.
        gradients: by parameter, how often its gradient was seen.
        shapes: by parameter of a module, its size and strides when its forward began.
    """

    part: str = FORWARD
    calls: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    gradients: Counter[str] = field(default_factory=Counter)
    shapes: dict[str, list[Any]] = field(default_factory=dict)

    def attend(self, run: Run, w: Wrapped) -> None:
        """Register on every module of the user's model that has parameters of its own."""
        owners = {
            path: sorted(module._parameters)
            for path, module in run.bare_model().named_modules()
            if module._parameters
        }
        # a wrapper's own modules come before what they wrap
        known = {clean_fqn(f"{path}."): m for path, m in run.adapter.bare(w).named_modules()}
        for path, names in owners.items():
            module = known[f"{path}."]
            module.register_forward_pre_hook(self._on_forward(path, names))
            module.register_full_backward_hook(self._on_backward(path))
        for name, parameter in run.adapter.bare(w).named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._on_gradient(clean_fqn(name)))

    def _on_forward(self, path: str, names: list[str]) -> Callable[..., None]:
        def seen(module: nn.Module, args: Any) -> None:
            self.calls[f"{path}/{self.part}"] += 1
            for name in names:
                value = getattr(module, name)
                if isinstance(value, Tensor):
                    self.shapes[f"{path}.{name}"] = [list(value.shape), list(value.stride())]

        return seen

    def _on_backward(self, path: str) -> Callable[..., None]:
        def seen(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            self.backward[path] += 1

        return seen

    def _on_gradient(self, name: str) -> Callable[[Tensor], None]:
        def seen(gradient: Tensor) -> None:
            self.gradients[name] += 1

        return seen


def witness(run: Run) -> None:
    """Two steps with everything observed at the end of each."""
    with run.phase("build"):
        w = run.build()
        run.observe_built(w)
        watching = Witness()
        watching.attend(run, w)
    for step in range(STEPS):
        with run.phase(f"step {step}"):
            _step(run, w, step, watching)


def _step(run: Run, w: Wrapped, step: int, watching: Witness) -> None:
    batch, adapter = run.batch(step, 0), run.adapter
    virtual = len(batch.values) if isinstance(batch, PerRank) else 1
    run.mark(f"step {step}/micro 0")
    watching.part = FORWARD
    with torch.autocast(run.device.type, dtype=torch.bfloat16, enabled=step == STEPS - 1):
        loss = adapter.forward(w, batch, run.model.loss)
    watching.part = RECOMPUTE
    adapter.backward(w, loss)
    adapter.optimizer_step(w)
    adapter.zero_grad(w)
    run.writer.write("loss", each(loss, lambda own: own.detach()), step=step, micro=0)
    run.writer.write("parameters_seen", watching.shapes, step=step)
    for what in ("calls", "backward", "gradients"):
        counts: Counter[str] = getattr(watching, what)
        each_rank = {name: count / virtual for name, count in sorted(counts.items())}
        run.writer.write(f"hooks_{what}", each_rank, step=step)
