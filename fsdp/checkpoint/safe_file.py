"""Files of the safetensors format: a header as JSON, then the bytes of each tensor.

Writing is done here, because the library writes only tensors that are all in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
OBJECTS = "fsdp"  # key of the header's metadata
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMES = {name: dtype for dtype, name in _DTYPES.items()}


def is_safe(where: Path) -> bool:
    """Whether a checkpoint of this format is there."""
    return (where / MODEL_FILE).exists()


@dataclass(frozen=True)
class Entry:
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafeFile:
    """A file whose tensors come one by one, in any order.

    Args:
        path: where it is made.
        entries: all tensors that will come.
        objects: what stands in the header besides, made of what JSON has.
        stack: closes the file.

    Raises:
        TypeError: the format has no name for a dtype.
    """

    def __init__(
        self, path: Path, entries: Mapping[str, Entry], objects: Any, stack: ExitStack
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", OBJECTS: json.dumps(objects)}}
        self._starts: dict[str, int] = {}
        end = 0
        for name, entry in entries.items():
            self._starts[name] = end
            header[name] = {
                "dtype": _name_of(name, entry.dtype),
                "shape": list(entry.shape),
                "data_offsets": [end, end + entry.nbytes],
            }
            end += entry.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors start at multiples of 8 bytes
        self._file: IO[bytes] = stack.enter_context(path.open("wb"))
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._base = self._file.tell()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor."""
        self._file.seek(self._base + self._starts[name])
        self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _name_of(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise TypeError(f"safetensors has no dtype for '{name}' of {dtype}; use format='sharded'")
    return _DTYPES[dtype]


def plain(value: Any) -> Any:
    """Return ``value`` for JSON, such that it comes back as it was.

    Raises:
        TypeError: it would not.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {"tuple": [plain(each) for each in value]}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: plain(each) for key, each in value.items()}}
    raise TypeError(
        f"a header of safetensors has no place for {value!r} of {type(value).__name__}; use "
        "format='sharded'"
    )


def restored(value: Any) -> Any:
    """Return what ``plain`` was given."""
    if isinstance(value, list):
        return [restored(each) for each in value]
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        if kind == "tuple":
            return tuple(restored(each) for each in inner)
        return {key: restored(each) for key, each in inner.items()}
    return value
