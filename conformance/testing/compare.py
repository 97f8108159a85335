"""Equality that knows tensors, inside containers too, each rank for itself.

Must not issue collectives: two DTensors are compared by mesh, placements and local part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

__all__ = ["assert_equal", "assert_not_equal"]


def assert_equal(  # noqa: PLR0913 - the options of `torch.testing.assert_close`
    first: Any,
    second: Any,
    msg: Any = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    equal_nan: bool = True,
    exact_dtype: bool = True,
    exact_device: bool = False,
) -> bool:
    """Compare if either side holds tensors or floats; False if that is not this function's.

    Args:
        first: anything.
        second: anything; a number may be compared with a tensor.
        msg: put in front of the message.
        atol: absolute tolerance; with None, the one of `torch.testing.assert_close` for the dtype.
        rtol: relative tolerance; given together with `atol`.
        equal_nan: whether two NaN are equal.
        exact_dtype: whether dtypes must agree.
        exact_device: whether devices must agree.

    Raises:
        AssertionError: they differ.
        TypeError: a DTensor beside a plain tensor.
        ValueError: only one of `atol` and `rtol` is given.
    """
    if not (_is_numeric(first) or _is_numeric(second)):
        return False
    if (atol is None) != (rtol is None):
        raise ValueError(f"give both atol and rtol or neither, got atol={atol}, rtol={rtol}")
    options = {
        "atol": atol,
        "rtol": rtol,
        "equal_nan": equal_nan,
        "check_dtype": exact_dtype,
        "check_device": exact_device,
    }
    for where, one, other in _pairs(first, second, ""):
        head = " ".join(str(part) for part in (msg, f"at {where}:" if where else "") if part)
        _leaves(one, other, head, options)
    return True


def assert_not_equal(first: Any, second: Any, msg: Any = None, **tolerance: Any) -> bool:
    """The opposite of `assert_equal`; False if there is nothing numeric to compare."""
    try:
        if not assert_equal(first, second, **tolerance):
            return False
    except AssertionError:
        return True
    raise AssertionError(f"{msg}: " * (msg is not None) + f"unexpectedly equal: {first!r}")


def _is_numeric(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_numeric, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_numeric, value))
    return isinstance(value, (Tensor, float, complex))


def _pairs(first: Any, second: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Corresponding leaves, with their place."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            only = sorted(map(str, first.keys() ^ second.keys()))
            raise AssertionError(f"at {where or 'the top'}: keys on one side only: {only}")
        for key in first:
            yield from _pairs(first[key], second[key], f"{where}[{key!r}]")
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            raise AssertionError(
                f"at {where or 'the top'}: {len(first)} elements against {len(second)}"
            )
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _pairs(one, other, f"{where}[{index}]")
    else:
        yield where, first, second


def _leaves(one: Any, other: Any, head: str, options: dict[str, Any]) -> None:
    def message(text: str) -> str:
        return f"{head} {text}" if head else text

    if isinstance(one, Tensor) or isinstance(other, Tensor):
        one, other = _tensors(one, other, message)
        assert_close(one, other, msg=message, **options)
    elif _is_number(one) and _is_number(other):
        kind = complex if isinstance(one, complex) or isinstance(other, complex) else float
        assert_close(kind(one), kind(other), msg=message, **options)
    elif one != other:
        raise AssertionError(message(f"{one!r} != {other!r}"))


def _tensors(one: Any, other: Any, message: Any) -> tuple[Tensor, Tensor]:
    """Two plain tensors to compare."""
    if not isinstance(one, Tensor) and _is_number(one):
        one = torch.as_tensor(one, dtype=other.dtype, device=other.device)
    if not isinstance(other, Tensor) and _is_number(other):
        other = torch.as_tensor(other, dtype=one.dtype, device=one.device)
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        raise AssertionError(message(f"{type(one).__name__} against {type(other).__name__}"))
    sharded = [hasattr(tensor, "placements") for tensor in (one, other)]
    if not any(sharded):
        return one, other
    if not all(sharded):
        raise TypeError(
            message("a DTensor cannot be compared with a plain tensor; call full_tensor() on it")
        )
    left: Any = one
    right: Any = other
    if left.placements != right.placements or left.device_mesh != right.device_mesh:
        raise AssertionError(
            message(
                f"laid out differently: {left.placements} on {left.device_mesh} against "
                f"{right.placements} on {right.device_mesh}"
            )
        )
    if left.shape != right.shape:
        raise AssertionError(message(f"shape {tuple(left.shape)} against {tuple(right.shape)}"))
    return left.to_local(), right.to_local()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)
