"""Reading checkpoints of the safetensors format: slices of whole tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fsdp.checkpoint.boxed import Boxed
from fsdp.checkpoint.contents import GROUPS, MODEL, STATE, Entries
from fsdp.checkpoint.errors import CheckpointError
from fsdp.checkpoint.safe_file import MODEL_FILE, NAMES, OBJECTS, OPTIMIZER_FILE, restored


class SafeCatalog:
    """What is in a directory of safetensors.

    Args:
        where: the directory.
        with_optimizer: whether the checkpoint has the file of the optimizers.

    Raises:
        CheckpointError: a file is damaged.
    """

    def __init__(self, where: Path, *, with_optimizer: bool) -> None:
        self.entries: Entries = {}
        self._places: dict[str, tuple[Path, str]] = {}
        self._objects: dict[str, Any] = {}
        objects = self._look(where / MODEL_FILE, MODEL)
        self._keep(MODEL, restored(objects["extra"]))
        if with_optimizer:
            objects = self._look(where / OPTIMIZER_FILE, "optim.")
            for name, values in objects["values"].items():
                self._keep(f"{STATE}{name}.", restored(values))
            for number, group_options in enumerate(restored(objects["groups"])):
                self._keep(f"{GROUPS}{number}.", group_options)

    def _keep(self, prefix: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self._objects[prefix + key] = value
            self.entries[prefix + key] = None

    def _look(self, path: Path, prefix: str) -> Any:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    part = file.get_slice(name)
                    dtype = NAMES[part.get_dtype()]
                    self.entries[prefix + name] = (tuple(part.get_shape()), dtype)
                    self._places[prefix + name] = (path, name)
                return json.loads((file.metadata() or {})[OBJECTS])
        except (SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}); take another checkpoint"
            ) from error

    def read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Fill the boxes and tensors of ``wanted``; return what is no tensor."""
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for key, goal in wanted.items():
                if goal is None:
                    continue
                path, name = self._places[key]
                if path not in files:
                    files[path] = stack.enter_context(safe_open(path, "pt"))
                if isinstance(goal, Boxed):
                    _fill(goal, files[path], name)
                else:
                    goal.copy_(files[path].get_tensor(name))
        return {key: self._objects[key] for key, value in wanted.items() if value is None}


def _fill(goal: Boxed, file: Any, name: str) -> None:
    for box in goal.boxes():
        if not box.numel:
            continue
        if not box.sizes:
            goal.at(()).copy_(file.get_tensor(name))
            continue
        ranges = zip(box.offsets, box.sizes, strict=True)
        inside = tuple(slice(start, start + size) for start, size in ranges)
        goal.at(box.offsets).copy_(file.get_slice(name)[inside])
