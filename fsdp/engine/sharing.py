"""Parameters that cannot be shared with other processes say so. Knows no sharding, no face."""

from __future__ import annotations

import functools
from typing import NoReturn

import torch

_VERB = "share_memory_"


def refuse_to_share(what: str) -> NoReturn:
    """Raise NotImplementedError: ``what`` cannot be shared."""
    raise NotImplementedError(
        f"{what} cannot be shared with other processes: its memory comes and goes, or is a part of "
        "that of a unit. Share copies of whole parameters, or the module before it is sharded."
    )


def let_sharing_be_refused(param: torch.Tensor, name: str) -> None:
    """Let ``param.share_memory_()`` raise; it is what sharing any module around it calls.

    On the object, as there is nothing else between the two: torch would crash on a DTensor, which
    has no storage, and memory that was shared cannot be freed between passes.
    """
    setattr(param, _VERB, functools.partial(refuse_to_share, f"parameter '{name}'"))


def is_refused(param: torch.Tensor) -> bool:
    """Whether ``let_sharing_be_refused`` was given ``param``, and no swap has undone it since."""
    return _VERB in vars(param)
