"""What an adapter says of itself, checked once, before anything is started.

Knows the shape of declarations, and how to say whose code failed. Must not know how adapters are
named or found.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache, cached_property, partial
from inspect import Parameter, getattr_static, signature
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from conformance.adapter import Adapter, Conventions
from conformance.errors import UsageError, unknown
from conformance.names import CAPABILITIES
from conformance.near import is_slip

PUBLIC = tuple(name for name in vars(Adapter) if not name.startswith("_"))
VERBS = tuple(name for name in PUBLIC if callable(getattr(Adapter, name)))

METHODS = (FunctionType, MethodType, staticmethod, classmethod, partial)
"""What a verb usually is. How anything else is called cannot be said without calling it."""

ASKED_BY: Mapping[str, tuple[str, ...]] = {
    "save": ("save", "load"),
    "scaler": ("make_scaler", "scaled_step"),
    **{
        f"{state}.{kind}": (state, f"load_{state}")
        for state in ("model_state", "optim_state")
        for kind in ("full", "sharded", "local")
    },
}
"""The verbs that nothing but such claims asks for."""

WITHOUT_DEFAULT: Mapping[str, tuple[str, ...]] = {
    claim: verbs
    for claim, verbs in ASKED_BY.items()
    if claim.endswith(("save", ".sharded", ".local"))
}
"""The verbs that a claim is about and of which the defaults raise."""


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
    _check_spelling(name, adapter)
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
    _check_verbs(name, adapter)
    _check_signatures(name, adapter)
    with blaming(name, "conventions"):
        conventions: Any = adapter.conventions
    if not isinstance(conventions, Conventions):
        raise _wrong(name, "conventions", conventions, "a conformance.Conventions")
    with blaming(name, "replicas"):
        replicas: Any = adapter.replicas
    if type(replicas) is not int or replicas < 1:
        raise _wrong(name, "replicas", replicas, "an int of at least 1")


def _check_spelling(name: str, adapter: Adapter) -> None:
    """See that nothing is nearly called as a verb of which the default would be taken instead.

    A method is compared with methods, and any other value with settings. What the author's own
    code asks for is a helper, whatever it is called.
    """
    left = [public for public in PUBLIC if not _defines(adapter, public)]
    # what comes from other bases is called as these need it
    bases = [base for base in type(adapter).__mro__ if issubclass(base, Adapter)]
    written: dict[str, Any] = {}
    for base in reversed(bases):
        written |= vars(base)
    written |= vars(adapter)
    for own in sorted(written.keys() - set(dir(Adapter))):
        if own.startswith("_"):
            continue
        method = isinstance(written[own], METHODS)
        near = [p for p in left if (p in VERBS) == method and is_slip(own, p)]
        if near and not _asked_for(own, bases):
            raise UsageError(
                f"adapter {name!r}: nothing asks for {own!r}; did you mean {near[0]}?"
                f" (a helper of yours: name it _{own})"
            )


def _defines(adapter: Adapter, public: str) -> bool:
    """Whether a verb or a setting is not the default."""
    return getattr_static(adapter, public) is not vars(Adapter)[public]


def _asked_for(own: str, bases: list[type[Adapter]]) -> bool:
    """Whether a module of the packages that the classes are from reads an attribute of this name.

    Their text is looked at: it is there, and a helper may be for any of them.
    """
    packages = {base.__module__.partition(".")[0] for base in bases if base is not Adapter}
    read = re.compile(rf"[.\"']{own}\b(?!\s*[-+*/|&^]?=[^=])")
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in packages:
            try:
                source = inspect.getsource(module)
            except (OSError, TypeError):  # of no file
                continue
            if read.search(source):
                return True
    return False


def _check_signatures(name: str, adapter: Adapter) -> None:
    """See that every verb takes the arguments that it is called with, whatever it calls them."""
    claimed = {verb for claim in adapter.capabilities for verb in ASKED_BY.get(claim, ())}
    uncalled = {verb for verbs in ASKED_BY.values() for verb in verbs} - claimed
    for verb in VERBS:
        if verb in uncalled or not _defines(adapter, verb):
            continue
        held = getattr_static(adapter, verb)
        if not callable(held) and not hasattr(type(held), "__get__"):
            raise _wrong(name, verb, held, "a method")
        if not isinstance(held, METHODS):
            _check_getter(name, adapter, verb, held)
            continue
        own: Any = getattr(adapter, verb)
        if verb == "no_sync" and inspect.isgeneratorfunction(own):
            raise UsageError(
                f"adapter {name!r}: {verb}() yields; it lacks the decorator"
                " @contextlib.contextmanager"
            )
        by_place, by_name = _called(verb)
        bound = inspect.ismethod(own)
        places = ["self", *by_place] if bound else by_place
        misfit = _misfit(own.__func__ if bound else own, places, by_name)
        if misfit:
            taken, error = misfit
            call = ", ".join([*places, *(f"{keyword}=..." for keyword in by_name)])
            raise UsageError(
                f"adapter {name!r}: {verb}{_plain(taken)} is called as {verb}({call}): {error}"
            )


def _check_getter(name: str, adapter: Adapter, verb: str, held: object) -> None:
    """See that a property, which may give what is made in build, is no method by its arguments."""
    getter = held.func if isinstance(held, cached_property) else getattr(held, "fget", None)
    misfit = _misfit(getter, ["self"], []) if getter else None
    if misfit:
        own = f"{type(adapter).__name__}.{verb}"
        raise UsageError(
            f"adapter {name!r}: {own}{_plain(misfit[0])} is a property, which is given self alone:"
            f" make it a method, without @{type(held).__name__}"
        )


def _misfit(
    function: Any, places: list[str], by_name: list[str]
) -> tuple[inspect.Signature, TypeError] | None:
    """What `function` takes, and why such a call does not fit; nothing where it may fit."""
    misfits: list[tuple[inspect.Signature, TypeError]] = []
    for follow_wrapped in (True, False):  # a decorator may add arguments of its own
        try:
            taken = signature(function, follow_wrapped=follow_wrapped)
        except (TypeError, ValueError):  # of nothing written in Python
            return None
        try:
            taken.bind(*places, **dict.fromkeys(by_name))
        except TypeError as error:
            misfits.append((taken, error))
        else:
            return None
    return misfits[0]


def _plain(taken: inspect.Signature) -> inspect.Signature:
    """The same without annotations."""
    plain = [p.replace(annotation=p.empty) for p in taken.parameters.values()]
    return taken.replace(parameters=plain, return_annotation=taken.empty)


@cache
def _called(verb: str) -> tuple[list[str], list[str]]:
    """(arguments by place, arguments by name) with which a verb is called."""
    _, *wanted = signature(getattr(Adapter, verb)).parameters.values()
    by_name = [p.name for p in wanted if p.kind is Parameter.KEYWORD_ONLY]
    return [p.name for p in wanted if p.name not in by_name], by_name


def _check_verbs(name: str, adapter: Adapter) -> None:
    """See that what a claim cannot do without is defined."""
    for claim in sorted(adapter.capabilities):
        for verb in WITHOUT_DEFAULT.get(claim, ()):
            if not _defines(adapter, verb):
                raise UsageError(
                    f"adapter {name!r}: claims {claim!r}, but does not define {verb}()"
                )


def _wrong(name: str, what: str, got: object, wanted: str) -> UsageError:
    return UsageError(f"adapter {name!r}: {what} must be {wanted}; got {got!r:.80}")
