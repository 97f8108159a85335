"""What is asked of the files of a checkpoint for a model and its optimizers.

Everything is read into memory of its own; nothing here changes the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from fsdp.checkpoint.contents import GROUPS, MODEL, STATE, Catalog, Entry, Staged, empty_box
from fsdp.reshard.pieces import Piece
from fsdp.reshard.side import Local


class Reading:
    """What is to be read for a model and its optimizers.

    Args:
        local: the model and its optimizers.
        catalog: what there is.

    Raises:
        ValueError: the checkpoint is of another model, or has no optimizer state where some is
            wanted; names the first difference.
    """

    def __init__(self, local: Local, catalog: Catalog) -> None:
        self.local, self.catalog = local, catalog
        self.staged = Staged()
        self.wanted: dict[str, Any] = {}
        self._ask_model()
        if local.view.optimizers:
            self._ask_optimizers()

    def _ask_model(self) -> None:
        entries = self.catalog.entries
        known: set[str] = set()
        for piece in self.local.pieces:
            known.update(MODEL + name for name in piece.names)
            key = next((MODEL + n for n in piece.names if MODEL + n in entries), None)
            if key is None:
                raise ValueError(_missing(piece.name, entries))
            self._check_shape(key, piece)
            held = torch.zeros(_held(piece), dtype=piece.dtype)
            self.staged.tensors[piece.name] = held
            self.wanted[key] = empty_box(piece, held)
        for name, value in self.local.told.objects.items():
            known.add(MODEL + name)
            if MODEL + name not in entries and value == {}:
                continue  # an empty container leaves no trace in a directory
            if MODEL + name not in entries:
                raise ValueError(_missing(name, entries))
            self.wanted[MODEL + name] = _asked(entries[MODEL + name])
        # What is no tensor may be anything, where a model was saved at the top.
        extra = [
            key
            for key in _of_model(entries)
            if key not in known and (entries[key] is not None or key.endswith("_extra_state"))
        ]
        if extra:
            raise ValueError(
                f"the checkpoint has '{extra[0].removeprefix(MODEL)}' and {len(extra) - 1} more "
                "tensors that this model has not; build the model that was saved"
            )

    def _check_shape(self, key: str, piece: Piece) -> None:
        entry = self.catalog.entries[key]
        shape = entry[0] if entry is not None else None
        if shape != piece.dealt.shape:
            raise ValueError(
                f"'{key}' has shape {shape} in the checkpoint, and {piece.dealt.shape} in the "
                "model; build the model that was saved"
            )

    def _ask_optimizers(self) -> None:
        pieces = {name: piece for piece in self.local.pieces for name in piece.names}
        found_groups = False
        for key, entry in self.catalog.entries.items():
            if key.startswith(GROUPS):
                found_groups = True
                self.wanted[key] = _asked(entry)
            if not key.startswith(STATE):
                continue
            name, _, what = key.removeprefix(STATE).rpartition(".")
            piece = pieces.get(name)
            if piece is None:
                raise ValueError(
                    f"the checkpoint has an optimizer state for '{name}', which this model has "
                    "not; build the model that was saved"
                )
            if entry is None:
                self.wanted[key] = None
            elif _is_value(piece, what, entry[0]):
                self.wanted[key] = torch.zeros(entry[0], dtype=entry[1])
                self.staged.values.setdefault(piece.name, {})[what] = self.wanted[key]
            else:
                self._check_shape(key, piece)
                held = torch.zeros(_held(piece), dtype=entry[1])
                self.staged.elements.setdefault(piece.name, {})[what] = held
                self.wanted[key] = empty_box(piece, held)
        if not found_groups:
            raise ValueError(
                "the checkpoint has no optimizer state; load the model alone, or say under which "
                "key its optimizer state is"
            )

    def put_aside(self, objects: Mapping[str, Any]) -> None:
        """Take over what ``catalog.read`` has returned."""
        groups: dict[str, dict[str, Any]] = {}
        for key, asked in self.wanted.items():
            value = objects[key] if asked is None else asked
            if key.startswith(GROUPS):
                head, _, option = key.removeprefix(GROUPS).rpartition(".")
                groups.setdefault(head, {})[option] = value
            elif key.startswith(MODEL):
                if key.removeprefix(MODEL) in self.local.told.objects:
                    self.staged.objects[key.removeprefix(MODEL)] = value
            elif asked is None:
                name, _, what = key.removeprefix(STATE).rpartition(".")
                self.staged.values.setdefault(self._first_name(name), {})[what] = value
        # One group per number, or one per name where the state was saved flattened.
        self.staged.groups = [
            {**options, "params": options.get("params", [head])} for head, options in groups.items()
        ]

    def _first_name(self, name: str) -> str:
        return next(piece.name for piece in self.local.pieces if name in piece.names)


def _asked(entry: Entry | None) -> torch.Tensor | None:
    """Return where what belongs to no parameter is read into, if it is a tensor."""
    return None if entry is None else torch.zeros(entry[0], dtype=entry[1])


def _held(piece: Piece) -> int:
    return piece.view(piece.holder).numel()


def _is_value(piece: Piece, key: str, shape: Collection[int]) -> bool:
    """Whether a saved tensor is one value rather than one element for each of the parameter."""
    return not shape and (key == "step" or bool(piece.dealt.shape))


def _missing(name: str, entries: Mapping[str, Any]) -> str:
    names = [key.removeprefix(MODEL) for key in _of_model(entries)]
    near = get_close_matches(name, names, 1)
    hint = f"; the nearest is '{near[0]}'" if near else ""
    return (
        f"the checkpoint has no '{name}': it has {len(names)} tensors of a model{hint}. Build the "
        "model that was saved, or say under which key it is"
    )


def _of_model(entries: Mapping[str, Any]) -> Iterator[str]:
    return (key for key in entries if key.startswith(MODEL))
