"""Which lines of a traceback are the wrapper's, read from text of any machine."""

from __future__ import annotations

import pytest

from conformance.frames import first_line, user_part, user_place

BEGIN = "Traceback (most recent call last):\n"
SITE = "/opt/venv/lib64/python3.12/site-packages"
SUITE = (
    f'  File "{SITE}/conformance/scenarios/run.py", line 124, in phase\n    yield\n'
    f'  File "{SITE}/conformance/scenarios/programs.py", line 55, in train\n    w = run.build()\n'
)
MINE = (
    '  File "/home/me/conformance/my_adapter.py", line 31, in build\n    wrap(model)\n    ^^^^^\n'
)
WRAPPER = f'  File "{SITE}/sharder/wrap.py", line 7, in wrap\n    json.loads("")\n'
JSON = '  File "/usr/lib/python3.12/json/decoder.py", line 9, in decode\n    raise\n'
TORCH = f'  File "{SITE}/torch/nn/modules/module.py", line 1, in _call_impl\n    return f()\n'
FROZEN = '  File "<frozen importlib._bootstrap>", line 1, in _load\n'
OWN = f'  File "{SITE}/conformance/adapters/torch_fsdp2.py", line 120, in build\n    fully()\n'
DEFAULT = f'  File "{SITE}/conformance/adapter.py", line 9, in optimizer_step\n    w.x.step()\n'
STEP = f'  File "{SITE}/conformance/adapter.py", line 5, in step\n    self.optimizer_step(w)\n'
NAMELESS = f'  File "{SITE}/conformance/adapter.py", line 8, in <dictcomp>\n    p in state\n'
PRIVATE = f'  File "{SITE}/conformance/adapter.py", line 8, in _plain\n    raise\n'
LOCAL = '  File "/opt/python3.12/lib/python3.12/site-packages/other.py", line 2, in f\n    f()\n'


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (SUITE + MINE, "my_adapter.py:31"),
        (SUITE + MINE + WRAPPER, "wrap.py:7"),
        (SUITE + MINE + WRAPPER + JSON, "wrap.py:7"),
        (SUITE + MINE + TORCH + FROZEN, "my_adapter.py:31"),
        (SUITE + MINE + TORCH + WRAPPER + TORCH, "wrap.py:7"),
        (SUITE + LOCAL, "other.py:2"),
        (SUITE + OWN + TORCH, ""),
        (SUITE + STEP + DEFAULT, "in the default optimizer_step()"),
        (SUITE + STEP + NAMELESS, "in the default step()"),
        (SUITE + PRIVATE, ""),
        (SUITE + STEP + MINE + DEFAULT, "my_adapter.py:31"),
        (SUITE + STEP + TORCH, ""),
        (SUITE, ""),
        ("", ""),
    ],
)
def test_the_place_is_the_innermost_line_of_the_wrapper(frames: str, place: str) -> None:
    assert user_place(f"{BEGIN}{frames}ValueError: no\n") == place


def test_of_chained_exceptions_the_last_one_counts() -> None:
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    first = f"{BEGIN}{MINE}KeyError: 1\n"
    second = f"{BEGIN}{SUITE}{WRAPPER}ValueError: told\n{MINE}"
    assert user_place(first + chained + second) == "wrap.py:7"
    assert user_part(first + chained + second) == (
        f"{BEGIN}{WRAPPER}ValueError: told\n{MINE}".rstrip()
    )


@pytest.mark.parametrize(
    ("frames", "kept"),
    [(SUITE + MINE + TORCH, MINE + TORCH), (SUITE + OWN + TORCH, TORCH), (SUITE, SUITE)],
)
def test_the_part_of_a_traceback_begins_outside_of_the_suite(frames: str, kept: str) -> None:
    assert user_part(f"{BEGIN}{frames}ValueError: no\n") == f"{BEGIN}{kept}ValueError: no"


def test_nothing_raised_is_an_empty_text() -> None:
    assert (user_place(""), first_line(None), first_line(" a b \nc")) == ("", "", "a b")


def test_a_line_that_announces_the_next_one_is_told_with_it() -> None:
    assert (
        first_line("Error: in loading:\n\tMissing: x.\n\tMore") == "Error: in loading: Missing: x."
    )
    assert first_line("Error: in loading:\n") == "Error: in loading:"
    assert first_line("Error: in loading:\n\n  Missing: x.") == "Error: in loading: Missing: x."
