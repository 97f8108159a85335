"""What is left when a wrapped model has been dropped: after training, and after a failed forward.

Each life ends with every reference of ours gone. What is alive then, the wrapper keeps: bytes of
tensors, objects, and global state that it changed.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from conformance.adapter import Wrapped
from conformance.ranks.fingerprint import changes, fingerprint
from conformance.scenarios.live_bytes import Meter
from conformance.scenarios.run import Run

TRAINED, FAILED = "trained", "failed"


class DeliberateError(RuntimeError):
    """Raised by a module of the model in the middle of a forward."""


@dataclass(frozen=True, kw_only=True)
class Remains:
    """What is still there.

    Attributes:
        live_bytes: of tensors, after a garbage collection.
        uncollected: the same before it.
        objects: which of the wrapped model's parts are alive.
        changed: names of global state that is not as it was.
    """

    live_bytes: int
    uncollected: int
    objects: list[str]
    changed: list[str]


def lives(run: Run, meter: Meter) -> None:
    """Two short lives of a wrapped model, and what is left of each."""
    for life, program in ((TRAINED, _train), (FAILED, _fail)):
        with run.phase(life):
            # what an adapter notes on itself is gone with it
            own = replace(run, adapter=copy.copy(run.adapter))
            run.writer.write("left", vars(_remains(own, meter, program)), life=life)


def _remains(run: Run, meter: Meter, program: Callable[[Run, Wrapped], None]) -> Remains:
    before = meter.read()  # the garbage of an earlier life is collected here
    state = fingerprint(run.device)
    parts = _lived(run, program)
    run.adapter = run.batch = None  # type: ignore[assignment]
    uncollected = meter.uncollected()
    live = meter.read(before)
    return Remains(
        live_bytes=live - before,
        uncollected=uncollected - before,
        objects=sorted({name for name, part in parts if part() is not None}),
        changed=changes(state, fingerprint(run.device)),
    )


def _lived(run: Run, program: Callable[[Run, Wrapped], None]) -> list[tuple[str, Any]]:
    """Weak references to the parts of a wrapped model whose life is over, by what they are."""
    w = run.build()
    program(run, w)
    parts: dict[str, list[Any]] = {
        "the module": [w.module],
        "the optimizer": [w.optimizer],
        "a module inside": list(w.module.modules())[1:],
        "a parameter": list(w.module.parameters()),
    }
    return [(name, weakref.ref(part)) for name, found in parts.items() for part in found]


def _train(run: Run, w: Wrapped) -> None:
    """One step and one evaluation."""
    run.adapter.step(w, run.micro_batches(0), run.model.loss)
    run.adapter.evaluate(w, run.batch(99, 0), run.model.loss)


def _fail(run: Run, w: Wrapped) -> None:
    """A forward that raises in the last unit; on all ranks, so that nobody waits."""
    inside = [m for m in run.adapter.bare(w).modules() if isinstance(m, run.model.units)]
    handle = inside[-1].register_forward_pre_hook(_refuse)
    try:
        run.adapter.forward(w, run.batch(0, 0), run.model.loss)
    except DeliberateError:
        pass
    finally:
        handle.remove()


def _refuse(module: nn.Module, args: Any) -> None:
    raise DeliberateError("this forward was meant to fail")
