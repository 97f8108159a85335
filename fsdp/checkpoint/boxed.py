"""A shard of a tensor as ``torch.distributed.checkpoint`` sees it: some boxes of the whole.

Whatever a rank holds of a tensor, a run of a flat parameter or rows, is written as boxes and read
back as boxes, so a checkpoint has the plain names and shapes and can be read in any other form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp.reshard.boxes import Box


class Boxed:
    """What a rank holds of one tensor.

    Args:
        shape: of the whole tensor.
        boxes: those that this rank holds, in the order of its elements.
        held: its elements (n,), contiguous; what is read is written here.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box], held: torch.Tensor) -> None:
        self._shape = torch.Size(shape)
        self._boxes = {torch.Size(box.offsets): box for box in boxes}
        self._held = held

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor, which is compared with that of the saved one."""
        return self._shape

    def at(self, offsets: Sequence[int]) -> torch.Tensor:
        """Return the box at ``offsets`` as a view of what is held."""
        box = self._boxes[torch.Size(offsets)]
        part = self._held.narrow(0, box.start, box.numel)
        return part.view(box.stored).permute(box.inverse)

    def boxes(self) -> list[Box]:
        """Return the boxes that this rank holds."""
        return list(self._boxes.values())

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._held.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes))
            for offsets, box in self._boxes.items()
        ]


class SavePlanner(DefaultSavePlanner):
    """Finds the boxes of what is saved."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the box, or what else there is under this name."""
        found = self.state_dict[index.fqn]
        if isinstance(found, Boxed):
            assert index.offset is not None
            return found.at(index.offset)
        return super().lookup_object(index)


class BoxedLoadPlanner(DefaultLoadPlanner):
    """Finds the boxes to read into.

    Args:
        state: what is to be filled, by the keys of the checkpoint.
        metadata: what the checkpoint consists of.
    """

    def __init__(self, state: dict[str, Any], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Set here: setting up would look through the values, of which it knows no boxes.
        self.state_dict, self.metadata = state, metadata

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the box, or the tensor that has this name."""
        found = self.state_dict[index.fqn]
        if isinstance(found, Boxed):
            assert index.offset is not None
            return found.at(index.offset)
        return super().lookup_tensor(index)
