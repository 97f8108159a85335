"""Checkpoints of whole tensors in the safetensors format, written by the first rank.

Tensors are gathered one round after the other and written where the header says; the header is
known beforehand. What is no tensor stands in the header as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from fsdp.checkpoint.safe_file import MODEL_FILE, OPTIMIZER_FILE, Entry, SafeFile, plain
from fsdp.engine.agreement import together
from fsdp.engine.mesh import message_device
from fsdp.reshard.dealt import Ranks, whole
from fsdp.reshard.ends import Giving
from fsdp.reshard.optimizer import Saved
from fsdp.reshard.plan import Plan
from fsdp.reshard.side import Local, Side
from fsdp.reshard.telling import Group, own_rank, ranks_of
from fsdp.reshard.transport import LIMIT, Transport


def write(where: Path, local: Local, side: Side, group: Group) -> list[str]:
    """Gather a model and its optimizers on the first rank, which writes them; return the files.

    *Collective*. *Memory*: one round of elements; on the first rank, one tensor with its optimizer
    state besides. *Blocks* the host.

    Raises:
        TypeError: something that the format has no words for; on all ranks.
        OSError: the first rank cannot write; on all ranks.
    """
    first = ranks_of(group)[0]
    dealt = side.dealt()
    one = Ranks.whole([first])
    # In the order in which the elements lie at the source, which needs no elementwise plan.
    target = {n: replace(whole(d.shape, one), order=d.order) for n, d in dealt.items()}
    plan = Plan(dealt, target)
    with ExitStack() as stack:
        ends = together(lambda: _Writing(plan, local, side, where, stack, first), group)
        Transport(plan, group, message_device(group), limit=LIMIT).run(ends)
        # Closing writes too, and the other ranks read the files.
        together(lambda: ends.finish(stack), group)
    return [MODEL_FILE] if side.groups is None else [MODEL_FILE, OPTIMIZER_FILE]


class _Writing(Giving):
    """The end that takes: the files, on the first rank."""

    def __init__(
        self, plan: Plan, local: Local, side: Side, where: Path, stack: ExitStack, writer: int
    ) -> None:
        super().__init__(plan.names, side, local)
        self._plan = plan
        self._told = {told.names[0]: told for told in side.tensors}
        self._problem: Exception | None = None
        self._files: dict[str, SafeFile] = {}
        if own_rank() == writer:
            self._make(where, stack)

    def _make(self, where: Path, stack: ExitStack) -> None:
        """Make the files, with their headers and with what is known already."""
        side = self.side
        tensors, states = self._contents()
        header = {"extra": plain(side.objects)}
        self._files["model"] = SafeFile(where / MODEL_FILE, tensors, header, stack)
        if side.groups is None:
            return
        values = {}
        for name, saved in side.states.items():
            kept = {k: v for k, v in saved.values.items() if not isinstance(v, torch.Tensor)}
            values[name] = plain(kept)
        header = {"values": values, "groups": plain(side.groups)}
        self._files["optimizer"] = SafeFile(where / OPTIMIZER_FILE, states, header, stack)
        self._put_values()

    def _contents(self) -> tuple[dict[str, Entry], dict[str, Entry]]:
        tensors: dict[str, Entry] = {}
        states: dict[str, Entry] = {}
        for name, told in self._told.items():
            tensors.update(dict.fromkeys(told.names, Entry(told.dtype, told.shape)))
            saved = self.side.states.get(name, _NOTHING)
            for key, dtype in saved.elements.items():
                states[f"state.{name}.{key}"] = Entry(dtype, told.shape)
            for key, value in saved.values.items():
                if isinstance(value, torch.Tensor):
                    states[f"state.{name}.{key}"] = Entry(value.dtype, ())
        return tensors, states

    def _put_values(self) -> None:
        for name, saved in self.side.states.items():
            for key, value in saved.values.items():
                if isinstance(value, torch.Tensor):
                    self._files["optimizer"].put(f"state.{name}.{key}", value)

    def open(self, number: int) -> Sequence[torch.Tensor]:
        """Return memory for a whole tensor and its optimizer state."""
        numel = math.prod(self._plan.target[number].shape)
        return [torch.empty(numel, dtype=dtype) for dtype in self.riders(number)]

    def close(self, number: int, filled: Sequence[torch.Tensor]) -> None:
        """Write them; an error waits until the other ranks have sent everything."""
        dealt = self._plan.target[number]
        order = dealt.order or tuple(range(len(dealt.shape)))
        stored = [dealt.shape[dim] for dim in order]
        back = [order.index(dim) for dim in range(len(order))]
        try:
            value, *entries = [each.view(stored).permute(back) for each in filled]
            for name in self._told[self.names[number]].names:
                self._files["model"].put(name, value)
            for key, entry in zip(self.keys(number), entries, strict=True):
                self._files["optimizer"].put(f"state.{self.names[number]}.{key}", entry)
        except OSError as error:
            self._problem = self._problem or error

    def finish(self, stack: ExitStack) -> None:
        """Close the files; raise what went wrong in writing."""
        if self._problem is not None:
            raise self._problem
        stack.close()


_NOTHING = Saved(elements={}, values={})
