"""Tests whose arguments Hypothesis draws: drawn once in the controller, sent to all ranks.

Knows how Hypothesis marks its tests; never imports it unless a test did. Must not know ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["inner_test", "is_generated", "redirect"]

_SETTINGS = "_hypothesis_internal_use_settings"


def is_generated(function: Callable[..., Any]) -> bool:
    """Whether Hypothesis draws the arguments of `function`."""
    return bool(getattr(function, "is_hypothesis_test", False))


def inner_test(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What Hypothesis calls with drawn arguments, None for an ordinary function."""
    handle = getattr(function, "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    return getattr(inner, "_sent_to_ranks", inner) if is_generated(function) else None


def redirect(function: Callable[..., Any], send: Callable[..., None]) -> None:
    """Let Hypothesis call ``send(case, *arguments, **keywords)`` in place of the inner test.

    The time that an example takes in ranks is not Hypothesis's to judge, so its deadline goes; the
    bound of the job stays.

    Args:
        function: a test for which `is_generated` holds.
        send: gets the test case and the drawn arguments.
    """
    handle: Any = getattr(function, "hypothesis")  # noqa: B009 - mypy knows no such attribute
    original = inner_test(function)
    own = next(iter(inspect.signature(original).parameters)) if original else "self"

    def sent(*arguments: Any, **keywords: Any) -> None:
        case, *others = arguments or (keywords.pop(own),)  # Hypothesis passes everything by name
        send(case, *others, **keywords)

    sent._sent_to_ranks = original  # type: ignore[attr-defined]
    sent.__name__ = getattr(original, "__name__", "sent")
    handle.inner_test = sent
    settings = sys.modules["hypothesis"].settings
    for layer in _layers(function):
        current = vars(layer).get(_SETTINGS)
        if current is not None:
            setattr(layer, _SETTINGS, settings(current, deadline=None))


def _layers(function: Any) -> Iterator[Any]:
    """The function below a bound method, and all that it wraps."""
    layer = getattr(function, "__func__", function)
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)
