"""Meshes that outlive the job that made them, and what remembers them.

DTensor keeps the shardings that it has found, some below Python, and answers for an equal mesh of a
later job with the groups of an earlier one. They are cleared after a job that made groups. Whether
that was enough is looked at, not believed: a mesh that is held anywhere is still an object.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["forget_meshes"]


def forget_meshes(groups: list[dist.ProcessGroup]) -> bool:
    """Clear what DTensor remembers of meshes over ``groups``; whether none is left.

    Caches of other threads, such as those that run an accelerator's backward, are out of reach.
    """
    if not groups or not _meshes_over(groups):
        return True
    _clear_caches()
    gc.collect()
    return not _meshes_over(groups)


def _meshes_over(groups: list[dist.ProcessGroup]) -> bool:
    """Whether there is a mesh of any of ``groups``.

    What jobs before this one left is frozen, and not among the objects that are looked at.
    """
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    meshes = [each for each in gc.get_objects() if type(each) is mesh]
    return any(group in groups for each in meshes for group in each.get_all_groups())


_CACHED = (
    ("_api", "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear"),
    ("_sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
)
"""Module of DTensor, and what clears a cache there."""


def _clear_caches() -> None:
    """Those of this thread; one that a version of torch does not have is passed over."""
    for module, name in _CACHED:
        clear: Any = sys.modules.get(f"torch.distributed.tensor.{module}")
        for part in name.split("."):
            clear = getattr(clear, part, None)
        if clear is not None:
            clear()
    below = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if below is not None:
        below()
