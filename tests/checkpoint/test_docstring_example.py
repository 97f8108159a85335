"""The example in the docstring of `fsdp.checkpoint` runs as it stands, and loads what it saved."""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from conformance.ranks import RankContext
from fsdp import FullyShardedDataParallel, checkpoint
from tests.fsdp.ranks import on_ranks


def example() -> str:
    """The indented part of the docstring."""
    _, _, shown = (checkpoint.__doc__ or "").partition("::\n")
    return textwrap.dedent(shown)


def _run(context: RankContext, *, folder: str) -> None:
    names: dict[str, Any] = {}
    given = [mock.patch.object(dist, f"{verb}_process_group") for verb in ("init", "destroy")]
    with given[0], given[1], contextlib.chdir(folder):
        exec(compile(example(), "example.py", "exec"), names)
    loaded, optimizer = names["loaded"], names["optimizer"]
    with FullyShardedDataParallel.summon_full_params(loaded):
        for name, saved in names["model"].named_parameters():
            assert loaded.get_parameter(name).equal(saved.full_tensor()), name
    (state,) = optimizer.state.values()
    assert state["step"] == 1
    assert state["exp_avg"].any()


def test_the_example_of_the_package_loads_what_it_saved(tmp_path: Path) -> None:
    assert "checkpoint.save(" in example()
    on_ranks(_run, 2, folder=str(tmp_path))
    assert (tmp_path / "step-1").is_dir()
