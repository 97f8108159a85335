"""Functions of a library replaced while a test looks at how they are called.

The replacement is installed on all ranks or on none: every context waits for all of them at both
ends. Knows names in `torch.distributed`. Must not know wrappers: they are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = [
    "patch_all_gather",
    "patch_all_reduce",
    "patch_reduce_scatter",
    "patched",
    "reduce_scatter_with_assert",
]

_ALL_GATHER = ("all_gather_single", "all_gather_into_tensor")
_INHERITED = object()
_REDUCE_SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")


@contextmanager
def patched(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Inside, `name` of `owner` is `new`; gives what it was, for `new` to call.

    Args:
        owner: a module or a class, such as a wrapper's group of parameters with its `unshard`.
        name: of a function that it has.
        new: takes its place.

    Collective: a barrier before and one after. After an exception there is none: the other ranks
    may be anywhere.

    Raises:
        AttributeError: there is no such function, so that the patch would see nothing.
    """
    original = getattr(owner, name)
    own = vars(owner).get(name, _INHERITED)
    dist.barrier()
    setattr(owner, name, new)
    try:
        yield original
        dist.barrier()
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def patch_all_gather(new: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Inside, `torch.distributed` gathers into one tensor through `new`; gives the original.

    It has two names, of which torch has one or both; both are replaced.
    """
    with _patched_any(_ALL_GATHER, new) as original:
        yield original


@contextmanager
def patch_reduce_scatter(new: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The same for the reduce-scatter of one tensor."""
    with _patched_any(_REDUCE_SCATTER, new) as original:
        yield original


@contextmanager
def patch_all_reduce(new: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The same for `all_reduce`."""
    with patched(dist, "all_reduce", new) as original:
        yield original


def reduce_scatter_with_assert(
    cls: Any,
    orig_reduce_scatter: Callable[..., Any],
    assert_fn: Callable[[Tensor], None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Check the output tensor of a reduce-scatter, then issue it.

    For ``patch_reduce_scatter(partial(reduce_scatter_with_assert, self, original, check))``.

    Args:
        cls: the test.
        orig_reduce_scatter: what is called.
        assert_fn: gets the output before it is filled: dtype and shape count.
        *args: of the collective; the output comes first.
        **kwargs: of the collective; or the output is called `output`.

    Raises:
        TypeError: no output among the arguments.
    """
    output = args[0] if args else kwargs.get("output")
    if not isinstance(output, Tensor):
        raise TypeError(f"reduce_scatter_with_assert: no output in {args!r}, {sorted(kwargs)}")
    assert_fn(output)
    return orig_reduce_scatter(*args, **kwargs)


@contextmanager
def _patched_any(names: Sequence[str], new: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Replace all of `names` that exist; gives the first one."""
    present = [name for name in names if hasattr(dist, name)]
    with ExitStack() as stack:
        originals = [stack.enter_context(patched(dist, name, new)) for name in present]
        yield originals[0]
