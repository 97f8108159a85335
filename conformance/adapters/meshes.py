"""Meshes as variants name them."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from conformance.adapter import BuildConfig, Refusal

MESHES_OF_FOUR = {"mesh=(1,4)": 1, "mesh=(2,2)": 2, "mesh=(4,1)": 4}
"""Every mesh (replicas, ranks per replica) of four ranks, and its replicas."""


def meshes_of_four() -> dict[str, dict[str, Any]]:
    """Variants of an adapter whose only option is how many replicas there are."""
    return {name: {"replicas": count} for name, count in MESHES_OF_FOUR.items()}


def hybrid_mesh(config: BuildConfig, replicas: int) -> Any:
    """A mesh (replicas, ranks per replica). *Collective* over all ranks.

    Raises:
        Refusal: the ranks cannot be divided into that many replicas.
    """
    world = config.world_size
    if world % replicas:
        raise Refusal(f"{world} ranks cannot form {replicas} replicas of equal size")
    return init_device_mesh(
        config.device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )
