"""What a mutant is: an adapter with one defect mixed in, and what must catch it.

A defect is a class that overrides one or two verbs, three to ten lines; `mutant` registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from conformance.adapter import Adapter
from conformance.causes import Cause
from conformance.errors import unknown
from conformance.names import snake_case
from conformance.verdicts import Verdict


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One deliberate defect.

    Attributes:
        name: the defect's name.
        why: one sentence.
        bugs: ids of the public reports of the same class.
        base: the adapter that it is planted in.
        variant: that adapter's variant.
        check: the check that must report it first.
        cause: the cause that this check must state.
        case: the case on which it is measured.
        world: smallest world in which the defect shows.
        defect: the class that overrides the adapter's verbs.
        verdict: what the check must say.
        device: "accelerator" if the defect is one of an accelerator's streams; ``None`` if it shows
            everywhere.
        timeout: seconds after which its case is ended from outside; ``None`` for the run's own.
    """

    name: str
    why: str
    bugs: tuple[str, ...]
    base: str
    variant: str
    check: str
    cause: Cause
    case: str
    world: int
    defect: type[Adapter]
    verdict: Verdict = Verdict.FAIL
    device: Literal["accelerator"] | None = None
    timeout: float | None = None

    def shows_on(self, device: str) -> bool:
        """Whether the defect can show on a device of this type."""
        return self.device is None or device != "cpu"

    @contextmanager
    def planted(self, adapter: Adapter) -> Iterator[Adapter]:
        """`adapter` with the defect, for the body; the adapter itself is left as it was."""
        mixed = type(self.name, (self.defect, type(adapter)), {})
        planted: Adapter = object.__new__(mixed)
        planted.__dict__.update(adapter.__dict__)
        # what the defect declares wins over the adapter's own declaration
        for attribute in ("capabilities", "conventions"):
            if attribute in vars(self.defect):
                setattr(planted, attribute, getattr(self.defect, attribute))
        yield planted


MUTANTS: dict[str, Mutant] = {}


def mutant(  # noqa: PLR0913 - a row of the register, by name
    *,
    check: str,
    cause: Cause,
    case: str,
    base: str = "torch.DistributedDataParallel",
    variant: str = "default",
    bugs: tuple[str, ...] = (),
    world: int = 2,
    verdict: Verdict = Verdict.FAIL,
    device: Literal["accelerator"] | None = None,
    timeout: float | None = None,
) -> Callable[[type[Adapter]], type[Adapter]]:
    """Register a defect class; its name in snake case names the mutant."""

    def register(defect: type[Adapter]) -> type[Adapter]:
        name = snake_case(defect.__name__)
        if name in MUTANTS:
            raise ValueError(f"mutant {name!r} is registered twice; rename one of the classes")
        MUTANTS[name] = Mutant(
            name=name,
            why=(defect.__doc__ or "").strip().splitlines()[0],
            bugs=bugs,
            base=base,
            variant=variant,
            check=check,
            cause=cause,
            case=case,
            world=world,
            defect=defect,
            verdict=verdict,
            device=device,
            timeout=timeout,
        )
        return defect

    return register


def mutant_named(name: str) -> Mutant:
    """The mutant called `name`.

    Raises:
        UsageError: there is none.
    """
    found: Mapping[str, Mutant] = MUTANTS
    if name not in found:
        raise unknown("mutant", name, found, listed="mutants")
    return found[name]
