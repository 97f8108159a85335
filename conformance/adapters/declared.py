"""What an adapter says of itself, checked once, before anything is started.

Knows the shape of declarations, and how to say whose code failed. Must not know how adapters are
named or found.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from conformance.adapter import Adapter, Conventions
from conformance.errors import UsageError, unknown
from conformance.names import CAPABILITIES

MISSPELT = 0.9
"""How alike a name is to a verb, of `difflib`, that can only be a slip: helpers called
``load_optimizer_state`` or ``saved`` are 0.89."""


@contextmanager
def blaming(
    name: str, doing: str, *, but: type[Exception] | tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Inside runs code of the author of the adapter `name`; what it raises is theirs to read.

    ``sys.exit()`` is one of those things: the command would end with the status of their choice,
    perhaps 0, and nothing would have been judged. Exceptions of type `but` pass.

    Raises:
        UsageError: of any exception, with its place.
    """
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise UsageError(f"adapter {name!r}: {doing} raised {text}{_place(error)}") from error


def _place(error: BaseException) -> str:
    """The last line outside this suite that led to it, in brackets; nothing if there is none."""
    ours = (str(Path(__file__).parents[1]), "<")  # "<": generated, as a dataclass's __init__ is
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    # the message of a syntax error names its place itself
    if isinstance(error, SyntaxError) or not theirs:
        return ""
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})"


def declared_variants(name: str, cls: type[Adapter]) -> Mapping[str, Mapping[str, Any]]:
    """The variants of an adapter class.

    Raises:
        UsageError: they are not what `Adapter.variants` must be.
    """
    variants: Any = cls.variants
    wanted = "a mapping from names to mappings of options, on the class, such as {'default': {}}"
    if not isinstance(variants, Mapping):
        raise _wrong(name, "variants", variants, wanted)
    if not variants:
        raise UsageError(f"adapter {name!r}: variants is empty, so there is nothing to judge")
    for variant, options in variants.items():
        if not isinstance(variant, str):
            raise _wrong(name, "a name in variants", variant, "a string")
        if not isinstance(options, Mapping):
            raise _wrong(name, f"variants[{variant!r}]", options, "a mapping of options")
    return variants


def check_declarations(name: str, adapter: Adapter) -> None:
    """See that the claims and choices of an adapter that is set up are such.

    Raises:
        UsageError: one is not, or a claim is no capability.
    """
    _check_spelling(name, type(adapter))
    claims: Any
    with blaming(name, "capabilities"):
        claims = adapter.capabilities
    if not isinstance(claims, Set) or not all(isinstance(claim, str) for claim in claims):
        raise _wrong(name, "capabilities", claims, "a frozenset of names")
    with blaming(name, "setting capabilities"):
        adapter.capabilities = frozenset(claims)  # a set of the class would be changed for all
    for claim in sorted(adapter.capabilities - set(CAPABILITIES)):
        place = f"(claimed by {name})"
        raise unknown("capability", claim, CAPABILITIES, where=place, listed="capabilities")
    with blaming(name, "conventions"):
        conventions: Any = adapter.conventions
    if not isinstance(conventions, Conventions):
        raise _wrong(name, "conventions", conventions, "a conformance.Conventions")
    with blaming(name, "replicas"):
        replicas: Any = adapter.replicas
    if type(replicas) is not int or replicas < 1:
        raise _wrong(name, "replicas", replicas, "an int of at least 1")


def _check_spelling(name: str, cls: type[Adapter]) -> None:
    """See that nothing is nearly called as a verb of which the default would be taken instead.

    A method is compared with methods, and a value with values.
    """
    public = [verb for verb in vars(Adapter) if not verb.startswith("_")]
    left = [verb for verb in public if getattr(cls, verb) is getattr(Adapter, verb)]
    # what comes from other bases is called as these need it
    written = {own for base in cls.__mro__ if issubclass(base, Adapter) for own in vars(base)}
    for own in sorted(written - set(dir(Adapter))):
        if own.startswith("_"):
            continue
        method = callable(getattr(cls, own))
        alike = [verb for verb in left if callable(getattr(Adapter, verb)) == method]
        near = get_close_matches(own, alike, 1, MISSPELT)
        if near:
            raise UsageError(
                f"adapter {name!r}: nothing asks for {own!r}; did you mean {near[0]}? (name a"
                " helper with _ in front)"
            )


def _wrong(name: str, what: str, got: object, wanted: str) -> UsageError:
    return UsageError(f"adapter {name!r}: {what} must be {wanted}; got {got!r:.80}")
