"""One exchange at start-up, after which all ranks go on or all raise the same error.

Knows lines of text and process groups; what the lines say is the caller's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from fsdp.engine.torch_private import gather_now

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        RuntimeError,
        ValueError,
        AssertionError,
        TypeError,
        NotImplementedError,
        KeyError,
    )
}


def agree(
    lines: Iterable[str],
    problem: Exception | None,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    compared: Callable[[str], str] = str,
    what: str = "model",
) -> None:
    """Raise on every rank of ``groups`` if one has a ``problem`` or other ``lines``.

    ``compared`` says what of a line the ranks must have in common; default, all of it. ``what``
    says what the lines describe.

    *Collective* over each of ``groups``: one all-gather of 16 bytes per rank, and one of the
    texts themselves if there is something to report. *Blocks* the host.

    Raises:
        Exception: ``problem`` itself where it arose, its kind and text on the others.
        ValueError: the lines differ; names the first difference and the ranks.
    """
    mine = list(lines)
    for group in groups:
        if group.size() > 1:
            # The next group hears of it too: raising now would leave its other ranks alone.
            problem = _exchange(mine, problem, group, device, compared, what)
    if problem is not None:
        raise problem


def _exchange(
    mine: list[str],
    problem: Exception | None,
    group: dist.ProcessGroup,
    device: torch.device,
    compared: Callable[[str], str],
    what: str,
) -> Exception | None:
    text = "\n".join(map(compared, mine))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    sent = torch.tensor([digest, int(problem is not None)], dtype=torch.int64, device=device)
    reports = gather_now(sent, group).view(-1, 2).tolist()
    if all(report == [reports[0][0], 0] for report in reports):
        return problem
    texts: list[tuple[list[str], str, str]] = [([], "", "")] * group.size()
    kind = type(problem).__name__ if problem is not None else ""
    # A KeyError shows its text quoted, and would be quoted again.
    shown = problem.args[0] if isinstance(problem, KeyError) and problem.args else problem
    dist.all_gather_object(texts, (mine, kind, str(shown or "")), group=group)
    if problem is not None:
        return problem
    ranks = dist.get_process_group_ranks(group)
    for rank, (_, kind, text) in zip(ranks, texts, strict=True):
        if kind:
            return _KINDS.get(kind, RuntimeError)(f"on rank {rank}: {text}")
    return ValueError(_first_difference(ranks, [lines for lines, _, _ in texts], compared, what))


def _first_difference(
    ranks: Sequence[int],
    texts: Sequence[list[str]],
    compared: Callable[[str], str],
    what: str,
) -> str:
    # There is one: other digests come of other texts.
    rank, number, ours, theirs = next(
        (rank, number, ours, theirs)
        for rank, other in zip(ranks, texts, strict=True)
        for number, (ours, theirs) in enumerate(zip_longest(texts[0], other, fillvalue=""))
        if compared(ours) != compared(theirs)
    )
    return (
        f"the {what} of rank {ranks[0]} differs from that of rank {rank} at parameter "
        f"{number}: rank {ranks[0]} has {ours or 'no more parameters'}, rank {rank} "
        f"has {theirs or 'no more parameters'}. Build the same {what} on all ranks."
    )
