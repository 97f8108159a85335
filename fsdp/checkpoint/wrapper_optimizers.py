"""States of the optimizers of a wrapped model, all of them in one, nested or flat.

The flat form has keys "state.<parameter>.<state>" and "param_groups.<parameter>.<option>".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from fsdp.checkpoint import states
from fsdp.checkpoint.wrapper_names import as_registered, form
from fsdp.engine.agreement import agree
from fsdp.optim_state.names import Names
from fsdp.plain_names import plain
from fsdp.wrapper import FullyShardedDataParallel
from fsdp.wrapper_unit import units_of

State = dict[str, Any]


def optimizer_state(
    model: nn.Module, optimizers: Sequence[Optimizer], options: StateDictOptions
) -> State:
    """Return the states of ``optimizers``; {} on other ranks than the first if full and offloaded.

    An optimizer that has never stepped gets the entries that it would have, so that a checkpoint
    can be read into them, and is left as it was.

    *Collective*: over the ranks of the model.
    """
    found: State = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        with form(model, options), _started(optimizer):
            one = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        found["state"] |= {plain(key): entry for key, entry in one.get("state", {}).items()}
        for group in one.get("param_groups", ()):
            found["param_groups"].append({**group, "params": [plain(n) for n in group["params"]]})
    if options.full_state_dict and options.cpu_offload and not units_of(model)[0]._is_first_rank():
        return {}
    return _flattened(found) if options.flatten_optimizer_state_dict else found


def load_optimizer_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state: Mapping[str, Any],
    options: StateDictOptions,
) -> None:
    """Load the states of ``optimizers``; parameters without an entry have no state afterwards.

    *Collective*: over the ranks of the model.

    Raises:
        RuntimeError: strict, and ``state`` does not name a parameter that an optimizer trains.
    """
    names = Names(model)
    held = [_held(names, optimizer) for optimizer in optimizers]
    # If the first rank alone has a state, the others wait for it.
    waits = options.full_state_dict and (options.cpu_offload or options.broadcast_from_rank0)
    parts: list[State] = [{} for _ in optimizers]
    problem: Exception | None = None
    if state or not waits:
        try:
            parts = [_part(state, own, held, model, strict=options.strict) for own in held]
        except Exception as error:
            problem = error
    agree([], problem, names.groups, names.device)
    loaded = []
    for optimizer, part in zip(optimizers, parts, strict=True):
        with form(model, options):
            loaded.append(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, part))
    # Only now: what does not fit one of them leaves all of them as they were.
    for optimizer, state_of_one in zip(optimizers, loaded, strict=True):
        optimizer.load_state_dict(state_of_one)


@contextmanager
def _started(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer that never stepped the state of a step that changes nothing, for a while.

    One that has state, or gradients, is left alone.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if optimizer.state or any(param.grad is not None for param in params):
        yield
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    _set_rates(optimizer, [_zero(rate) for rate in rates])
    for param in params:
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
        yield
    finally:
        optimizer.state.clear()
        _set_rates(optimizer, rates)
        for param in params:
            param.grad = None


def _zero(rate: Any) -> Any:
    return torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0


def _set_rates(optimizer: Optimizer, rates: Sequence[Any]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate


def _held(names: Names, optimizer: Optimizer) -> list[list[str]]:
    """Return the plain names of the parameters in each group of ``optimizer``."""
    return [
        [plain(n) for param in group["params"] for n in names.key_of(param).unflat_param_names]
        for group in optimizer.param_groups
    ]


def _part(
    state: Mapping[str, Any],
    own: list[list[str]],
    held: Sequence[list[list[str]]],
    model: nn.Module,
    *,
    strict: bool,
) -> State:
    """Return what of ``state`` belongs to one optimizer, under the names of ``model``."""
    rename = as_registered(model)
    nested = state if "state" in state else states.nested(state, own)
    mine = {name for group in own for name in group}
    others = {name for groups in held for group in groups for name in group} - mine
    groups = [
        {**group, "params": [rename(name) for name in group["params"] if name in mine]}
        for group in nested.get("param_groups", ())
        if not group["params"] or mine & set(group["params"])
    ]
    named = {name for group in nested.get("param_groups", ()) for name in group["params"]}
    missing = sorted(mine - named - set(nested["state"]))
    if missing and strict:
        raise RuntimeError(
            f"Missing optimizer state for parameter '{missing[0]}' in checkpoint, which names "
            f"{len(named)} parameters. To load anyway, use StateDictOptions(strict=False)."
        )
    entries = {rename(key): e for key, e in nested["state"].items() if key not in others}
    return {"state": entries, "param_groups": groups}


def _flattened(nested: State) -> State:
    """Return the flat form.

    Raises:
        NotImplementedError: a state that is neither a tensor nor a number.
    """
    found: State = {}
    for name, entry in nested["state"].items():
        for state, value in entry.items():
            if not isinstance(value, (torch.Tensor, int, float)):
                raise NotImplementedError(
                    "Flattening optimizer state_dict only supports tensor, int, float states now. "
                    f"Type is {type(value)} for '{state}' of '{name}'."
                )
            found[f"state.{name}.{state}"] = value
    for group in nested["param_groups"]:
        for name in group["params"]:
            for option, value in group.items():
                if option != "params":
                    found[f"param_groups.{name}.{option}"] = value
    return found
