"""`parametrize` and `instantiate_parametrized_tests`: one test method per set of values.

Works on classes alone, so that unittest, pytest and ranks find the same methods by name.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

__all__ = ["instantiate_parametrized_tests", "parametrize", "subtest"]

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

_AXES = "_parametrize_axes"


@dataclass(frozen=True)
class subtest:
    """One set of values with its own name or decorators.

    Attributes:
        arg_values: the value, or a tuple with one per argument.
        name: what stands in the method's name; None derives it from the values.
        decorators: applied to this one method, the last one first.
    """

    arg_values: Any
    name: str | None = None
    decorators: Sequence[Callable[[Any], Any]] = ()


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """One point of an axis, or of a product of axes."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    decorators: tuple[Callable[[Any], Any], ...] = ()


def parametrize(
    arg_str: str,
    arg_values: Iterable[Any],
    name_fn: Callable[..., str] | None = None,
) -> Callable[[Function], Function]:
    """Make one test method per value, called ``test_NAME_arg_value``.

    Several of these decorators give the product, the outermost first in the name. The class must
    be decorated with `instantiate_parametrized_tests`.

    Args:
        arg_str: argument names, separated by commas.
        arg_values: one value each, a tuple where there are several arguments, or `subtest`.
        name_fn: called with the values; gives what stands in the method's name.

    Raises:
        ValueError: no values, or a tuple of another length than the names.
    """
    names = [name.strip() for name in arg_str.split(",") if name.strip()]
    choices = [_choice(names, index, value, name_fn) for index, value in enumerate(arg_values)]
    if not choices:
        raise ValueError(f"parametrize({arg_str!r}): there are no values, so no test would run")

    def mark(function: Function) -> Function:
        setattr(function, _AXES, [choices, *getattr(function, _AXES, [])])
        return function

    return mark


def instantiate_parametrized_tests(cls: Class) -> Class:
    """Class decorator: replace every parametrized method by one method per set of values.

    Raises:
        ValueError: two methods would have one name.
    """
    for name, function in list(vars(cls).items()):
        axes = getattr(function, _AXES, None)
        if axes is None:
            continue
        delattr(cls, name)
        for choice in _product(axes):
            _add(cls, f"{name}_{choice.name}", function, choice)
    return cls


def _add(cls: type, name: str, function: Callable[..., Any], choice: _Choice) -> None:
    if name in vars(cls):
        raise ValueError(f"{cls.__qualname__} gets two methods {name}; name them with `subtest`")
    arguments = dict(choice.arguments)

    @functools.wraps(function)
    def test(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **arguments, **kwargs)

    vars(test).pop(_AXES, None)
    vars(test).pop("__wrapped__", None)  # pytest would read the arguments of the original
    if getattr(function, "is_hypothesis_test", False):
        test.__wrapped__ = function
    test.__name__ = name
    test.__qualname__ = f"{cls.__qualname__}.{name}"
    made: Any = test
    for decorator in reversed(choice.decorators):
        made = decorator(made)
    setattr(cls, name, made)


def _product(axes: Sequence[Sequence[_Choice]]) -> Iterator[_Choice]:
    for point in itertools.product(*axes):
        yield _Choice(
            name="_".join(choice.name for choice in point if choice.name),
            arguments={k: v for choice in point for k, v in choice.arguments.items()},
            decorators=tuple(d for choice in point for d in choice.decorators),
        )


def _choice(
    names: Sequence[str], index: int, given: Any, name_fn: Callable[..., str] | None
) -> _Choice:
    case = given if isinstance(given, subtest) else subtest(given)
    values = (case.arg_values,) if len(names) == 1 else tuple(case.arg_values)
    if len(values) != len(names):
        raise ValueError(
            f"parametrize({', '.join(names)!r}): got {len(values)} values for {len(names)} "
            f"arguments: {case.arg_values!r}"
        )
    name = case.name
    if name is None and name_fn is not None:
        name = name_fn(*values)
    if name is None:
        pairs = zip(names, values, strict=True)
        name = "_".join(_default_name(n, index, v) for n, v in pairs)
    return _Choice(
        name=re.sub(r"\W", "_", name),
        arguments=dict(zip(names, values, strict=True)),
        decorators=tuple(case.decorators),
    )


def _default_name(name: str, index: int, value: Any) -> str:
    """As in PyTorch, so that a moved test keeps its name."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, (int, float, str)):
        return f"{name}_{value}"
    return f"{name}{index}"
