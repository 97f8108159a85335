"""Optimizers that compute with whole tensors, which are not there: refused, never silently wrong.

Before its first step an optimizer is known by name, or tried (``probe.py``); after it, and when a
state is saved, the shapes of its states tell. An optimizer is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from fsdp.engine.optimizer_guard import look_at_optimizers
from fsdp.optim_state.probe import is_elementwise
from fsdp.optim_state.vocabulary import Entry, Member

# Lower-case names of classes that need whole tensors, whatever a trial would say.
_KNOWN = frozenset(
    {
        *("adafactor", "came", "sm3", "muon", "soap", "shampoo", "distributedshampoo", "kfac"),
        *("lamb", "lars", "novograd", "sam", "asam", "lbfgs", "galoreadamw"),
    }
)
# They see all parameters as one vector in any case, so that end to end is as good as apart.
_ONE_VECTOR = frozenset({"lbfgs"})


def expect_elementwise(param: nn.Parameter, name: str, *, is_part: bool) -> None:
    """Let an optimizer that holds ``param`` raise if it needs whole tensors.

    Args:
        param: a part of tensors, or several tensors in one.
        name: of the first of them.
        is_part: whether other ranks have the rest.

    *Host cost*: a few tiny steps at the first step of an optimizer, a lookup at every other.
    """
    look_at_optimizers(param, name, _check_parts if is_part else _check_joined)


def check_entry(member: Member, entry: Entry) -> None:
    """Refuse state of ``member`` that has not one value per element, or one for all.

    The state of a parameter that is whole may be anything.

    Raises:
        NotImplementedError: such a state.
    """
    if not member.is_part:
        return
    for state, what in _odd_states(entry, member.shape):
        shown = ", ".join(member.key.unflat_param_names[:3])
        _refuse(f"the optimizer state '{state}' has {what}", shown, tuple(member.shape))


def _check_joined(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Look at an optimizer of several whole tensors in one."""
    if not _is_known(optimizer, _ONE_VECTOR):
        _check_parts(optimizer, names)


def _check_parts(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Try each group with parameters of ``names``, which are parts.

    Raises:
        NotImplementedError: it needs whole tensors.
    """
    unknown = False
    for group in optimizer.param_groups:
        param = next((each for each in group["params"] if each in names), None)
        if param is None:
            continue
        # What is known counts more than a trial on a few numbers.
        known = _is_known(optimizer, _KNOWN)
        answer = False if known else is_elementwise(optimizer, group, param.device)
        if answer is False:
            what = f"{type(optimizer).__name__} does not step element by element"
            _refuse(what, names[param], tuple(param.shape))
        unknown |= answer is None
    if unknown:
        optimizer.register_step_post_hook(_ShapesOnce(names))


class _ShapesOnce:
    """Looks at the states of an optimizer that could not be tried, after its first step."""

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._names = names

    def __call__(self, optimizer: Optimizer, *_args: Any) -> None:
        names, self._names = self._names, {}
        for param, entry in optimizer.state.items():
            if param not in names or not isinstance(entry, Mapping) or _is_quantised(entry):
                continue
            for state, what in _odd_states(entry, param.shape):
                text = f"{type(optimizer).__name__} has a state '{state}' with {what}"
                _refuse(text, names[param], tuple(param.shape))


def _is_known(optimizer: Optimizer, names: frozenset[str]) -> bool:
    return any(each.__name__.lower() in names for each in type(optimizer).__mro__)


def _is_quantised(entry: Entry) -> bool:
    """Whether integers stand for the elements: the scales beside them have shapes of their own."""
    tensors = [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return any(t.dim() > 0 and t.dtype in (torch.uint8, torch.int8) for t in tensors)


def _odd_states(entry: Entry, shape: torch.Size) -> Iterator[tuple[str, str]]:
    """Yield (name, what is odd) of the states that have neither ``shape`` nor no dims."""
    for name, value in entry.items():
        if isinstance(value, torch.Tensor):
            if value.dim() and value.shape != shape:
                yield name, f"the shape {tuple(value.shape)}"
        elif any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in tree_leaves(value)):
            yield name, f"tensors inside a {type(value).__name__}"


def _refuse(what: str, name: str, shape: tuple[int, ...]) -> NoReturn:
    raise NotImplementedError(
        f"{what}: it computes with whole tensors, and is given '{name}' as a part, or with others, "
        f"in the shape {shape}. Use an optimizer that works element by element (SGD, Adam, AdamW, "
        "Adagrad, RMSprop, ...), or ShardingStrategy.NO_SHARD with use_orig_params=True."
    )
