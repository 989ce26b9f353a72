"""From the source of a term to the term, by whitelist: `parse("Causal() & Window(256)")`."""

from __future__ import annotations

import ast
import difflib
import operator
from typing import Any

from . import biases, masks, normalizers, scores
from .masks.mask_algebra import Mask
from .term import Term

NAMES: dict[str, type[Term]] = {
    cls.__name__: cls
    for cls in (
        *(masks.Causal, masks.Window, masks.Dilated, masks.Diagonal, masks.Prefix, masks.Global, masks.Padding),
        *(biases.Alibi, scores.Dot, scores.Cosine),
        *(normalizers.Softmax, normalizers.SinkSoftmax, normalizers.Sigmoid),
        *(normalizers.Sparsemax, normalizers.Entmax, normalizers.Hard, normalizers.Tapered),
    )
}
OPERATORS: dict[type[ast.AST], Any] = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Add: operator.add}
TENSORS = (
    "Near",
    "Documents",
    "Blocks",
    "Dense",
    "Rule",
    "Relative",
    "Gaussian",
    "Added",
    "Bilinear",
    "Additive",
    "Location",
)
LONGEST = 2_000
MOST = 100


def parse(source: str) -> Term:
    """The term whose `repr` is `source`; only terms made of numbers, `&`, `|`, `~` and `+` are understood.

    >>> parse("Causal() & ~Diagonal()")
    Causal() & ~Diagonal()
    """
    if not isinstance(source, str):
        raise TypeError(f"a term is parsed from a string, got {type(source).__name__}")
    if len(source) > LONGEST:
        raise ValueError(f"a term must be at most {LONGEST} characters long, got {len(source)}")
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        if sum(isinstance(node, (ast.Call, ast.UnaryOp)) for node in ast.walk(tree)) > MOST:
            raise ValueError(f"a term must be made of at most {MOST} terms and ~")
        return _term(tree)
    except SyntaxError as error:
        raise ValueError(
            f"not a term: {_short(source)!r} ({error.msg}); write for example Causal() & Window(256)"
        ) from None
    except (RecursionError, MemoryError):
        raise ValueError("the term is nested too deeply; write it with fewer parentheses") from None


def _term(node: ast.expr) -> Term:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            if name in TENSORS:
                raise ValueError(f"{name} holds tensors or functions, which have no source; build it in Python")
            if name not in NAMES:
                near = difflib.get_close_matches(name, NAMES, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known terms: {', '.join(NAMES)}"
                raise ValueError(f"unknown term {name!r}; {hint}")
            arguments = [_argument(x) for x in node.args]
            names = [keyword.arg for keyword in node.keywords]
            if None in names or len(set(names)) < len(names):
                raise ValueError(f"{name} takes each argument once and by name, no **; got {_short(ast.unparse(node))}")
            named = {str(keyword.arg): _argument(keyword.value) for keyword in node.keywords}
            try:
                return NAMES[name](*arguments, **named)
            except TypeError as error:
                raise ValueError(f"{name}: {error}") from None
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _term(left), _term(right)
            try:
                return OPERATORS[type(op)](a, b)
            except TypeError:
                raise ValueError(f"{a!r} and {b!r} do not combine: masks take & and |, biases +") from None
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            inner = _term(operand)
            if not isinstance(inner, Mask):
                raise ValueError(f"~ takes a mask, got {inner!r}")
            return ~inner
        case ast.Name(id=name) if name in NAMES:
            raise ValueError(f"{name} is a name, not a term; write {name}(...)")
        case _:
            raise ValueError(
                f"not part of a term: {_short(ast.unparse(node))}; terms are names with numbers, &, |, ~ and +"
            )


def _short(source: str) -> str:
    return source if len(source) <= 80 else source[:77] + "..."


def _argument(node: ast.expr) -> Any:
    match node:
        case ast.Call() | ast.BinOp():
            return _term(node)
        case ast.Constant(value=bool() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(_argument(x) for x in elements)
        case _:
            raise ValueError(f"arguments of a term must be numbers or terms, got {_short(ast.unparse(node))}")
