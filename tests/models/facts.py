"""What a model case does, measured by running it. Shared by the tests of this folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models import Batch, ModelCase, map_tensors

STEPS = 6
RANKS = (0, 1)

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


def tensors(batch: Batch) -> list[Tensor]:
    """All tensors of a batch, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def gradients(
    case: ModelCase, batches: Iterable[Batch], device: torch.device | None = None
) -> dict[str, Tensor | None]:
    """Gradient of the mean loss over `batches` of a fresh model, per parameter."""
    device = device or torch.device("cpu")
    module = case.build().to(device)
    losses = [case.loss(module, map_tensors(lambda t: t.to(device), b)) for b in batches]
    torch.stack(losses).mean().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def used_gradients(case: ModelCase, *batches: Batch) -> dict[str, Tensor]:
    """The gradients that are not None."""
    return {n: g for n, g in gradients(case, batches).items() if g is not None}


def train(case: ModelCase, optimizer: str) -> tuple[list[float], nn.Module]:
    """Six steps on the mean of two ranks' losses; the mean losses and the trained module."""
    module = case.build()
    steps = OPTIMIZERS[optimizer](p for p in module.parameters() if p.requires_grad)
    losses = []
    for step in range(STEPS):
        steps.zero_grad()
        loss = torch.stack([case.loss(module, case.batch(r, step, 0)) for r in RANKS]).mean()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, module


def owners(case: ModelCase, module: nn.Module) -> dict[str, str]:
    """For each registered parameter name, tied ones included, the name of its innermost unit."""
    units = [name for name, inner in module.named_modules() if isinstance(inner, case.units)]
    return {
        name: max((u for u in units if name.startswith(u + ".")), key=len, default="")
        for name, _ in module.named_parameters(remove_duplicate=False)
    }


def calls_and_outputs(case: ModelCase) -> tuple[Counter[str], dict[str, Any]]:
    """How often each module runs in one loss, and what each returned last."""
    module = case.build()
    calls: Counter[str] = Counter()
    outputs: dict[str, Any] = {}
    for name, inner in module.named_modules():

        def record(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            calls[name] += 1
            outputs[name] = output

        inner.register_forward_hook(record)
    case.loss(module, case.batch(0, 0, 0))
    return calls, outputs


def left_out(case: ModelCase, found: dict[str, Tensor | None]) -> set[str]:
    """Trainable parameters without a gradient."""
    trainable = {name for name, p in case.build().named_parameters() if p.requires_grad}
    return {name for name in trainable if found[name] is None}


def calls_in_backward(case: ModelCase) -> int:
    """How many modules run while backward does."""
    module, calls = case.build(), list[nn.Module]()
    for inner in module.modules():
        inner.register_forward_hook(lambda inner, args, output: calls.append(inner))
    loss = case.loss(module, case.batch(0, 0, 0))
    before = len(calls)
    loss.backward()
    return len(calls) - before


def mixed(case: ModelCase, module: nn.Module) -> bool:
    """Whether a unit, or the root, holds frozen and trainable parameters."""
    owner, kinds = owners(case, module), dict[str, set[bool]]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        kinds.setdefault(owner[name], set()).add(parameter.requires_grad)
    return any(len(found) > 1 for found in kinds.values())


def traits(case: ModelCase) -> set[str]:
    """The traits that a case has, found without looking at those it states."""
    module = case.build()
    inputs = tensors(case.batch(0, 0, 0))
    parameters = list(module.parameters())
    named = list(module.named_parameters(remove_duplicate=False))
    grads, later = (gradients(case, [case.batch(0, step, 0)]) for step in (0, 1))
    beside = gradients(case, [case.batch(1, 0, 0)])
    calls, outputs = calls_and_outputs(case)
    units = {name for name, inner in module.named_modules() if isinstance(inner, case.units)}
    data = [t.numel() for t in tensors([case.batch(0, 0, 0), *outputs.values()])]
    measured = {
        "tied": len(named) > len(parameters),
        "uneven": not any((*p.shape, 1)[0] % k == 0 for p in parameters for k in (2, 3, 4)),
        "tiny": any(p.numel() < len(RANKS) for p in parameters),
        "unused": bool(left_out(case, grads) & left_out(case, later)),
        "varying": left_out(case, grads) != left_out(case, later),
        "routed": left_out(case, grads) != left_out(case, beside),
        "recomputed": calls_in_backward(case) > 0,
        "mixed": mixed(case, module),
        "scalar": any(p.dim() == 0 for p in parameters),
        "frozen": not all(p.requires_grad for p in parameters),
        "buffers": any(True for _ in module.buffers()),
        "batchnorm": any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()),
        "nested_io": any(not isinstance(outputs.get(u, inputs[0]), Tensor) for u in units),
        "reused": any(calls[unit] > 1 for unit in units),
        "strided": not all(p.is_contiguous() for p in parameters),
        "tokens": not any(t.is_floating_point() for t in inputs),
        "wide": sum(p.numel() for p in parameters) > 8 * sum(data),
        "images": any(t.dim() == 4 and not t.is_contiguous() for t in inputs),
    }
    return {name for name, holds in measured.items() if holds}
