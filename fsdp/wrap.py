"""Which submodules become units of their own: policies, and ``enable_wrap`` for hand wrapping.

Knows module trees and numbers of elements; knows no sharding. A wrapper class is a parameter.
"""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

Kwargs = dict[str, Any]
Targets = dict[nn.Module, Kwargs]
PolicyFn = Callable[..., bool]

_MIN_NUM_PARAMS = 100_000_000


class Policy(ABC):
    """Chooses from a whole tree at once."""

    @abstractmethod
    def targets(
        self, root: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> Targets:
        """Return the modules to wrap, ``root`` perhaps among them, with the arguments of each."""


class ModuleWrapPolicy(Policy):
    """Wraps every instance of the given classes and of their subclasses.

    Args:
        module_classes: the classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = frozenset(module_classes)

    def targets(
        self, root: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> Targets:
        """Return the instances, each with the root's arguments."""
        classes = tuple(self._classes)
        return {
            module: dict(root_kwargs)
            for module in root.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *_: Any, **__: Any) -> bool:  # noqa: FBT001
        """Answer like a functional policy."""
        return recurse or isinstance(module, tuple(self._classes))

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({sorted(c.__name__ for c in self._classes)})"


class CustomPolicy(Policy):
    """Asks a function about every module.

    Args:
        lambda_fn: returns False (leave alone), True (wrap as the root is wrapped), or a dict of
            arguments that differ from the root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
        self._lambda_fn = lambda_fn

    def targets(
        self, root: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> Targets:
        """Return what the function chose.

        Raises:
            ValueError: it returned something else than a bool or a dict.
        """
        found: Targets = {}
        for module in root.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg "
                    f"dict, but it returned {answer} for {type(module).__name__}"
                )
            if answer:
                overrides = answer if isinstance(answer, dict) else {}
                found[module] = {**root_kwargs, **overrides}
        return found


# Functional policies


def always_wrap_policy(*_: Any, **__: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules for which ``lambda_fn`` is true; meant for ``functools.partial``."""
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001
    nonwrapped_numel: int,
    transformer_layer_cls: Iterable[type[nn.Module]],
) -> bool:
    """Wrap the instances of the given classes; meant for ``functools.partial``."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001
    nonwrapped_numel: int,
    min_num_params: int = _MIN_NUM_PARAMS,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Wrap what holds enough elements that no inner unit has taken.

    Args:
        module: the module in question.
        recurse: whether the question is to descend, or to wrap.
        nonwrapped_numel: elements of ``module`` that no unit below it has taken.
        min_num_params: how many elements are enough.
        force_leaf_modules: classes whose insides are not looked at. Default: attention, which
            reads the weight of its output projection without calling it.
        exclude_wrap_modules: classes that are never wrapped themselves. Default: the containers
            that nobody calls.
    """
    leaves = FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    if nonwrapped_numel < min_num_params:
        return False
    return not isinstance(module, tuple(leaves if recurse else excluded))


FORCE_LEAF_MODULES: set[type[nn.Module]] = {nn.MultiheadAttention}
EXCLUDE_WRAP_MODULES: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = FORCE_LEAF_MODULES  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]


# From a policy to wrapped modules


def choose_targets(
    root: nn.Module,
    policy: Policy | PolicyFn,
    root_kwargs: Kwargs,
    *,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> Targets:
    """Return what ``policy`` wants wrapped below ``root``, children before parents.

    The root is never among them: whoever calls wraps it.

    Raises:
        ValueError: the policy is none, or returns what it must not.
    """
    if isinstance(policy, Policy):
        chosen = policy.targets(root, ignored_modules, dict(root_kwargs))
    elif callable(policy):
        chosen = {
            module: dict(root_kwargs)
            for module in _ask(root, policy, ignored_modules, ignored_params)
        }
    else:
        raise ValueError(
            f"auto_wrap_policy should be a policy object or a callable, got {policy!r}"
        )
    return {m: chosen[m] for m in post_order(root) if m in chosen and m is not root}


def post_order(root: nn.Module) -> list[nn.Module]:
    """Return the modules of a tree, children before parents and siblings in order."""
    found: dict[nn.Module, None] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        visited.add(module)
        for child in module.children():
            if child not in visited:
                visit(child)
        found[module] = None

    visit(root)
    return list(found)


def _ask(
    root: nn.Module,
    policy: PolicyFn,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> list[nn.Module]:
    """Return what a functional policy says should be wrapped; each module is asked about once."""
    found: list[nn.Module] = []
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        """Return how many elements below ``module`` units have taken."""
        visited.add(module)
        numel = sum(p.numel() for p in module.parameters() if p not in ignored_params)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        taken = sum(
            visit(child)
            for child in module.children()
            if child not in ignored_modules and child not in visited
        )
        if module is not root and policy(
            module=module, recurse=False, nonwrapped_numel=numel - taken
        ):
            found.append(module)
            return numel
        return taken

    visit(root)
    return found


class _Reference(NamedTuple):
    parent: nn.Module
    name: str


def replace_targets(
    root: nn.Module, targets: Mapping[nn.Module, Kwargs], wrapper_cls: Callable[..., nn.Module]
) -> None:
    """Wrap ``targets``, in order, and put each wrapper wherever its module was reachable.

    A module that is reachable by two paths is wrapped once and replaced in both: what still
    pointed at it would run over parameters that are gone.
    """
    references: dict[nn.Module, list[_Reference]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None and child in targets:
                references.setdefault(child, []).append(_Reference(parent, name))
    for module, kwargs in targets.items():
        wrapped = wrapper_cls(module, **kwargs)
        for parent, name in references[module]:
            setattr(parent, name, wrapped)


def one_of(policies: Sequence[PolicyFn]) -> PolicyFn:
    """Return the functional policy that wraps what any of ``policies`` wraps."""

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:  # noqa: FBT001
        return any(
            each(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
            for each in policies
        )

    return policy


# Wrapping by hand

_enabled: contextvars.ContextVar[tuple[Callable[..., nn.Module], Kwargs] | None]
_enabled = contextvars.ContextVar("fsdp_enable_wrap", default=None)


@contextmanager
def enable_wrap(
    *, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any
) -> Generator[None, None, None]:
    """Let ``wrap`` wrap with ``wrapper_cls`` and these arguments inside the context.

    Raises:
        NotImplementedError: inside another such context.
    """
    if _enabled.get() is not None:
        raise NotImplementedError(
            "You are already within an autowrap context: enable_wrap does not support nesting. "
            "Pass other arguments to wrap() instead."
        )
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return ``module`` wrapped as the enclosing ``enable_wrap`` says; itself outside of one.

    ``wrap_overrides`` win over the arguments of the context.
    """
    enabled = _enabled.get()
    if enabled is None:
        return module
    wrapper_cls, kwargs = enabled
    return wrapper_cls(module, **{**kwargs, **wrap_overrides})
