"""What wrappers say when they refuse a model: errors that are told from failures by their words.

Knows sentences. Imports no wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from conformance.adapter import Refusal

WORDS = (
    # frozen and trainable parameters for one flat parameter
    "uniform `requires_grad`",
    "has both parameters with requires_grad=True and False",
    "support scalar parameters",
)


@contextmanager
def refusals() -> Iterator[None]:
    """Inside, an error of the wrapper that says what it does not take is a refusal.

    Raises:
        Refusal: in place of such an error.
    """
    try:
        yield
    except ValueError as error:
        if any(words in str(error) for words in WORDS):
            raise Refusal(str(error)) from error
        raise
