"""What ranks tell each other of a state arrives as it was."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from fsdp.optim_state.vocabulary import StateInfo, _PosDimTensorInfo, info_of

SCALARS = {
    "float32": torch.tensor(-0.1),
    "float64": torch.tensor(math.pi, dtype=torch.float64),
    "bfloat16": torch.tensor(3.0, dtype=torch.bfloat16),
    "float8": torch.tensor(1.5).to(torch.float8_e4m3fn),
    "int64": torch.tensor(-(2**62) - 1),
    "bool": torch.tensor(True),
    "complex64": torch.tensor(1 - 2j),
    "minus zero": torch.tensor(-0.0),
    "nan": torch.tensor(0x7FC00123, dtype=torch.int32).view(torch.float32),
    "a view": torch.arange(4.0)[2],
    "to be negated": torch.tensor([1 + 2j]).conj().imag[0],
}


def _sent(info: StateInfo) -> StateInfo:
    found: StateInfo = pickle.loads(pickle.dumps(info))
    return found


@pytest.mark.parametrize("value", SCALARS.values(), ids=SCALARS)
def test_a_tensor_without_dims_arrives_bit_for_bit(value: torch.Tensor) -> None:
    found = _sent(info_of({"step": value})).scalar_tensors["step"]
    assert (found.dtype, found.shape) == (value.dtype, torch.Size([]))
    both = (found.resolve_neg(), value.resolve_neg())
    bits = [tensor.reshape(1).view(torch.uint8).tolist() for tensor in both]
    assert bits[0] == bits[1]


def test_it_arrives_on_the_host_whatever_the_default_device_is() -> None:
    sent = info_of({"step": torch.tensor(3.0)})
    with torch.device("meta"):
        found = _sent(sent)
    assert found.scalar_tensors["step"].item() == 3.0


def test_a_subclass_arrives_as_one() -> None:
    found = _sent(info_of({"step": torch.nn.Parameter(torch.tensor(2.0))}))
    assert found.scalar_tensors["step"].item() == 2.0
    info = StateInfo(scalar_tensors={"step": torch.nn.Parameter(torch.tensor(2.0))})
    assert isinstance(_sent(info).scalar_tensors["step"], torch.nn.Parameter)


def test_all_else_arrives_too_and_what_was_told_stays() -> None:
    info = info_of({"exp_avg": torch.ones(2, 3), "step": torch.tensor(4.0), "name": "w", "x": None})
    found = _sent(info)
    assert found.tensors == {"exp_avg": _PosDimTensorInfo(torch.Size([2, 3]), torch.float32)}
    assert found.non_tensors == {"name": "w", "x": None}
    assert found.facts() == info.facts()
    assert info.scalar_tensors["step"].item() == 4.0


def test_a_tensor_without_dims_takes_little_more_than_its_bits() -> None:
    def length(count: int) -> int:
        scalars = {f"{number:4}": torch.tensor(float(number)) for number in range(count)}
        return len(pickle.dumps(StateInfo(scalar_tensors=scalars)))

    assert length(101) - length(1) < 100 * 40
