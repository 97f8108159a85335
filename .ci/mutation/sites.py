"""Which mutants a module has: cosmic-ray's operators, where a mutant could change behaviour.

Knows source text only; must not know tests, processes or results.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator

OPERATORS = (
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ExceptionReplacer", "NumberReplacer", "ZeroIterationForLoop"),
    *("ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not"),
    # Of the eleven others that an operator can become, its opposite and one that is near it: a test
    # that tells those apart tells `<<` and `**` apart too, and counting them would flatter.
    *("ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add"),
    *("ReplaceBinaryOperator_Mul_Add", "ReplaceBinaryOperator_Mul_FloorDiv"),
    *("ReplaceBinaryOperator_Div_Mul", "ReplaceBinaryOperator_FloorDiv_Mul"),
    *("ReplaceBinaryOperator_FloorDiv_Mod", "ReplaceBinaryOperator_Mod_FloorDiv"),
    *("ReplaceBinaryOperator_Pow_Mul", "ReplaceBinaryOperator_BitOr_BitAnd"),
    *("ReplaceBinaryOperator_BitAnd_BitOr", "ReplaceBinaryOperator_BitXor_BitOr"),
    *("ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq"),
    *("ReplaceComparisonOperator_Is_IsNot", "ReplaceComparisonOperator_IsNot_Is"),
    *("ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_Lt_GtE"),
    *("ReplaceComparisonOperator_LtE_Lt", "ReplaceComparisonOperator_LtE_Gt"),
    *("ReplaceComparisonOperator_Gt_GtE", "ReplaceComparisonOperator_Gt_LtE"),
    *("ReplaceComparisonOperator_GtE_Gt", "ReplaceComparisonOperator_GtE_Lt"),
)
"""Names of cosmic-ray's core operators."""

Position = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A module's n-th place where an operator applies."""

    module: str
    operator: str
    occurrence: int
    line: int


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed place: a line as it is and as it becomes, both without indentation."""

    place: Place
    line: int
    old: str
    new: str
    text: str = field(repr=False)
    """The whole module with this change."""

    @property
    def key(self) -> str:
        """The same in every run, as long as nothing above and in its line changes."""
        place = self.place
        name = f"{place.module}:{self.line}:{place.operator}:{place.occurrence}"
        return f"{name}:{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"


@cache
def places_of(root: Path, module: str) -> list[Place]:
    """Return where a module could be changed so that a test might tell, line by line.

    Left out are annotations, decorators, assertions (and `zip(strict=)`, which is one), what only
    a type checker reads, and the text of an error.
    """
    source = (root / module).read_text(encoding="utf-8")
    silent = _silent(ast.parse(source))
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name in OPERATORS:
        operator = _operator(name)
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(starts):
            if not any(first <= start < last for first, last in silent):
                place = Place(module=module, operator=name, occurrence=occurrence, line=start[0])
                found.append(place)
    return sorted(found, key=lambda p: (p.line, p.operator, p.occurrence))


def mutant_at(root: Path, place: Place) -> Mutant | None:
    """Return what a place becomes; None if that is no Python, or is what another operator does."""
    source = (root / place.module).read_text(encoding="utf-8")
    text: str | None = mutate_code(source, _operator(place.operator), place.occurrence)
    if text is None or not _compiles(text):
        return None
    before, after = source.splitlines(), text.splitlines()
    pairs = zip(before, after, strict=False)
    index = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
    if index is None or (place.operator == "AddNot" and _said_otherwise(source, place.line)):
        return None
    old, new = before[index].strip(), after[index].strip()
    return Mutant(place=place, line=index + 1, old=old, new=new, text=text)


def _operator(name: str) -> Operator:
    return cosmic_ray.plugins.get_operator(f"core/{name}")()


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _said_otherwise(source: str, line: int) -> bool:
    """Whether another operator negates the condition on this line: a comparison, or a `not`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While) and node.test.lineno == line:
            if isinstance(node.test, ast.UnaryOp):
                return True
            if isinstance(node.test, ast.Compare):
                (*_, last) = node.test.ops
                return len(node.test.ops) == 1 and not isinstance(last, ast.In | ast.NotIn)
    return False


def _silent(tree: ast.Module) -> list[tuple[Position, Position]]:
    """Return the stretches of the source where a change is none that a test could tell."""
    found = []
    for part in (part for node in ast.walk(tree) for part in _silent_parts(node)):
        end = (part.end_lineno or part.lineno, part.end_col_offset or part.col_offset)
        found.append(((part.lineno, part.col_offset), end))
    return found


def _silent_parts(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from node.decorator_list
            if node.returns is not None:
                yield node.returns
        case ast.ClassDef():
            yield from node.decorator_list
        case ast.arg(annotation=ast.expr() as kind) | ast.AnnAssign(annotation=kind):
            yield kind
        case ast.Assert() | ast.JoinedStr():
            yield node
        case ast.Raise(exc=ast.Call() as error):
            yield from error.args
        case ast.keyword(arg="strict", value=flag):
            yield flag
        case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
            yield node
        case ast.Assign(value=ast.BinOp(op=ast.BitOr()) as kind) if _is_type(kind):
            yield kind


def _is_type(value: ast.BinOp) -> bool:
    """Whether this is an alias such as `int | str`: a type, which runs only to be made."""
    words = ast.BinOp | ast.Name | ast.Attribute | ast.Subscript | ast.Tuple | ast.BitOr | ast.Load
    none = (n for n in ast.walk(value) if isinstance(n, ast.Constant) and n.value is None)
    return {n for n in ast.walk(value) if not isinstance(n, words)} <= set(none)
