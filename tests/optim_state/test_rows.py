"""Single sentences about optimizer states: which parameters are meant, who tells of the time."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks import RankContext
from fsdp.optim_state import profiler
from fsdp.optim_state.profiler import SimpleProfiler
from fsdp.wrapper import FullyShardedDataParallel as FSDP
from tests.fsdp.ranks import on_ranks
from tests.optim_state.running import assert_equal, optimizer_for, step, wrapped


def _of_the_model(context: RankContext) -> None:
    """Without an optimizer and without its input, the parameters are the model's, in order."""
    model = wrapped(use_orig_params=True)
    optimizer = optimizer_for(model, "adam")
    step(model, optimizer, 0, context.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        found = FSDP.shard_full_optim_state_dict(full, model)
        given = FSDP.shard_full_optim_state_dict(full, model, list(model.parameters()))
    assert found["param_groups"] == given["param_groups"]
    assert_equal(found["state"], given["state"])
    torch.optim.Adam(model.parameters(), lr=0.3, amsgrad=True).load_state_dict(found)
    assert_equal(found["state"], optimizer.state_dict()["state"])


def test_the_parameters_are_the_models_where_neither_optimizer_nor_input_is_given() -> None:
    on_ranks(_of_the_model, 2)


def _told(context: RankContext) -> list[Any]:
    """The lines that this rank logs of two dumps, and what is left of the times."""
    del context
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger, level = logging.getLogger(profiler.__name__), dist.get_debug_level()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        SimpleProfiler.reset()
        with (
            SimpleProfiler.profile(SimpleProfiler.Type.ALL),
            SimpleProfiler.profile(SimpleProfiler.Type.ALLGATHER),
        ):
            dist.barrier()
        SimpleProfiler.dump_and_reset("saved in")
        left = dict(SimpleProfiler.results)
        dist.set_debug_level(dist.DebugLevel.OFF)
        SimpleProfiler.dump_and_reset("never told")
    finally:
        dist.set_debug_level(level)
        logger.setLevel(before)
        logger.removeHandler(handler)
    return [["all_gather" in line and line.startswith("saved in") for line in lines], left]


def test_the_first_rank_tells_where_the_time_went() -> None:
    assert on_ranks(_told, 2) == ([[True], {}], [[], {}])
