"""Meshes as variants name them."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from conformance.adapter import BuildConfig, Refusal


def meshes_of_four(**options: Any) -> dict[str, dict[str, Any]]:
    """Variants: every mesh (replicas, ranks per replica) of four ranks, each with `options`."""
    return {f"mesh=({n},{4 // n})": {**options, "replicas": n} for n in (1, 2, 4)}


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
