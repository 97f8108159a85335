"""What an optimizer does, found out on a few numbers: by element or not, and what it keeps.

A shard may be stepped by itself only if stepping on a part gives the part of the step on the
whole. That is tried: a copy of the optimizer steps on 16 numbers, and two more on 5 and 11 of them.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

_NUMEL, _CUT, _STEPS = 16, 5, 2
_TOLERANCE = 1e-4
# The least rate of a trial: under warm-up, or rounded away, steps would show nothing.
_RATE = 0.01
# What every optimizer has; the last three are put there by schedulers and gradient scalers.
_OF_ALL = frozenset(
    {
        "defaults",
        "state",
        "param_groups",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "step",
        "grad_scale",
        "found_inf",
    }
)


def is_elementwise(
    optimizer: Optimizer, group: Mapping[str, Any], device: torch.device
) -> bool | None:
    """Return whether ``optimizer`` steps on each element by itself, with the options of ``group``.

    None if it cannot be tried: it keeps more than plain values beside its groups and states, so
    that a copy would not be independent of it; it needs a closure; it draws random numbers; it
    moves nothing. A rate of zero, or a small one, is a larger one in the trial.

    Neither the optimizer nor its parameters nor random generators change. *Memory*: a few numbers.
    """
    if not _is_plain(optimizer):
        return None
    with _kept_generators(device), torch.enable_grad():
        try:
            before = _generators(device)
            numbers = _numbers(device)
            start, whole = _begun(optimizer, group, *numbers)
            if any(not torch.equal(b, a) for b, a in zip(before, _generators(device), strict=True)):
                return None
            parts = [
                _stepped(optimizer, group, start, *(each[at] for each in numbers)).values
                for at in (slice(None, _CUT), slice(_CUT, None))
            ]
        except Exception:
            return None
    moved = (whole.values - numbers[0]).abs().max().item()
    if moved == 0:
        return None
    error = (torch.cat(parts) - whole.values).abs().max().item()
    return error <= _TOLERANCE * moved


def kept_entries(
    optimizer: Optimizer, group: Mapping[str, Any], dims: int, device: torch.device
) -> frozenset[str] | None:
    """Return what tensors and numbers the state of a parameter of ``dims`` dims has after a step.

    With the options of ``group``; None if that cannot be tried, as for ``is_elementwise``.

    Neither the optimizer nor its parameters nor random generators change. *Memory*: a few numbers.
    """
    if not _is_plain(optimizer):
        return None
    shape = (4, 4, *[1] * (dims - 2)) if dims > 1 else (_NUMEL,)[:dims]
    with _kept_generators(device), torch.enable_grad():
        try:
            values, gradients = (each[: math.prod(shape)].view(shape) for each in _numbers(device))
            _, stepped = _begun(optimizer, group, values, gradients)
        except Exception:
            return None
    return stepped.entries


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether a copy of the attributes shares nothing that a step could change."""
    return all(
        _is_value(value)
        for name, value in vars(optimizer).items()
        if name not in _OF_ALL and not name.endswith("_hooks")
    )


def _is_value(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_value, value))
    if isinstance(value, Mapping):
        return all(_is_value(each) for pair in value.items() for each in pair)
    return value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    )


def _numbers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (16,) and gradients (16,) whose norms differ between the two parts."""
    at = torch.arange(1, _NUMEL + 1, dtype=torch.float32)
    return (at.sin() * at / 4).to(device), ((at * 1.7).cos() * at / 8).to(device)


def _made_at_once(
    optimizer: Optimizer, group: Mapping[str, Any], *, scalar: bool
) -> Mapping[str, Any]:
    """Return the state of a parameter with what it has per element as one number, which all have.

    Empty if none has a state, or one that is not the same for all elements.
    """
    stepped = (p for p in group["params"] if p in optimizer.state and p.numel())
    known = [p for p in stepped if scalar == (p.dim() == 0)]
    if not known:
        return {}
    param = known[0]
    found: dict[str, Any] = {}
    for key, value in optimizer.state[param].items():
        of_elements = isinstance(value, torch.Tensor) and value.shape == param.shape
        if of_elements and value.min() != value.max():
            return {}
        found[key] = _PerElement(value.max().item()) if of_elements else value
    return found


class _PerElement(float):
    """A number that stands for a tensor shaped like the parameter."""


@dataclass(frozen=True, kw_only=True)
class _Stepped:
    """What a trial has left: the parameter, and which tensors and numbers its state has."""

    values: torch.Tensor
    entries: frozenset[str]


def _begun(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: torch.Tensor,
    gradients: torch.Tensor,
) -> tuple[Mapping[str, Any], _Stepped]:
    """Return from which state a trial may start, and what it leaves."""
    try:
        return {}, _stepped(optimizer, group, {}, values, gradients)
    except KeyError:  # of torch 2.11 Adagrad makes its states with itself, never in a step
        start = _made_at_once(optimizer, group, scalar=values.dim() == 0)
        return start, _stepped(optimizer, group, start, values, gradients)


def _stepped(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    start: Mapping[str, Any],
    values: torch.Tensor,
    gradients: torch.Tensor,
) -> _Stepped:
    """Make two steps of a copy of ``optimizer`` on ``values``, from the state ``start``."""
    param = torch.nn.Parameter(values.clone())
    own = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    if "lr" in own:
        own["lr"] = _rate(own["lr"])
    probe: Optimizer = object.__new__(type(optimizer))
    attributes = {
        name: OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value)
        for name, value in vars(optimizer).items()
        if name not in ("step", "state", "param_groups", "grad_scale", "found_inf")
    }
    vars(probe).update(attributes)
    probe.state = defaultdict(dict)
    for key, value in start.items():
        whole = isinstance(value, _PerElement)
        probe.state[param][key] = torch.full_like(values, value) if whole else copy.deepcopy(value)
    probe.param_groups = [{**own, "params": [param]}]
    step = type(optimizer).step
    # Not through the hooks of all optimizers: they would take this for a step on a model.
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    for number in range(_STEPS):
        param.grad = gradients * (1 + number)
        step(probe)
    left = probe.state.get(param, {})
    numbers = (key for key, value in left.items() if isinstance(value, (torch.Tensor, int, float)))
    return _Stepped(values=param.detach(), entries=frozenset(numbers))


def _rate(rate: Any) -> Any:
    """Return a rate of the same kind that moves something."""
    if isinstance(rate, torch.Tensor):
        return rate.detach().clamp(min=_RATE)
    return max(rate, _RATE) if isinstance(rate, (int, float)) else rate


def _kept_generators(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which generators are where they were."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _generators(device: torch.device) -> list[torch.Tensor]:
    found = [torch.get_rng_state()]
    if device.type != "cpu":
        found.append(torch.get_device_module(device).get_rng_state(device))
    return found
