"""Data and weights that depend on names alone: the same on every rank, at every call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor


def seed_of(*where: str | int) -> int:
    """Derive a seed from names and numbers.

    Args:
        where: any sequence of strings and integers.

    Returns:
        An integer in [0, 2**63), different for different sequences.
    """
    digest = hashlib.sha256(repr(where).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def _cpu_float32() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        # a context takes part in every call of torch's, of which a model's build has hundreds
        there = torch.get_default_device().type == "cpu"
        with nullcontext() if there else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Build weights on the CPU in float32 from a random stream that belongs to `name`.

    The caller's CPU random state, default device and default dtype are back on exit. Only the CPU
    generator is seeded: `torch.manual_seed` would also reseed the accelerators.

    Args:
        name: what is being built.

    Yields:
        Nothing.
    """
    with torch.random.fork_rng(devices=[]), _cpu_float32():
        torch.default_generator.manual_seed(seed_of(name, "weights"))
        yield


@contextmanager
def drawing(*where: str | int) -> Iterator[torch.Generator]:
    """Draw data on the CPU in float32 for one place in a run, such as (name, rank, step, micro).

    Args:
        where: the place.

    Yields:
        A generator of its own; the global random state is neither read nor changed.
    """
    with _cpu_float32():
        yield torch.Generator().manual_seed(seed_of(*where))


def regression(random: torch.Generator, *shape: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and smooth targets that lie away from zero, so that a fresh model's loss moves.

    Args:
        random: the stream to draw from.
        shape: shape of the inputs, at least two sizes; the last one counts features.
        outputs: features of the targets.

    Returns:
        Inputs of `shape` and targets of `(*shape[:-1], outputs)`; the targets are a function of
        the inputs, the same one in every batch.
    """
    inputs = torch.randn(*shape, generator=random)
    with drawing("teacher", shape[-1], outputs) as fixed:
        teacher = torch.randn(shape[-1], outputs, generator=fixed)  # the same at every call
    return inputs, 0.3 * torch.tanh(inputs @ teacher) + torch.linspace(2.0, 1.0, outputs)


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Half the squared distance per sample, averaged over samples.

    Args:
        prediction: shape (samples, ..., outputs).
        target: the same shape.

    Returns:
        The loss, shape ().
    """
    return 0.5 * (prediction - target).square().sum(-1).mean()
