"""The state of optimizers, seen through the pieces of the model they train.

An entry of the state is per element (it has an element for each of the parameter: a momentum) or a
value (a step count, anything that is no tensor). Per-element entries are dealt out like their
parameter. A flat parameter has one value where its parts have one each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp.engine.torch_private import dtensor_of, local_tensor, spec_of, spec_with_dtype
from fsdp.joint_state import expect_separate
from fsdp.optim_state.judge import same
from fsdp.optim_state.same_kind import Given, check_same_kind
from fsdp.reshard.pieces import Piece

_NO_OPTIONS = frozenset({"params", "param_names"})
Values = dict[str, Any]


class OptimizerView:
    """What some optimizers keep for each piece.

    Args:
        optimizers: one, several or none; no two hold the same parameter.
        pieces: of the model.

    Raises:
        NotImplementedError: an optimizer has one state for all of its parameters.
        ValueError: a parameter of an optimizer is not of the model.
    """

    def __init__(
        self, optimizers: Optimizer | Iterable[Optimizer] | None, pieces: Sequence[Piece]
    ) -> None:
        self.optimizers: tuple[Optimizer, ...] = (
            (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers or ())
        )
        expect_separate(self.optimizers)
        self._of_holder: dict[torch.Tensor, list[Piece]] = {}
        for piece in pieces:
            self._of_holder.setdefault(piece.holder, []).append(piece)
        self._owner: dict[torch.Tensor, tuple[Optimizer, dict[str, Any]]] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param not in self._of_holder:
                        raise ValueError(
                            f"a parameter of shape {tuple(param.shape)} of {type(optimizer)} is "
                            "not of the model. Make the optimizer from its parameters, after "
                            "it was sharded."
                        )
                    self._owner[param] = (optimizer, group)

    def trains(self, piece: Piece) -> bool:
        """Whether one of the optimizers has the parameter of ``piece``."""
        return piece.holder in self._owner

    def per_element(self, piece: Piece) -> dict[str, torch.Tensor]:
        """Return the entries that are dealt out like ``piece``, each laid out like its holder."""
        return {
            key: value for key, value in self._entries(piece) if _elementwise(piece, key, value)
        }

    def values(self, piece: Piece) -> Values:
        """Return the other entries; tensors are on the CPU.

        Raises:
            NotImplementedError: a tensor of another shape, which nobody knows how to cut.
        """
        found: Values = {}
        for key, value in self._entries(piece):
            if _elementwise(piece, key, value):
                continue
            if isinstance(value, torch.Tensor):
                if value.dim() > 0:
                    raise NotImplementedError(
                        f"the state '{key}' of '{piece.name}' has shape {tuple(value.shape)}, its "
                        f"parameter {tuple(piece.holder.shape)}; resharding needs one element "
                        "for each of the parameter, or none"
                    )
                value = value.detach().to("cpu", copy=True)
            found[key] = value
        return found

    def _entries(self, piece: Piece) -> list[tuple[str, Any]]:
        if piece.holder not in self._owner:
            return []
        optimizer, _ = self._owner[piece.holder]
        # Not by item access alone: the state makes an entry for whatever is asked.
        return (
            list(optimizer.state[piece.holder].items()) if piece.holder in optimizer.state else []
        )

    def groups(self) -> list[dict[str, Any]]:
        """Return the options of every group, and the names of its parameters as ``params``."""
        found = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                options = {k: _plain(v) for k, v in group.items() if k not in _NO_OPTIONS}
                names = [p.name for param in group["params"] for p in self._of_holder[param]]
                found.append({**options, "params": names})
        return found

    # Loading: first everything is looked at, then everything is put

    def wanted(self, saved: Mapping[str, Saved]) -> dict[torch.Tensor, Saved]:
        """Return what the state of every parameter becomes; those without one are left out.

        Args:
            saved: by name of the tensor.

        Raises:
            ValueError: parts of a flat parameter differ where it has one value, or a saved state
                is of a parameter that no optimizer has.
        """
        known = {name: p for ps in self._of_holder.values() for p in ps for name in p.names}
        for name in saved:
            if name not in known or not self.trains(known[name]):
                raise ValueError(
                    f"there is a state for '{name}', which none of the optimizers here trains. "
                    "Give the optimizer the same parameters as the one that was saved."
                )
        found = {}
        for holder, pieces in self._of_holder.items():
            parts = [(p.name, saved[n]) for p in pieces for n in p.names if n in saved]
            if parts and not _never_steps(pieces[0]):
                found[holder] = _one_state(parts)
        return found

    def matched_groups(self, saved: Sequence[Mapping[str, Any]]) -> list[Values]:
        """Return the options that each group gets: those that its parameters had.

        Raises:
            ValueError: a parameter was in no group, or parameters of one group were in groups with
                other options.
        """
        options: dict[str, Values] = {}
        for group in saved:
            # One object for all of them, which is the same without a look inside.
            kept = {k: v for k, v in group.items() if k not in _NO_OPTIONS}
            options.update(dict.fromkeys(group["params"], kept))
        found: list[Values] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                pieces = [p for param in group["params"] for p in self._of_holder[param]]
                found.append(_one_group(pieces, options))
                if isinstance(optimizer, torch.optim.AdamW):
                    # What makes it AdamW is no option of it; Adam's states have another value.
                    found[-1].pop("decoupled_weight_decay", None)
        return found

    def check_kind(self, options: Sequence[Values], states: Mapping[torch.Tensor, Saved]) -> None:
        """Refuse what ``matched_groups`` and ``wanted`` have found, if other optimizers made it.

        Raises:
            ValueError: names what both keep.
        """
        given = {
            holder: Given(
                name=self._of_holder[holder][0].name, entries=(*saved.elements, *saved.values)
            )
            for holder, saved in states.items()
        }
        check_same_kind(self.optimizers, options, given)

    def blank(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros laid out like the holder of ``piece``, not yet part of any state."""
        holder = piece.holder
        if not isinstance(holder, DTensor):
            return torch.zeros_like(holder.detach(), dtype=dtype)
        blank = torch.zeros_like(local_tensor(holder).detach(), dtype=dtype)
        return dtensor_of(blank, spec_with_dtype(spec_of(holder), dtype), requires_grad=False)

    def put(self, holder: torch.Tensor, entries: Mapping[str, Any]) -> None:
        """Make ``entries`` the whole state of a parameter; empty: it has none."""
        optimizer, group = self._owner[holder]
        optimizer.state.pop(holder, None)
        if entries:
            # Where it wants its step counts.
            host = not (group.get("capturable") or group.get("fused"))
            optimizer.state[holder] = {
                key: value
                if not isinstance(value, torch.Tensor) or value.shape == holder.shape
                else value.to("cpu" if host else holder.device, copy=True)
                for key, value in entries.items()
            }

    def put_groups(self, options: Sequence[Values]) -> None:
        """Set the options that ``matched_groups`` has found."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, found in zip(groups, options, strict=True):
            for key, value in found.items():
                present = group.get(key)
                if isinstance(present, torch.Tensor):
                    present.copy_(torch.as_tensor(value))  # others may hold the object
                else:
                    group[key] = value

    def holders(self) -> list[torch.Tensor]:
        """Return the parameters whose state a load replaces: all that this rank steps on.

        Of the others an optimizer may have made an empty state, which stays what it is.
        """
        return [holder for holder in self._owner if not _never_steps(self._of_holder[holder][0])]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What an optimizer kept for one tensor.

    Attributes:
        elements: keys of the per-element entries and their dtypes.
        values: the other entries.
    """

    elements: Mapping[str, torch.dtype]
    values: Values


def _elementwise(piece: Piece, key: str, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not piece.fits(value):
        return False
    # The step count of a parameter without dims has its shape.
    return value.dim() > 0 or key != "step"


def _never_steps(piece: Piece) -> bool:
    """Whether this rank has none of the elements of an original parameter, and so no gradient."""
    lone = piece.window is None and not isinstance(piece.holder, DTensor)
    return lone and piece.holder.numel() == 0 and piece.dealt.runs.numel > 0


def _one_state(parts: Sequence[tuple[str, Saved]]) -> Saved:
    """Put the states of the parts of a parameter together; those without one count as zeros."""
    first_name, first = parts[0]
    for name, other in parts[1:]:
        for key in dict.fromkeys((*first.values, *other.values)):
            if not same(first.values.get(key), other.values.get(key)):
                raise ValueError(
                    f"the state '{key}' of '{first_name}' is {first.values.get(key)}, that of "
                    f"'{name}' {other.values.get(key)}: both lie in one flat parameter, which has "
                    "one value. Use use_orig_params=True."
                )
    elements: dict[str, torch.dtype] = {}
    for _, part in parts:
        elements.update(part.elements)
    return Saved(elements=elements, values=first.values)


def _one_group(pieces: Sequence[Piece], options: Mapping[str, Values]) -> Values:
    first: tuple[str, Values] | None = None
    for piece in pieces:
        name = next((name for name in piece.names if name in options), None)
        if name is None:
            raise ValueError(
                f"'{piece.name}' is trained here, and was in no parameter group before; the groups "
                f"had {len(options)} parameters. Give the optimizer the same parameters."
            )
        if first is None:
            first = (name, options[name])
        elif not same(first[1], options[name]):
            raise ValueError(
                f"'{first[0]}' and '{name}' are in one parameter group here, and had other options "
                f"before: {first[1]} and {options[name]}. Make the groups as they were."
            )
    return dict(first[1]) if first is not None else {}


def _plain(value: Any) -> Any:
    """Return an option that can travel: tensors (a learning rate) go to the CPU."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
