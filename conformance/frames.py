"""Which lines of a traceback are the wrapper's: neither the suite's, nor torch's, nor Python's.

Knows text as Python prints it, so that a stored one is read on any machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)(, in (?P<name>.+))?')
_OF_TORCH = re.compile(r"/(site|dist)-packages/torch/")
_OF_PYTHON = re.compile(r"<|.*/lib(64)?/python3[^/]*/(?!.*(site|dist)-packages/)")
_SCENARIOS = re.compile(r"/scenarios/[^/]+$")


def first_line(text: str | None) -> str:
    """The first line of a message, whole; with the next one, if it only announces that."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()] or [""]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def user_place(traceback: str) -> str:
    """``file.py:31``, the innermost line of the wrapper; empty if there is none.

    What the default of a verb raises is told by its name: it asks for what the wrapper has not.
    """
    suite, frames = _suite(traceback), _frames(traceback)
    own = [
        f"{frame.file.rpartition('/')[2]}:{frame.line}"
        for frame in frames
        if not (
            frame.file.startswith(suite)
            or _OF_TORCH.search(frame.file)
            or _OF_PYTHON.match(frame.file)
        )
    ]
    if own:
        return own[-1]
    defaults = f"{suite}adapter.py"
    if not frames or frames[-1].file != defaults:
        return ""
    verbs = [f.name for f in frames if f.file == defaults and not f.name.startswith(("_", "<"))]
    return f"in the default {verbs[-1]}()" if verbs else ""


def user_part(traceback: str) -> str:
    """The traceback without the frames of the suite that led to the wrapper's."""
    suite = _suite(traceback)
    frames = _frames(traceback)
    first = next((n for n, frame in enumerate(frames) if not frame.file.startswith(suite)), 0)
    text = _last(traceback)
    start = frames[first].at if frames else 0
    return f"{_BEGIN}\n{text[start:]}".rstrip()


def _last(traceback: str) -> str:
    """Behind the heading of the last of chained exceptions."""
    return f"\n{traceback}".rpartition(f"\n{_BEGIN}\n")[2]


@dataclass(frozen=True)
class _Frame:
    """One frame, and where its text begins; the place of a syntax error is one, without a name."""

    file: str
    line: str
    name: str
    at: int


def _frames(traceback: str) -> list[_Frame]:
    """Every frame of the last exception, outermost first."""
    text = _last(traceback)
    frames: list[_Frame] = []
    at = 0
    for line in text.splitlines(keepends=True):
        if not line.startswith(" "):
            break
        if found := _FRAME.match(line):
            frames.append(_Frame(found["file"], found["line"], found["name"] or "<", at))
        at += len(line)
    return frames


def _suite(traceback: str) -> str:
    """The folder of the suite that ran: its scenario is the outermost frame."""
    frames = _frames(traceback)
    outermost = frames[0].file if frames else ""
    folder = _SCENARIOS.sub("/", outermost)
    return folder if folder != outermost else "\0"
