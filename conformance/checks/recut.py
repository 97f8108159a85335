"""What stands in a state after a load that cut it as for another number of ranks.

Pure functions of tensors and numbers of ranks; rows are dealt out in equal chunks, the last short.
"""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.causes import Cause
from conformance.explain import Suspect


def recut_suspects(whole: Tensor, before: int, after: int) -> list[Suspect]:
    """What `after` ranks make of `whole`, which `before` ranks saved, if one of them errs.

    Either each looks for its shard where those of `before` ranks begin, and finds zeros past the
    end; or one rank finds nothing at all.
    """
    if not whole.dim() or not whole.numel():
        return []
    rows, length = whole.shape[0], -(-whole.shape[0] // after)
    old = -(-rows // before)
    padded = torch.cat([whole, whole.new_zeros((after * old + length, *whole.shape[1:]))])
    index = torch.arange(rows)
    found = []
    if old != length:
        moved = padded[index // length * old + index % length]
        found.append((Cause.CUT_FOR_OTHER_RANKS, moved))
    for first in range(0, rows, length):
        emptied = whole.clone()
        emptied[first : first + length] = 0
        found.append((Cause.ZERO, emptied))
    return found
