"""The states of a unit and of a tree of units, and which changes are legal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp.engine.unit import FSDPState


class TrainingState(Enum):
    """Where a unit, or a parameter group, is in an iteration."""

    # Enum's own hash is a function in Python, and every change of state looks into a table.
    __hash__ = object.__hash__

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class Prefetches(Enum):
    """When backward starts to gather the group that ran before the present one in forward."""

    BEFORE_GRADIENTS = auto()
    AFTER_GRADIENTS = auto()
    NEVER = auto()


_S = TrainingState
TRAINING_STATE_CHANGES: frozenset[tuple[TrainingState, TrainingState]] = frozenset(
    {
        (_S.IDLE, _S.FORWARD),
        (_S.IDLE, _S.PRE_BACKWARD),
        # Backward never came to this group: the end of backward closes it all the same.
        (_S.IDLE, _S.POST_BACKWARD),
        (_S.IDLE, _S.SUMMON_FULL_PARAMS),
        (_S.SUMMON_FULL_PARAMS, _S.IDLE),
        (_S.FORWARD, _S.IDLE),
        # Several modules of one group, one after the other.
        (_S.FORWARD, _S.FORWARD),
        # Some modules of a group ran, and backward goes through them alone.
        (_S.FORWARD, _S.POST_BACKWARD),
        # One of its modules ran alone after the group was complete; backward of the rest comes.
        (_S.FORWARD, _S.PRE_BACKWARD),
        (_S.PRE_BACKWARD, _S.POST_BACKWARD),
        (_S.PRE_BACKWARD, _S.IDLE),
        # A module that ran several times has one backward per run.
        (_S.POST_BACKWARD, _S.PRE_BACKWARD),
        (_S.POST_BACKWARD, _S.POST_BACKWARD),
        # Recomputation of an earlier run starts after a later one was closed.
        (_S.POST_BACKWARD, _S.FORWARD),
        (_S.POST_BACKWARD, _S.IDLE),
        (_S.IDLE, _S.IDLE),
    }
)


def check_change(who: str, old: TrainingState, new: TrainingState) -> None:
    """Raise RuntimeError unless the table has the change from ``old`` to ``new``."""
    if (old, new) not in TRAINING_STATE_CHANGES:
        raise RuntimeError(
            f"FSDP unit '{who}' cannot go from {old.name} to {new.name}. If an exception was "
            "caught in forward or backward, go on with a forward of the root, which starts afresh."
        )


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How messages about the units of a face speak.

    Attributes:
        module: what a unit is called.
        sharing: what to do about a parameter in two groups.
        names_agree: whether parameters must be called the same on all ranks.
        clean: turns the name of a module or parameter in the tree into that in the user's model.
    """

    module: str = "FSDP module"
    sharing: str = "Put all modules that share it in one group."
    names_agree: bool = True
    clean: Callable[[str], str] = str


class FSDPStateContext:
    """What the units of one tree share: one per root."""

    def __init__(self) -> None:
        self.all_states: list[FSDPState] = []  # in ``named_modules`` order, each once
        # The unit whose forward is the outermost now; not always the root of the tree, as when
        # only an encoder is evaluated.
        self.iter_forward_root: FSDPState | None = None
        self.thread: int | None = None  # on which the last forward began
        self.outdated = False  # whether one of its optimizers has stepped on another one since
        self.post_backward_final_callback_queued = False
        self.is_last_backward = True
        self.backwards = 0  # how many are over
        self.post_optim_event: Any = None
        self.order_start = 0  # length of the order of forward when this forward began

    def is_stepped_on(self, held: Set[int]) -> bool:
        """Whether a parameter that users see is among ``held``: those of an optimizer, by id."""
        return any(
            id(param) in held
            for state in self.all_states
            for group in state.groups
            for param in group.options.exposure.optimized(group.fsdp_params)
        )

    def after_step(self, *, surely: bool) -> None:
        """Let no unit keep what an optimizer has made old.

        After a step on another thread than that of forward, which may be in the midst of anything,
        the next forward does.

        ``surely``: the optimizer has parameters of this tree. Another one, on another thread, steps
        at any time: ranks that heeded it would gather unequally often.
        """
        if self.thread in (None, threading.get_ident()):
            self.give_up()
        elif surely:
            self.outdated = True

    def give_up(self) -> None:
        """Let no unit keep what was gathered before now."""
        self.outdated = False
        for state in self.all_states:
            for group in state.groups:
                group.after_step()
