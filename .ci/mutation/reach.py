"""Which lines a test must run to be able to tell a change on one line. Knows source text only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Part = ast.stmt | ast.excepthandler | ast.match_case
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def reach(source: str, line: int) -> set[int]:
    """Return lines of which a test runs at least one, if it can tell a change on `line`.

    These are the lines of the innermost statement, without its body. A function's head runs when it
    is defined, and tells in its body; what a module or a class says tells in all of the module.
    """
    tree = ast.parse(source)
    parts = [part for part in _parts(tree) if _first(part) <= line <= _last(part)]
    functions = [part for part in parts if isinstance(part, _FUNCTIONS)]
    if not functions:
        return {n for part in _parts(tree) if isinstance(part, _FUNCTIONS) for n in _body(part)}
    innermost = min(parts, key=lambda part: (_last(part) - _first(part), -_first(part)))
    if isinstance(innermost, _FUNCTIONS):
        return _body(innermost)
    body = getattr(innermost, "body", None)
    last = max(_first(innermost), _first(body[0]) - 1) if body else _last(innermost)
    return set(range(_first(innermost), last + 1))


def _parts(tree: ast.AST) -> Iterator[Part]:
    return (node for node in ast.walk(tree) if isinstance(node, Part))


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    return set(range(_first(function.body[0]), _last(function) + 1))


def _first(part: Part) -> int:
    return part.pattern.lineno if isinstance(part, ast.match_case) else part.lineno


def _last(part: Part) -> int:
    if isinstance(part, ast.match_case):
        return _last(part.body[-1])
    return part.end_lineno or part.lineno
