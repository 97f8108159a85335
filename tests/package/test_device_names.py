"""No code of ours names a kind of accelerator or its backend where it means "the accelerator"."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.package.tree import PACKAGES, python_files, shown

HARD_WIRED = re.compile(
    r"(?<![a-z])(cuda|nccl|rocm|rccl|hip|xpu|xccl|hpu|hccl|npu|mps|mtia|musa|tpu|xla)(?![a-z])",
    re.IGNORECASE,
)

# The id of a bug report names a repository, not a device.
REPORT_ID = re.compile(r"\b[\w-]+/[\w.-]+#\d+")

# (file, a part of the line) to the reason. A line that no file holds any more fails.
ALLOWED: dict[tuple[str, str], str] = {
    ("fsdp/comm_settings.py", 'backend: str = "NCCL"'): "torch's default argument",
    ("fsdp/engine/torch_private.py", "only nccl knows it"): "a fact about that one backend",
    ("fsdp/engine/torch_private.py", "dist._make_nccl_premul_sum("): "torch's name of the function",
}


class Line(NamedTuple):
    """A line of a file that names a device."""

    file: str
    number: int
    text: str


def names_a_device(text: str) -> bool:
    return bool(HARD_WIRED.search(REPORT_ID.sub("", text)))


def lines_with_a_device() -> list[Line]:
    return [
        Line(shown(path), number, text.strip())
        for path in python_files(*PACKAGES)
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if names_a_device(text)
    ]


def allows(key: tuple[str, str], line: Line) -> bool:
    return line.file == key[0] and key[1] in line.text


def test_no_device_is_hard_wired() -> None:
    found = [
        f"{line.file}:{line.number}: {line.text}"
        for line in lines_with_a_device()
        if not any(allows(key, line) for key in ALLOWED)
    ]
    assert not found, "say 'the accelerator' (torch.accelerator), or allow the line with a reason"


@pytest.mark.parametrize("key", ALLOWED)
def test_an_allowed_line_still_exists_and_has_a_reason(key: tuple[str, str]) -> None:
    assert any(allows(key, line) for line in lines_with_a_device())
    assert ALLOWED[key].strip()


@pytest.mark.parametrize(
    "text",
    ["torch.cuda.synchronize()", "'cuda:0'", "t.is_cuda", "NCCL_DEBUG", "Xpu", "backend='hccl'"],
)
def test_a_hard_wired_name_is_seen(text: str) -> None:
    assert names_a_device(text)


@pytest.mark.parametrize(
    "text", ["torch.accelerator", "gloo", "barracuda", "chips", "xlarge", "pytorch/xla#1"]
)
def test_an_innocent_word_is_not_seen(text: str) -> None:
    assert not names_a_device(text)
