"""What the ranks recorded while running a scenario: lines, and the tensors of each phase.

``rank{r}.jsonl`` + ``rank{r}.{ordinal of a phase}.safetensors``; of virtual ranks, which are not
killed alone, ``rank{r}.safetensors``. A history is written by one process a rank and read by
anybody; nothing is unpickled. Knows tensors and files, but neither adapters nor checks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conformance.gather import Cut

SCHEMA_VERSION = 1
NOT_FINITE = "not finite"
"""Key of the object that stands in a line for a float which JSON has no number for."""

Tree = dict[str, Any]  # key -> Tensor | JSON scalar | None


class NotObserved(LookupError):
    """A history lacks an observation.

    Attributes:
        what: the observation's name.
        where: its coordinates.
    """

    def __init__(self, what: str, where: Mapping[str, Any]) -> None:
        self.what = what
        self.where = dict(where)
        super().__init__(f"{self.named} was not observed")

    @property
    def named(self) -> str:
        """What is lacking, in words: ``gradients at step 0``."""
        at = ", ".join(f"{key} {value}" for key, value in self.where.items())
        return f"{self.what} at {at}" if at else self.what


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A named part of a scenario; `error` is ``type: message`` if it raised, at time `at`."""

    ordinal: int
    name: str
    ended: bool = False
    error: str | None = None
    traceback: str = ""
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One recorded value.

    Attributes:
        what: name, such as ``gradients``.
        where: coordinates, such as ``{"step": 3}``.
        value: a tensor, a JSON value, or a flat tree of those.
        moment: (ordinal of the phase, position in the history); the same in every rank's history
            of one scenario, so moments order observations in time.
    """

    what: str
    where: Mapping[str, Any]
    value: Any
    moment: tuple[int, int]


class _Unread(Observation):
    """An observation that was read back; its value is restored when it is first asked for.

    Checks ask for three in five: most others tell the cause of a number that is wrong.
    """

    restore: Callable[[], Any]
    ranks: frozenset[int]
    """Those with pieces of the tensors of which this one has a piece."""

    @classmethod
    def of(cls, **fields: Any) -> _Unread:
        """Made of what stands in the place of `value` and of all other fields."""
        unread = object.__new__(cls)  # an observation that is called has its value at once
        vars(unread).update(fields)
        return unread

    def __getattr__(self, name: str) -> Any:
        if name != "value":
            raise AttributeError(name)
        value = vars(self)["value"] = self.restore()
        return value


class HistoryWriter:
    """Writes one rank's history. Lines are flushed at once, what has dimensions with its phase."""

    def __init__(self, directory: Path, rank: int, header: Mapping[str, Any]) -> None:
        """Start a history of `rank` in `directory`, which is created."""
        directory.mkdir(parents=True, exist_ok=True)
        for stale in (
            *directory.glob(f"rank{rank}.*safetensors"),
            *directory.glob(f"rank{rank}.*part"),
        ):
            stale.unlink()  # of a run that was broken off: lines of this one would find them
        self._directory, self._rank = directory, rank
        self._virtual = bool(header.get("virtual"))
        self._named: dict[str, list[Tensor]] = {}  # dtype -> flat tensors of one observation
        self._tensors: dict[str, list[Tensor]] = {}  # dtype -> flat copies, one an observation
        self._used: dict[str, int] = {}  # dtype -> elements
        self._lines: TextIO = (directory / f"rank{rank}.jsonl").open("w")
        self._phase = -1
        self._position = 0
        self._line({"kind": "header", "schema": SCHEMA_VERSION, "rank": rank, **header})

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def phase(self) -> int:
        """Ordinal of the phase that began last, from 0."""
        return self._phase

    def begin_phase(self, name: str) -> None:
        """Everything written from here on belongs to phase `name`.

        Blocks until the tensors of the phase before are in the page cache: should this rank be
        killed, they are there, and with them the whole of which other ranks hold pieces.
        """
        if not self._virtual:
            self._save()
        self._phase += 1
        self._line({"kind": "phase", "ordinal": self._phase, "name": name})

    def end_phase(self, error: str | None = None, traceback: str = "") -> None:
        """The phase is over, by an exception if `error` is given."""
        end = {"ordinal": self._phase, "error": error, "traceback": traceback}
        self._line({"kind": "end", **end, "at": time.monotonic()})

    def write(self, what: str, value: Any, **where: Any) -> None:
        """Record `value`: a tensor, a JSON value, or a mapping from string to those.

        A mapping may also hold a `Cut`: whoever reads the histories of all ranks finds the whole.
        """
        moment = (self._phase, self._position)
        self._position += 1
        line = {"kind": "observation", "what": what, "where": where, "moment": moment}
        with torch.no_grad():
            if _is_tree(value):
                line["tree"] = {str(k): self._store(v) for k, v in value.items()}
            else:
                line["value"] = self._store(value)
            for dtype, flat in self._named.items():  # whoever handed them out goes on with them
                self._tensors.setdefault(dtype, []).append(torch.cat(flat))  # a copy, even of one
        self._named.clear()
        self._line(line)

    def skip(self) -> None:
        """Advance the position as `write` does: a rank whose value stands in another's history."""
        self._position += 1

    def collectives(self, records: Iterable[Any]) -> None:
        """Record the collectives that this rank issued, in order; dataclass instances."""
        lines = (_dumps({"kind": "collective", **vars(record)}) + "\n" for record in records)
        self._lines.writelines(lines)
        self._lines.flush()

    def close(self) -> None:
        """Write the tensors that are left. Blocks until they are in the page cache."""
        self._save()
        self._lines.close()

    def _save(self) -> None:
        if not self._tensors:
            return
        path = _tensor_path(self._directory, self._rank, None if self._virtual else self._phase)
        staged = path.with_suffix(".part")
        save_file({k: torch.cat(v) for k, v in self._tensors.items()}, str(staged))
        staged.replace(path)
        self._tensors.clear()
        self._used.clear()

    def _store(self, value: Any) -> Any:
        if isinstance(value, Cut):
            whole = {"whole": value.shape, "dim": value.dim, "ranks": value.ranks}
            return {**self._store(value.piece), **whole}
        if not isinstance(value, Tensor):
            return {"json": value}
        # a number is there although the rank be killed; of a DTensor it might be a share
        if type(value) is Tensor and not value.dim() and not value.is_complex():
            return {"json": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
        # one long tensor a dtype: safetensors takes tens of microseconds for each one that it
        # writes or reads, and a history has thousands of small ones
        dtype = str(value.dtype).removeprefix("torch.")
        offset = self._used.setdefault(dtype, 0)
        here = value if value.is_cpu else value.to("cpu")
        self._named.setdefault(dtype, []).append(here.reshape(-1))
        self._used[dtype] = offset + value.numel()
        return {"tensor": dtype, "offset": offset, "shape": list(value.shape)}

    def _line(self, content: Mapping[str, Any]) -> None:
        self._lines.write(_dumps(content) + "\n")
        self._lines.flush()


def _tensor_path(directory: Path, rank: int, phase: int | None) -> Path:
    """The file of one phase, or of all; earlier versions wrote the latter only."""
    return directory / (f"rank{rank}" + ("" if phase is None else f".{phase}") + ".safetensors")


def _is_tree(value: Any) -> bool:
    return isinstance(value, Mapping)


# `dumps` would make one at every call; to look for values that hold themselves takes a quarter
_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode


def _dumps(content: Mapping[str, Any]) -> str:
    """`content` as a line that every reader of JSON takes."""
    try:
        return _encode(content)
    except ValueError:  # a float that is not finite: rare, so lines are not searched for one before
        return _encode(_in_words(content))


def _in_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_words(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_words(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {NOT_FINITE: json.dumps(value)}
    return value


def _from_words(found: dict[str, Any]) -> Any:
    return float(found[NOT_FINITE]) if found.keys() == {NOT_FINITE} else found


@dataclass(frozen=True, kw_only=True)
class RankHistory:
    """One rank's history, read back."""

    rank: int
    header: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()
    observations: tuple[Observation, ...] = ()
    collectives: tuple[Mapping[str, Any], ...] = ()

    def find(self, what: str, where: Mapping[str, Any]) -> Observation | None:
        """The observation `what` at exactly `where`, if it was made."""
        return self._found.get((what, frozenset(where.items())))

    def then(self, later: RankHistory, offset: int) -> RankHistory:
        """Observations of both, those of `later` with `offset` phases before them."""
        phases = [replace(phase, ordinal=phase.ordinal + offset) for phase in later.phases]
        seen = [replace(o, moment=(o.moment[0] + offset, o.moment[1])) for o in later.observations]
        return RankHistory(
            rank=self.rank,
            header=later.header,
            phases=(*self.phases, *phases),
            observations=(*self.observations, *seen),
            collectives=later.collectives,
        )

    @cached_property
    def _found(self) -> Mapping[tuple[str, frozenset[tuple[str, Any]]], Observation]:
        """The first observation at each place."""
        places = ((seen.what, frozenset(seen.where.items())) for seen in self.observations)
        return dict(zip(reversed([*places]), reversed(self.observations), strict=True))


@dataclass(frozen=True, kw_only=True)
class History:
    """The histories of all ranks of one run of a scenario.

    Attributes:
        ranks: by rank.
        virtual: the oracle's: what is common to all ranks is stored with rank 0 only.
        jobs: ordinal of the first phase of each job; two jobs have other processes.
    """

    ranks: tuple[RankHistory, ...]
    virtual: bool = False
    jobs: tuple[int, ...] = (0,)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @classmethod
    def read(cls, directory: Path, world: int) -> History:
        """Read what `world` ranks wrote into `directory`; a rank without a file is empty.

        Pieces are put together: every rank has observed the whole that its piece belongs to, or
        nothing where a rank's piece is lacking.
        """
        ranks = _put_together([_read_rank(directory, rank) for rank in range(world)])
        return cls(ranks=ranks, virtual=bool(ranks[0].header.get("virtual")))

    def then(self, second: History, *, world: int) -> History:
        """This history and that of the job after it, as one of the first `world` ranks.

        A rank that only the second job has saw in the first what rank 0 did. Collectives are those
        of the second job: positions in streams begin anew with each.
        """
        offset = len(self.ranks[0].phases)
        ranks = (self._before(rank).then(second._after(rank), offset) for rank in range(world))
        return History(ranks=tuple(ranks), virtual=self.virtual, jobs=(0, offset))

    def _before(self, rank: int) -> RankHistory:
        if rank < self.world:
            return self.ranks[rank]
        # what is common to virtual ranks is found with rank 0 anyway
        return RankHistory(rank=rank) if self.virtual else replace(self.ranks[0], rank=rank)

    def _after(self, rank: int) -> RankHistory:
        return self.ranks[rank] if rank < self.world else RankHistory(rank=rank)

    def find(self, rank: int, what: str, where: Mapping[str, Any]) -> Observation | None:
        """Rank `rank`'s observation, or ``None``."""
        found = self.ranks[rank].find(what, where)
        shared = found is None and self.virtual and rank
        return self.ranks[0].find(what, where) if shared else found

    def holder(self, rank: int, what: str, where: Mapping[str, Any]) -> int:
        """The rank whose history holds rank `rank`'s observation, if there is one."""
        shared = self.virtual and self.ranks[rank].find(what, where) is None
        return 0 if shared else rank

    def get(self, rank: int, what: str, **where: Any) -> Any:
        """Rank `rank`'s value.

        Raises:
            NotObserved: there is none.
        """
        found = self.find(rank, what, where)
        if found is None:
            raise NotObserved(what, where)
        return found.value

    def every(self, what: str, rank: int = 0) -> list[Observation]:
        """All observations called `what` of one rank, in time order."""
        found = [seen for seen in self.ranks[rank].observations if seen.what == what]
        return self.every(what) if not found and self.virtual and rank else found

    def failed_phase(self) -> tuple[int, Phase] | None:
        """(rank, phase) of the phase that raised first, or ``None``.

        The clock decides between ranks: a rank whose peer is gone fails after it.
        """
        failed = [
            (history.rank, phase)
            for history in self.ranks
            for phase in history.phases
            if phase.error is not None
        ]
        return min(failed, default=None, key=lambda item: (item[1].at, item[0]))


def _read_rank(directory: Path, rank: int) -> RankHistory:
    path = directory / f"rank{rank}.jsonl"
    if not path.exists():
        return RankHistory(rank=rank)
    of_all = _tensors_in(_tensor_path(directory, rank, None))
    of_phases: dict[int, Tensors | None] = {}
    header: dict[str, Any] = {}
    phases: dict[int, Phase] = {}
    observations: list[Observation] = []
    collectives: list[Mapping[str, Any]] = []
    for line in _complete_lines(path):
        kind = line.pop("kind")
        if kind == "header":
            header = line
        elif kind == "phase":
            phases[line["ordinal"]] = Phase(ordinal=line["ordinal"], name=line["name"])
        elif kind == "end":
            begun = phases[line["ordinal"]]
            phases[begun.ordinal] = Phase(
                ordinal=begun.ordinal,
                name=begun.name,
                ended=True,
                error=line["error"],
                traceback=line["traceback"],
                at=line.get("at", 0.0),
            )
        elif kind == "collective":
            collectives.append(line)
        else:
            phase = line["moment"][0]
            if phase not in of_phases:
                of_phases[phase] = of_all or _tensors_in(_tensor_path(directory, rank, phase))
            seen = _observation(line, of_phases[phase])
            if seen is not None:
                observations.append(seen)
    return RankHistory(
        rank=rank,
        header=header,
        phases=tuple(phases[k] for k in sorted(phases)),
        observations=tuple(observations),
        collectives=tuple(collectives),
    )


Tensors = Callable[[], Mapping[str, Tensor]]


def _tensors_in(path: Path) -> Tensors | None:
    """What a file holds, read once it is asked for; ``None`` if there is no such file."""
    return cache(partial(load_file, str(path))) if path.exists() else None


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a history; a killed rank may leave half a line at the end, which is dropped."""
    text = path.read_text()
    lines = text.splitlines()
    # a hook takes time at every object
    decoder = json.JSONDecoder(object_hook=_from_words if f'"{NOT_FINITE}"' in text else None)
    try:
        every: list[dict[str, Any]] = decoder.decode(f"[{','.join(lines)}]")  # takes half the time
    except json.JSONDecodeError:
        return list(_whole(lines, decoder))
    return every


def _whole(lines: Iterable[str], decoder: json.JSONDecoder) -> Iterator[dict[str, Any]]:
    """The lines up to the first that is not whole."""
    for text in lines:
        try:
            yield decoder.decode(text)
        except json.JSONDecodeError:
            return


def _observation(line: Mapping[str, Any], tensors: Tensors | None) -> Observation | None:
    """The observation of one line; ``None`` if its tensors were lost with a killed rank."""
    stored = line["tree"].values() if "tree" in line else (line["value"],)
    if tensors is None and any("tensor" in one for one in stored):
        return None
    return _Unread.of(
        what=line["what"],
        where=line["where"],
        moment=(int(line["moment"][0]), int(line["moment"][1])),
        restore=partial(_value, line, tensors or dict),
        ranks=frozenset([rank for one in stored if "whole" in one for rank in one["ranks"]]),
    )


def _value(line: Mapping[str, Any], tensors: Tensors) -> Any:
    if "tree" not in line:
        return _restored(line["value"], tensors)
    return {key: _restored(one, tensors) for key, one in line["tree"].items()}


def _restored(stored: Mapping[str, Any], tensors: Tensors) -> Any:
    if "dtype" in stored:
        number = stored["json"]
        # as words alone stood there what is not finite in files of earlier versions
        value = float(number) if isinstance(number, str) else number
        return torch.tensor(value, dtype=getattr(torch, stored["dtype"]))
    if "tensor" not in stored:
        return stored["json"]
    shape, offset = stored["shape"], stored["offset"]
    flat = tensors()[stored["tensor"]].narrow(0, offset, math.prod(shape))
    tensor = flat if len(shape) == 1 else flat.view(shape)
    if "whole" not in stored:
        return tensor
    return Cut(tensor, tuple(stored["whole"]), stored["dim"], tuple(stored["ranks"]))


Wholes = dict[tuple[Any, ...], Tensor]  # by what the ranks of a tensor have in common


def _put_together(ranks: Sequence[RankHistory]) -> tuple[RankHistory, ...]:
    """The histories of all ranks with the whole in place of every piece."""
    found: Wholes = {}  # ranks that hold pieces of one tensor share it
    return tuple(
        replace(
            own,
            observations=tuple(
                whole
                for seen in own.observations
                if (whole := _joined(seen, ranks, found)) is not None
            ),
        )
        for own in ranks
    )


def _joined(seen: Observation, ranks: Sequence[RankHistory], found: Wholes) -> Observation | None:
    """`seen` with the whole of each tensor that is cut; ``None`` if a rank has not observed it."""
    if not isinstance(seen, _Unread) or not seen.ranks:
        return seen
    others: dict[int, Observation] = {}
    for rank in seen.ranks:
        other = ranks[rank].find(seen.what, seen.where) if rank < len(ranks) else None
        if other is None:
            return None
        others[rank] = other
    return _Unread.of(
        what=seen.what,
        where=seen.where,
        moment=seen.moment,
        restore=partial(_with_wholes, seen, others, found),
        ranks=seen.ranks,
    )


def _with_wholes(seen: Observation, others: Mapping[int, Observation], found: Wholes) -> Tree:
    """The value of `seen` with the whole of each tensor of which `others` hold pieces."""
    place = (seen.what, frozenset(seen.where.items()))
    wholes: Tree = {}
    for key, cut in seen.value.items():
        if isinstance(cut, Cut):
            common = (*place, key, cut[1:], cut.piece.dtype)
            if common not in found:
                found[common] = cut.joined([others[rank].value.get(key) for rank in cut.ranks])
            wholes[key] = found[common]
    return {**seen.value, **wholes}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """Nested mappings as one flat tree with ``/`` between keys."""
    flat: Tree = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}/")
        else:
            flat[name] = value
    return flat


def as_tensor(value: Any) -> Tensor:
    """A recorded number as a 0-dim tensor; float64, so that nothing is rounded."""
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
