"""Whether a group's parameters can be trained as they are, and in which dtypes. No memory."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp.engine.group_options import GroupOptions
from fsdp.engine.param import FSDPParam


def check_ready(params: Sequence[FSDPParam], options: GroupOptions, group: str) -> None:
    """Choose the dtypes of ``params``.

    Raises:
        RuntimeError: parameters on meta, or off the CPU although offloaded to it.
        AssertionError: trainable parameters of several dtypes.
    """
    _check_meta(params, options)
    if options.offload:
        _check_offload(params, options)
    for param in params:
        param.choose_dtypes(options.mp_policy.param_dtype, options.mp_policy.reduce_dtype)
    found = zip(params, options.exposure.requires_grad(params), strict=True)
    check_originals([param for param, trains in found if trains], group)


def check_originals(trainable: Sequence[FSDPParam], group: str) -> None:
    """Refuse parameters of several dtypes to be trained in one group.

    Raises:
        AssertionError: names the dtypes.
    """
    originals = {param.dtype for param in trainable}
    if len(originals) > 1:
        raise AssertionError(
            f"FSDP expects uniform original parameter dtype but got {originals} in '{group}'"
        )


def _check_meta(params: Sequence[FSDPParam], options: GroupOptions) -> None:
    names = [param.name for param in params if options.exposure.local(param).device.type == "meta"]
    if names:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but "
            f"the following were still on meta device: {names}\nFor example, call "
            "module.to_empty(device) and then initialise the values."
        )


def _check_offload(params: Sequence[FSDPParam], options: GroupOptions) -> None:
    found = [
        (param.fqn, local.device)
        for param in params
        if (local := options.exposure.local(param)).device.type != "cpu"
    ]
    if found:
        raise RuntimeError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
            'For example, load a CPU state dict or call module.to_empty(device="cpu"). '
            f"Found following parameters on non-CPU device: {found}"
        )
