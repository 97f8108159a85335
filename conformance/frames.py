"""Which lines of a traceback are the wrapper's: neither the suite's, nor torch's, nor Python's.

Knows text as Python prints it, so that a stored one is read on any machine.
"""

from __future__ import annotations

import re

_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OF_TORCH = re.compile(r"/(site|dist)-packages/torch/")
_OF_PYTHON = re.compile(r"<|.*/lib(64)?/python3[^/]*/(?!.*(site|dist)-packages/)")
_SCENARIOS = re.compile(r"/scenarios/[^/]+$")


def first_line(text: str | None) -> str:
    """The first line of a message, whole; with the next one, if it only announces that."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()] or [""]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def user_place(traceback: str) -> str:
    """``file.py:31``, the innermost line of the wrapper; empty if there is none."""
    suite = _suite(traceback)
    own = [
        f"{file.rpartition('/')[2]}:{line}"
        for file, line, _ in _frames(traceback)
        if not (file.startswith(suite) or _OF_TORCH.search(file) or _OF_PYTHON.match(file))
    ]
    return own[-1] if own else ""


def user_part(traceback: str) -> str:
    """The traceback without the frames of the suite that led to the wrapper's."""
    suite = _suite(traceback)
    frames = _frames(traceback)
    first = next((n for n, (file, _, _) in enumerate(frames) if not file.startswith(suite)), 0)
    text = _last(traceback)
    start = frames[first][2] if frames else 0
    return f"{_BEGIN}\n{text[start:]}".rstrip()


def _last(traceback: str) -> str:
    """Behind the heading of the last of chained exceptions."""
    return f"\n{traceback}".rpartition(f"\n{_BEGIN}\n")[2]


def _frames(traceback: str) -> list[tuple[str, str, int]]:
    """(file, line, where in the text) of every frame of the last exception, outermost first."""
    text = _last(traceback)
    frames: list[tuple[str, str, int]] = []
    at = 0
    for line in text.splitlines(keepends=True):
        if not line.startswith(" "):
            break
        if found := _FRAME.match(line):
            frames.append((found["file"], found["line"], at))
        at += len(line)
    return frames


def _suite(traceback: str) -> str:
    """The folder of the suite that ran: its scenario is the outermost frame."""
    frames = _frames(traceback)
    outermost = frames[0][0] if frames else ""
    folder = _SCENARIOS.sub("/", outermost)
    return folder if folder != outermost else "\0"
