"""Modules of sharded parameters cannot be shared with other processes, and say so. No face.

Nothing of it is on the parameters themselves: what is set on a parameter is saved with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def _refuse(what: str) -> NoReturn:
    """Raise NotImplementedError: ``what`` cannot be shared."""
    raise NotImplementedError(
        f"{what} cannot be shared with other processes: its memory comes and goes, or is a part of "
        "that of a unit. Share copies of whole parameters, or the module before it is sharded."
    )


def let_sharing_be_refused(module: nn.Module) -> None:
    """Let ``module.share_memory()`` raise NotImplementedError before anything is shared.

    Torch would crash on a DTensor, which has no storage, and memory that was shared cannot be freed
    between passes.
    """
    what = f"module {type(module).__name__}"
    module.share_memory = functools.partial(_refuse, what)  # type: ignore[method-assign]


class WithoutSharing(TorchFunctionMode):
    """Inside, no tensor is shared: whoever shares a module around ``what`` comes to it by a call.

    That is ``_apply`` with a function which may as well move or cast.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, unless it shares."""
        if func is torch.Tensor.share_memory_:
            _refuse(self._what)
        return func(*args, **(kwargs or {}))
