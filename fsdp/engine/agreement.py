"""One exchange, after which all ranks go on or all raise the same error.

Knows lines of text, errors and process groups; what the lines say is the caller's business. An
error is raised as it is where it arose. All other ranks raise one of its kind, which says first on
which rank something is wrong and what, then how many more ranks have told of something.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fsdp.engine.mesh import message_device
from fsdp.engine.torch_private import gather_now

_T = TypeVar("_T")
# What every process knows and what takes a text; any other error is told as its nearest parent.
_KINDS = frozenset(
    {
        AssertionError,
        FileExistsError,
        FileNotFoundError,
        KeyError,
        NotADirectoryError,
        NotImplementedError,
        OSError,
        PermissionError,
        RuntimeError,
        TypeError,
        ValueError,
    }
)


@dataclass(frozen=True, kw_only=True)
class Topic:
    """How a difference between ranks is found and spoken of.

    Attributes:
        what: the lines describe, of a rank.
        parts: each line describes one of them.
        remedy: what to do about a difference.
        compared: what of a line the ranks must have in common; default, all of it.
    """

    what: str = "model"
    parts: str = "parameters"
    remedy: str = "Build the same model on all ranks."
    compared: Callable[[str], str] = str


def without_names(line: str) -> str:
    """Return what of a line is common where ranks may call things by other (quoted) names."""
    return re.sub("'[^']*'", "", line)


def with_others(text: str, others: int) -> str:
    """Return what is said of the first rank, and then how many others have told of something."""
    return f"{text} (and {others} more told by other ranks)" if others else text


class _Told(NamedTuple):
    """What other ranks are told of an error: its kind, and where and what, in one sentence."""

    kind: type[Exception]
    text: str


def agree(
    lines: Iterable[str],
    problem: Exception | None,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    topic: Topic = Topic(),
) -> None:
    """Raise on every rank of ``groups`` if one has a ``problem`` or other ``lines``.

    Args:
        lines: what the ranks must have in common.
        problem: what this rank cannot go on with.
        groups: the ranks, in groups that all of them go through in one order.
        device: where messages lie.
        topic: what the lines are about.

    *Collective* over each of ``groups``: one all-gather of 16 bytes per rank, and one of the
    texts themselves if there is something to report. *Blocks* the host.

    Raises:
        Exception: ``problem`` itself where it arose, its kind and text on the others.
        ValueError: the lines differ; names the first difference and the ranks.
    """
    mine = list(lines)
    told: dict[int, _Told] = {}
    if problem is not None:
        told[dist.get_rank()] = _told(problem, dist.get_rank())
    for group in groups:
        if group.size() > 1:
            # The next group hears of it too: raising now would leave its other ranks alone.
            told = _exchange(mine, told, group, device, topic)
    if problem is not None:
        raise problem
    if told:
        first, *others = (told[rank] for rank in sorted(told))
        raise first.kind(with_others(first.text, len(others)))


def together(call: Callable[[], _T], group: dist.ProcessGroup | None) -> _T:
    """Return what ``call`` returns, or raise on all ranks of ``group`` what it raises on one.

    Without a process group there is one rank, which agrees with itself.

    *Collective*: one exchange after the call, so the call itself must not wait for other ranks.

    Raises:
        Exception: the error itself where it arose, its kind and text on the others.
    """
    return exchanged(lambda: (call(), ()), group, 0)[0]


def exchanged(
    call: Callable[[], tuple[_T, Sequence[int]]], group: dist.ProcessGroup | None, count: int
) -> tuple[_T, list[list[int]]]:
    """Return the result of ``call``, and the ``count`` numbers that it returns on each rank.

    Saves an exchange: the numbers travel with the word that all ranks are through.

    *Collective*, raises as ``together``.

    Returns:
        The result, and the numbers (of 64 bits) of each rank, in the order of the group.
    """
    if not dist.is_initialized():
        result, numbers = call()
        return result, [list(numbers)]
    problem: Exception | None = None
    results: list[_T] = []
    numbers = (0,) * count
    try:
        result, numbers = call()
        results.append(result)
    except Exception as error:
        problem = error
    ranks = group or dist.group.WORLD
    assert ranks is not None, "there is a default group"
    device = message_device(ranks)
    sent = torch.tensor([int(problem is not None), *numbers], dtype=torch.int64, device=device)
    rows = gather_now(sent, ranks).view(-1, 1 + count).tolist()
    if any(failed for failed, *_ in rows):
        agree((), problem, [ranks], device)
    return results[0], [told for _, *told in rows]


def _told(problem: Exception, rank: int) -> _Told:
    kind = next(
        each
        for each in type(problem).__mro__
        if each in _KINDS or each.__module__.startswith("fsdp.") or each is Exception
    )
    # A KeyError shows its text quoted, and would be quoted again.
    shown = problem.args[0] if isinstance(problem, KeyError) and problem.args else problem
    return _Told(kind if kind is not Exception else RuntimeError, f"on rank {rank}: {shown}")


def _exchange(
    mine: list[str],
    told: Mapping[int, _Told],
    group: dist.ProcessGroup,
    device: torch.device,
    topic: Topic,
) -> dict[int, _Told]:
    """Return what the ranks of ``group`` have told, and else at what their lines differ."""
    text = "\n".join(map(topic.compared, mine))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    sent = torch.tensor([digest, int(bool(told))], dtype=torch.int64, device=device)
    gathered = gather_now(sent, group).view(-1, 2)
    if type(gathered) is not torch.Tensor:  # a fake one: nothing was sent, or can be read
        return dict(told)
    reports = gathered.tolist()
    if all(report == [reports[0][0], 0] for report in reports):
        return {}
    everyone: list[tuple[list[str], dict[int, _Told]]] = [([], {})] * group.size()
    dist.all_gather_object(everyone, (mine, told), group=group)
    found = {rank: each for _, heard in everyone for rank, each in heard.items()}
    if found:
        return found
    ranks = dist.get_process_group_ranks(group)
    text = _first_difference(ranks, [lines for lines, _ in everyone], topic)
    return {ranks[0]: _Told(ValueError, text)}


def _first_difference(ranks: Sequence[int], texts: Sequence[list[str]], topic: Topic) -> str:
    # There is one: other digests come of other texts.
    rank, number, ours, theirs = next(
        (rank, number, ours, theirs)
        for rank, other in zip(ranks, texts, strict=True)
        for number, (ours, theirs) in enumerate(zip_longest(texts[0], other, fillvalue=""))
        if topic.compared(ours) != topic.compared(theirs)
    )
    nothing = f"no more {topic.parts}"
    return (
        f"the {topic.what} of rank {ranks[0]} differs from that of rank {rank} at number {number} "
        f"of its {topic.parts}: rank {ranks[0]} has {ours or nothing}, rank {rank} has "
        f"{theirs or nothing}. {topic.remedy}"
    )
