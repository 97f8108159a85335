"""Asserts that compare ranks with each other: they fail on all ranks or on none.

Knows collectives of objects. Must not know pools.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from conformance.testing.compare import assert_equal

__all__ = ["AcrossRanks"]


class AcrossRanks:
    """Mixin of `FSDPTest`. Every method is a collective over its group (default: all ranks)."""

    def gatherAcrossRanks(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Every rank's value, tensors on the CPU, in rank order of the group.

        Collective: one object all-gather.
        """
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, tree_map(_on_cpu, value), group=group)
        return gathered

    def assertEqualAcrossRanks(
        self,
        value: Any,
        msg: Any = None,
        *,
        group: dist.ProcessGroup | None = None,
        **tolerance: Any,
    ) -> None:
        """Fail on all ranks unless every rank has the same value as the group's first.

        Args:
            value: this rank's; containers may hold tensors.
            msg: put in front of the message.
            group: the ranks to compare.
            **tolerance: as in `FSDPTest.assertEqual`; without it, exact.
        """
        exact = tolerance or {"atol": 0.0, "rtol": 0.0}
        values = self.gatherAcrossRanks(value, group)
        for index, other in enumerate(values[1:], start=1):
            names = _names(0, index, group)
            text = names if msg is None else f"{msg}: {names}"
            if not assert_equal(values[0], other, text, **exact) and values[0] != other:
                raise AssertionError(f"{text}: {values[0]!r} != {other!r}")

    def assertDifferentAcrossRanks(
        self, value: Any, msg: Any = None, *, group: dist.ProcessGroup | None = None
    ) -> None:
        """Fail on all ranks if any two ranks have the same value."""
        values = self.gatherAcrossRanks(value, group)
        for index, one in enumerate(values):
            for before in range(index):
                if _identical(values[before], one):
                    head = "" if msg is None else f"{msg}: "
                    names = _names(before, index, group)
                    raise AssertionError(f"{head}{names} have the same value: {one!r}")

    @contextmanager
    def assertRaisesOnAllRanks(
        self,
        kind: type[BaseException] | tuple[type[BaseException], ...],
        regex: str = "",
        *,
        group: dist.ProcessGroup | None = None,
    ) -> Iterator[None]:
        """Fail on all ranks unless the body raises `kind`, matching `regex`, on every rank.

        Args:
            kind: exception class or classes.
            regex: searched in the text of the exception.
            group: the ranks to ask.
        """
        got = "nothing was raised"
        try:
            yield
        except kind as error:
            found = re.search(regex, str(error)) is not None
            got = "" if found else f"{type(error).__name__}: {error}"
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
        missed = [
            f"rank {_global(index, group)}: {text}"
            for index, text in enumerate(self.gatherAcrossRanks(got, group))
            if text
        ]
        if missed:
            kinds = kind if isinstance(kind, tuple) else (kind,)
            wanted = " or ".join(k.__name__ for k in kinds) + (f" with {regex!r}" if regex else "")
            raise AssertionError(f"wanted {wanted} on all ranks; {'; '.join(missed)}")


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _identical(one: Any, other: Any) -> bool:
    try:
        return assert_equal(one, other, atol=0.0, rtol=0.0) or bool(one == other)
    except AssertionError:
        return False


def _global(index: int, group: dist.ProcessGroup | None) -> int:
    return index if group is None else dist.get_global_rank(group, index)


def _names(one: int, other: int, group: dist.ProcessGroup | None) -> str:
    return f"ranks {_global(one, group)} and {_global(other, group)}"
