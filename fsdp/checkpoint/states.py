"""States of a model and its optimizers for ``torch.distributed.checkpoint``.

The functions of ``torch.distributed.checkpoint.state_dict``, with the same names and signatures.
They differ where torch's refuse or spoil a state: a parameter that never had a gradient has no
optimizer state, neither before saving nor after loading. ``LoadPlanner`` says so to
``torch.distributed.checkpoint.load``, which would otherwise miss its entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_helpers
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
)

from fsdp.plain_names import plain

__all__ = [
    "LoadPlanner",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Any,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of ``optimizers``; parameters without an entry have no state afterwards.

    *Collective*: over all ranks if the state is full, on every rank or on rank 0 alone.

    Raises:
        RuntimeError: strict, and the state does not name a trainable parameter at all.
    """
    options = options or StateDictOptions()
    chosen = _as_tuple(optimizers)
    names = {name for optimizer in chosen for _, name in _trainable(model, optimizer)}
    if options.flatten_optimizer_state_dict:
        optim_state_dict = _unflattened(model, chosen, optim_state_dict)
        options = dataclasses.replace(options, flatten_optimizer_state_dict=False)
    groups, with_state = _entries(optim_state_dict, broadcast=options.broadcast_from_rank0)
    missing = sorted(names - groups.keys() - with_state)
    if missing and options.strict:
        raise RuntimeError(
            f"Missing optimizer state for parameter '{missing[0]}' in checkpoint, which names "
            f"{len(groups)} parameters. To load anyway, use StateDictOptions(strict=False)."
        )
    if options.full_state_dict:
        _admit_options(model, chosen, groups)
    torch_helpers.set_optimizer_state_dict(
        model, chosen, optim_state_dict, options=dataclasses.replace(options, strict=False)
    )
    for optimizer in chosen:
        for param, name in _trainable(model, optimizer):
            if name not in with_state:
                # What torch made up to have something to load into.
                optimizer.state.pop(param, None)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Any,
    optim_state_dict: Any,
    options: StateDictOptions | None = None,
) -> Any:
    """Load the states of ``model`` and ``optimizers``; see ``set_optimizer_state_dict``.

    Returns:
        The keys of the model that were missing or unexpected.
    """
    chosen = _as_tuple(optimizers)
    if chosen:
        set_optimizer_state_dict(model, chosen, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


class LoadPlanner(DefaultLoadPlanner):
    """Lets a checkpoint lack the optimizer state of a parameter that never had one.

    ``load(state, checkpoint_id=..., planner=LoadPlanner())`` takes the entries of such parameters
    out of ``state``; ``set_state_dict`` then leaves them without a state. Any other missing entry
    is an error as before.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> None:
        """Look at what was saved before anything is planned."""
        if metadata is not None:
            saved = metadata.state_dict_metadata.keys()
            for prefix, optimizer_state in _optimizer_states(state_dict, ""):
                _drop_absent(prefix, optimizer_state, saved)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _optimizer_states(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (key, per-parameter states) of every optimizer state in ``tree``."""
    if isinstance(tree.get("state"), dict) and "param_groups" in tree:
        yield f"{prefix}state.", tree["state"]
        return
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _optimizer_states(value, f"{prefix}{key}.")


def _drop_absent(prefix: str, states: dict[str, Any], saved: Collection[str]) -> None:
    for name in list(states):
        start = f"{prefix}{name}."
        if not any(key.startswith(start) for key in saved):
            del states[name]


def _as_tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    if isinstance(optimizers, torch.optim.Optimizer):
        return (optimizers,)
    return tuple(optimizers)


def _trainable(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[torch.Tensor, str]]:
    """Return the trainable parameters of ``optimizer`` with their names in ``model``."""
    names = {param: plain(name) for name, param in model.named_parameters()}
    return [
        (param, names[param])
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and param in names
    ]


def _admit_options(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    groups: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give groups the options that only the saved ones have, such as a scheduler's first rate.

    Of a full state torch takes none that the optimizer lacks: it raises, or leaves them out on
    the ranks to which they are sent.
    """
    for optimizer in optimizers:
        names = dict(_trainable(model, optimizer))
        for group in optimizer.param_groups:
            for param in group["params"]:
                for key, value in groups.get(names.get(param, ""), {}).items():
                    group.setdefault(key, value)


def _entries(state: Any, *, broadcast: bool) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """Return the options of the group of each named parameter, and which have an entry."""
    groups = {name: _options(g) for g in state.get("param_groups", ()) for name in g["params"]}
    with_state = {name for name, entry in state.get("state", {}).items() if entry}
    if broadcast:
        box: list[Any] = [(groups, with_state)]
        dist.broadcast_object_list(box, src=0)
        groups, with_state = box[0]
    return groups, with_state


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _unflattened(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], flat: Mapping[str, Any]
) -> dict[str, Any]:
    names = {param: plain(name) for name, param in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return nested(flat, [[names[param] for param in group["params"]] for group in groups])


def nested(flat: Mapping[str, Any], groups: Iterable[Iterable[str]]) -> dict[str, Any]:
    """Nest "state.<name>.<key>" and "param_groups.<name>.<key>" for ``groups`` of names."""
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    for group in groups:
        saved: dict[str, Any] = {"params": []}
        for name in group:
            options = _below(flat, f"param_groups.{name}.")
            if options:
                saved["params"].append(name)
                saved.update(options)
            entry = _below(flat, f"state.{name}.")
            if entry:
                found["state"][name] = entry
        found["param_groups"].append(saved)
    return found


def _below(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in flat.items() if key.startswith(prefix)}
