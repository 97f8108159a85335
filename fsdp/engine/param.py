"""One original parameter: where it is registered, how it is cut, its whole representation.

====================  =================================================================
``unsharded``         the autograd leaf over the group's whole buffer; made once, refilled
``accumulated_grad``  an unreduced gradient kept in the reduce dtype between micro-batches
====================  =================================================================

What users see while the group is sharded belongs to the exposure, which adds its own fields in a
subclass. No communication, no order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

import torch
from torch import nn

from fsdp.engine.layout import Extent

_next_uid = itertools.count()
WHOLE = attrgetter("unsharded")


class ShardedState(Enum):
    """Which representation of a group's parameters is registered on the modules."""

    __hash__ = object.__hash__  # for the reason that ``TrainingState`` has it

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    UNSHARDED = auto()
    KEPT = auto()  # the sharded ones, while the whole ones stay in memory for what comes next


SHARDED_STATE_CHANGES: frozenset[tuple[ShardedState, ShardedState]] = frozenset(
    {
        (ShardedState.SHARDED, ShardedState.UNSHARDED),
        (ShardedState.UNSHARDED, ShardedState.SHARDED),
        (ShardedState.UNSHARDED, ShardedState.SHARDED_POST_FORWARD),
        (ShardedState.UNSHARDED, ShardedState.KEPT),
        (ShardedState.KEPT, ShardedState.UNSHARDED),
        (ShardedState.KEPT, ShardedState.SHARDED),
        (ShardedState.SHARDED_POST_FORWARD, ShardedState.UNSHARDED),
        (ShardedState.SHARDED_POST_FORWARD, ShardedState.SHARDED),
    }
)


@dataclass(slots=True)
class ParamModuleInfo:
    """Where a parameter is registered: its first owner and any others that share it."""

    module: nn.Module
    param_name: str
    shared_modules: list[nn.Module] = field(default_factory=list)
    shared_param_names: list[str] = field(default_factory=list)

    def owners(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield every (module, name) under which the parameter is registered."""
        yield self.module, self.param_name
        yield from zip(self.shared_modules, self.shared_param_names, strict=True)


@dataclass(eq=False, slots=True, kw_only=True)
class FSDPParam:
    """One original parameter of a group."""

    info: ParamModuleInfo
    uid: int
    shape: torch.Size  # of the whole parameter on this rank (its local part under TP)
    dim: int | None  # the dim that is cut; None: a run of elements, cut anywhere
    dtype: torch.dtype  # original dtype
    fqn: str = ""
    compute_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None  # None: the gradient's own
    unsharded: nn.Parameter | None = None
    accumulated_grad: torch.Tensor | None = None
    slots: tuple[tuple[nn.Module, str, bool], ...] = ()

    def __post_init__(self) -> None:
        self.slots = tuple(
            (module, name, type(module).__setattr__ is nn.Module.__setattr__)
            for module, name in self.info.owners()
        )

    def __repr__(self) -> str:
        return f"FSDPParam(fqn={self.fqn}, orig_size={self.shape})"

    @property
    def name(self) -> str:
        """What messages call it: its FQN, once that is known."""
        return self.fqn or self.info.param_name

    @property
    def extent(self) -> Extent:
        """The parameter as the layout sees it, in elements."""
        if self.dim is None:
            return Extent.flat(self.shape.numel())
        return Extent.of(self.shape, self.dim)

    def local_shape(self, rows: int) -> torch.Size:
        """Return the shape of a piece with ``rows`` rows of the cut dim."""
        if self.dim is None:
            return torch.Size((rows,))
        return torch.Size((*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]))

    def cut_view(self, whole: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """Return ``rows`` rows of the cut dim of a whole tensor as a view."""
        assert self.dim is not None, f"{self} is a run of elements: it has no rows"
        return whole.narrow(self.dim, start, rows)

    def install(self, parameter: nn.Parameter | None) -> None:
        """Register ``parameter`` on every owner."""
        install_all((self,), (parameter,))

    def registered(self) -> nn.Parameter | None:
        """Return what the first owner has under this name now."""
        return getattr(self.info.module, self.info.param_name, None)

    def choose_dtypes(
        self, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
    ) -> None:
        """Clamp a policy's dtypes to this parameter."""
        self.reduce_dtype = None if reduce_dtype == param_dtype else reduce_dtype
        if param_dtype is None or not self.dtype.is_floating_point:
            self.compute_dtype = self.dtype
        else:
            self.compute_dtype = param_dtype


def install_all(params: Iterable[FSDPParam], shown: Iterable[nn.Parameter | None]) -> None:
    """Register ``shown``, one for each of ``params``, on every owner."""
    for param, parameter in zip(params, shown, strict=True):
        for module, name, plain in param.slots:
            if plain:
                # The checks of nn.Module.__setattr__ cost more than the rest of the swap, and
                # the name is registered as a parameter already.
                module._parameters[name] = parameter
            else:
                setattr(module, name, parameter)


def uid_of(parameter: nn.Parameter) -> int:
    """Return a number that stays with an original parameter, to notice that two groups share it."""
    uid: int | None = getattr(parameter, "_fsdp_uid", None)
    if uid is None:
        uid = next(_next_uid)
        parameter._fsdp_uid = uid  # type: ignore[attr-defined]
    return uid


def find_owners(
    params: Sequence[nn.Parameter], modules: Sequence[nn.Module]
) -> list[ParamModuleInfo]:
    """Return where each of ``params`` is registered below ``modules``, every alias included.

    A parameter inside a module that is reachable by two paths is listed once per path; writing
    it twice is harmless.
    """
    infos: dict[nn.Parameter, ParamModuleInfo] = {}
    wanted = set(params)
    for root in modules:
        for _, module in root.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is None or parameter not in wanted:
                    continue
                info = infos.get(parameter)
                if info is None:
                    infos[parameter] = ParamModuleInfo(module, name)
                else:
                    info.shared_modules.append(module)
                    info.shared_param_names.append(name)
    assert len(infos) == len(wanted), f"parameters that are not in the module tree of {modules}"
    return [infos[parameter] for parameter in params]
