"""Parameters whose local tensor says itself what is gathered and what becomes of it.

A local tensor with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (a quantised tensor, one
that travels in another dtype) chooses the tensors to gather and makes the whole parameter from the
results. All tensors of a group, and its plain shard, travel as bytes in one collective.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp.api import MixedPrecisionPolicy
from fsdp.engine.buffer import Buffer
from fsdp.engine.exposure import AnyExposure
from fsdp.engine.mesh import DataParallelMeshInfo
from fsdp.engine.param import FSDPParam
from fsdp.engine.streams import Done, Streams
from fsdp.engine.torch_private import all_gather

_ALIGN = 16  # bytes; every tensor is viewed in its own dtype inside the gathered bytes
_OLD_SIGNATURE, _NEW_SIGNATURE = 1, 5


def extends(local: torch.Tensor) -> bool:
    """Whether ``local`` takes part in its own gather.

    Raises:
        AssertionError: it has one of the two methods only.
    """
    before = hasattr(local, "fsdp_pre_all_gather")
    after = hasattr(local, "fsdp_post_all_gather")
    if before != after:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
            f"all-gather extensions: {type(local)}"
        )
    return before


@dataclass(eq=False)
class _Extended:
    """One such parameter: what it sends now, and the memory in which it is whole."""

    param: FSDPParam
    sent: tuple[torch.Tensor, ...] = ()
    metadata: Any = None
    outputs: tuple[Buffer, ...] = ()
    inner: tuple[torch.Tensor, ...] = ()


@dataclass(eq=False)
class ExtendedGathering:
    """The gather of a group with such parameters, in flight."""

    gathered: torch.Tensor  # (W, bytes per rank)
    done: Done | None


class ExtendedParams:
    """The extended parameters of one group."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        exposure: AnyExposure,
        info: DataParallelMeshInfo,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self._all = [_Extended(param) for param in params]
        self._exposure = exposure
        self._info = info
        self._device = device
        self._mp_policy = mp_policy

    def start(self, shard: torch.Tensor, streams: Streams, *, async_op: bool) -> ExtendedGathering:
        """Ask every parameter what to send, and gather it together with ``shard``.

        *Collective* over the shard group. On the current stream: users' code runs in it.
        """
        for item in self._all:
            item.sent, item.metadata = self._ask(item.param)
        sent = [shard, *(tensor for item in self._all for tensor in item.sent)]
        width = sum(_room(tensor) for tensor in sent)
        packed = torch.empty(width, dtype=torch.uint8, device=self._device)
        offset = 0
        for tensor in sent:
            nbytes = tensor.numel() * tensor.itemsize
            target = packed.narrow(0, offset, nbytes)
            if nbytes:
                target.view(tensor.dtype).copy_(tensor.reshape(-1), non_blocking=True)
            offset += _room(tensor)
        group, world = self._info.shard_group, self._info.shard_size
        if group is None or world == 1:
            return ExtendedGathering(packed.view(1, -1), None)
        gathered = torch.empty(world * width, dtype=torch.uint8, device=self._device)
        late = async_op or streams.blocks_host
        work: dist.Work | None = all_gather(gathered, packed, group, async_op=late)
        event = None if late else streams.record()
        return ExtendedGathering(
            gathered.view(world, -1), Done(streams, work if late else None, event)
        )

    def finish(
        self, gathering: ExtendedGathering, shard: torch.Tensor, plain: Callable[[Any], None]
    ) -> None:
        """Give the plain shards (W, S) to ``plain``, and make the extended parameters whole."""
        if gathering.done is not None:
            gathering.done.wait()
        plain(_part(gathering.gathered, 0, shard))
        offset = _room(shard)
        for item in self._all:
            if not item.outputs:
                item.outputs = tuple(
                    Buffer(self._info.shard_size * t.numel(), t.dtype, self._device)
                    for t in item.sent
                )
            for tensor, output in zip(item.sent, item.outputs, strict=True):
                output.allocate()
                part = _part(gathering.gathered, offset, tensor)
                output.data.view(part.shape).copy_(part)
                offset += _room(tensor)
            self._make_whole(item)
            item.sent, item.metadata = (), None

    def _make_whole(self, item: _Extended) -> None:
        param, local = item.param, self._exposure.local(item.param)
        outputs = self._gathered_outputs(item)
        after: Any = local.fsdp_post_all_gather  # type: ignore[attr-defined]
        if param.unsharded is not None:
            for tensor in item.inner:
                _resize(tensor, tensor.numel() * tensor.itemsize)
            after(outputs, item.metadata, param.compute_dtype, out=param.unsharded)
            return
        whole, item.inner = after(outputs, item.metadata, param.compute_dtype)
        whole = torch.as_strided(whole, param.shape, _contiguous(param.shape), storage_offset=0)
        # Its own version counter, for the reason that plain leaves have one.
        param.unsharded = self._exposure.leaf(param, whole.data)

    def free(self) -> None:
        """Free the whole parameters after the kernels given so far."""
        for item in self._all:
            for output in item.outputs:
                output.free()
            for tensor in item.inner:
                _resize(tensor, 0)

    def _ask(self, param: FSDPParam) -> tuple[tuple[torch.Tensor, ...], Any]:
        local = self._exposure.local(param)
        if local.device != self._device:
            local = local.to(self._device, non_blocking=True)
        before: Any = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        count = len(inspect.signature(before).parameters)
        mesh, module = self._info.shard_mesh, param.info.module
        if count == _OLD_SIGNATURE:
            sent, metadata = before(mesh)
        elif count == _NEW_SIGNATURE:
            stride = _contiguous(param.shape)
            sent, metadata = before(mesh, param.shape, stride, module, self._mp_policy)
        else:
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather of '{param.fqn}': {inspect.signature(before)}; "
                "expects (mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
            )
        return tuple(self._padded(param, local, tensor) for tensor in sent), metadata

    def _padded(self, param: FSDPParam, local: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """Fill the rows that the last ranks lack, or their gather would not match the others'."""
        if not self._uneven(param) or not sent.ndim or sent.shape[0] != local.shape[0]:
            return sent
        rows = -(-param.shape[0] // self._info.shard_size)
        padded = sent.new_zeros((rows, *sent.shape[1:]))
        padded[: sent.shape[0]] = sent
        return padded

    def _uneven(self, param: FSDPParam) -> bool:
        return param.dim == 0 and param.shape[0] % self._info.shard_size != 0

    def _gathered_outputs(self, item: _Extended) -> tuple[torch.Tensor, ...]:
        outputs = []
        for output, sent in zip(item.outputs, item.sent, strict=True):
            whole = output.data.view(-1, *sent.shape[1:])
            rows = item.param.shape[0]
            padded = self._uneven(item.param) and sent.ndim > 0
            if padded and sent.shape[0] * self._info.shard_size > rows:
                whole = whole[:rows]
            outputs.append(whole)
        return tuple(outputs)


def _room(tensor: torch.Tensor) -> int:
    nbytes = tensor.numel() * tensor.itemsize
    return -(-nbytes // _ALIGN) * _ALIGN


def _part(gathered: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return one tensor's pieces (W, numel) inside the gathered bytes."""
    nbytes = like.numel() * like.itemsize
    return gathered.narrow(1, offset, nbytes).view(like.dtype)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _resize(tensor: torch.Tensor, nbytes: int) -> None:
    tensor.untyped_storage().resize_(nbytes)
