"""Whether a state is of the kind of optimizer that is to load it: told by names, not by classes.

A state does not say who made it. An optimizer is known by the entries that it keeps for a
parameter, which a trial shows (``probe.py``), and by the options of its groups.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from fsdp.optim_state.probe import kept_entries

# What says nothing of the kind: versions of torch add the first, schedulers and averages the rest.
_OF_ANY_KIND = frozenset(
    {
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "decoupled_weight_decay",
        "initial_lr",
        "max_lr",
        "min_lr",
        "max_momentum",
        "base_momentum",
        "swa_lr",
    }
)


@dataclass(frozen=True, kw_only=True)
class Given:
    """The state that a parameter is to get: what it is called, and which entries there are."""

    name: str
    entries: Collection[str]


def check_same_kind(
    optimizers: Sequence[Optimizer],
    options: Sequence[Mapping[str, Any]],
    given: Mapping[torch.Tensor, Given],
) -> None:
    """Refuse the state of another kind of optimizer; values of options do not matter.

    It is of another kind if an entry is missing that the optimizer keeps *with the options that
    come with the state*: what is switched on or off by an option (``amsgrad``, ``momentum``) comes
    and goes with it. Or if options are missing, and there are others that the optimizer lacks;
    one of both alone may be another version of it, or a scheduler's. Where no parameter has a
    state, an optimizer of torch refuses the very options of another one of torch.

    Args:
        optimizers: those that are to load it.
        options: what each of their parameter groups gets, one group after another.
        given: what parameters get; those without a state have no entry.

    Raises:
        ValueError: names the entries and options of both.
    """
    groups = ((each, group) for each in optimizers for group in each.param_groups)
    for (optimizer, group), new in zip(groups, options, strict=True):
        own = optimizer.defaults.keys() & group.keys()
        lacks, strange = own - new.keys(), new.keys() - group.keys()
        other = bool(lacks - _OF_ANY_KIND and strange - _OF_ANY_KIND)
        kept = _Kept(optimizer, {**group, **new})
        states = [(given[param], kept.of(param)) for param in group["params"] if param in given]
        short: list[tuple[Given | None, frozenset[str]]] = [
            (state, keeps) for state, keeps in states if keeps and keeps - set(state.entries)
        ]
        if not states and group["params"] and type(optimizer) in _of_torch():
            told = new.keys() - _OF_ANY_KIND
            other |= told != own - _OF_ANY_KIND and told in _options_of_torch()
        if short or other:
            state, keeps = (short or states or [(None, None)])[0]
            raise ValueError(_text(type(optimizer).__name__, own, new, state, keeps))


class _Kept:
    """What an optimizer keeps with the options of ``group``, tried once for each form."""

    def __init__(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        self._optimizer, self._group = optimizer, group
        self._found: dict[tuple[int, torch.device], frozenset[str] | None] = {}

    def of(self, param: torch.Tensor) -> frozenset[str] | None:
        """Return the entries of ``param``; None where nobody knows."""
        form = (param.dim(), param.device)
        if form not in self._found:
            self._found[form] = kept_entries(self._optimizer, self._group, *form)
        return self._found[form]


@cache
def _options_of_torch() -> list[frozenset[str]]:
    """Return the names that tell the kind, of each of torch's optimizers."""
    number = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))  # Muon takes matrices only
    return [frozenset(kind([number]).defaults) - _OF_ANY_KIND for kind in _of_torch()]


def _of_torch() -> list[Any]:
    exported = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    kinds = [each for each in exported if issubclass(each, Optimizer) and each is not Optimizer]
    return [kind for kind in kinds if kind.__module__.startswith("torch.optim")]


def _text(
    kind: str,
    own: Collection[str],
    new: Collection[str],
    state: Given | None,
    keeps: Collection[str] | None,
) -> str:
    has = f"for '{state.name}' {_listed(state.entries)}" if state else "no entries"
    here = "" if keeps is None else f"{_listed(keeps)}, with "
    return (
        f"the state to load is of another optimizer: it has {has}, with the options "
        f"{_listed(new)}; this {kind} keeps {here}the options {_listed(own)}. Make the optimizer "
        "whose state it is, or load the model alone."
    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "no entries"
