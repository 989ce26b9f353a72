"""Parse the source of a term, `parse("Causal() & Window(256)")`; only whitelisted names are built."""

from __future__ import annotations

import ast
import operator
from typing import Any

from ...checks import suggest_name
from . import biases, masks, normalizers, scores
from .biases import Bias
from .masks.mask_algebra import Mask
from .term import Term

TERMS_BY_NAME: dict[str, type[Term]] = {
    cls.__name__: cls
    for cls in (
        *(masks.Causal, masks.Window, masks.Dilated, masks.Chunked, masks.Diagonal, masks.Prefix, masks.Global),
        *(masks.Padding, masks.Neighborhood),
        *(biases.Alibi, scores.Dot, scores.Cosine),
        *(normalizers.Softmax, normalizers.SinkSoftmax, normalizers.Sigmoid),
        *(normalizers.Sparsemax, normalizers.Entmax, normalizers.Hard, normalizers.Tapered),
    )
}
OPERATORS: dict[type[ast.AST], Any] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
}
TENSOR_TERMS = (
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
MAX_SOURCE_CHARACTERS = 2_000
MAX_TERM_COUNT = 100  # calls and ~ in one source
MAX_DEPTH = 200  # levels of the syntax tree
TOO_DEEP = "the term is nested too deeply; write it with fewer parentheses"


def parse(source: str) -> Any:
    """Return the term whose `repr` is `source`: terms with numbers as arguments, joined by `&`, `|`, `~`, `+` and `*`.

    >>> parse("Causal() & ~Diagonal()")
    Causal() & ~Diagonal()
    """
    if not isinstance(source, str):
        raise TypeError(f"parse takes a string, got {type(source).__name__}; write parse('Causal()')")
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise ValueError(f"a term must be at most {MAX_SOURCE_CHARACTERS} characters long, got {len(source)}")
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        if sum(isinstance(node, (ast.Call, ast.UnaryOp)) for node in ast.walk(tree)) > MAX_TERM_COUNT:
            raise ValueError(f"a term must be made of at most {MAX_TERM_COUNT} terms and ~; build it in Python")
        _check_depth(tree)
        return _term(tree)
    except SyntaxError as error:
        raise ValueError(
            f"not a term: {_short(source)!r} ({error.msg}); write for example Causal() & Window(256)"
        ) from None
    except (RecursionError, MemoryError):  # raised by Python's own parser
        raise ValueError(TOO_DEEP) from None


def _check_depth(tree: ast.expr) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise ValueError(TOO_DEEP)


def _term(node: ast.expr) -> Term:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            if name in TENSOR_TERMS:
                raise ValueError(
                    f"{name} holds tensors or functions, which cannot be parsed from text; build it in Python"
                )
            if name not in TERMS_BY_NAME:
                raise ValueError(f"unknown term {name!r}; {suggest_name(name, TERMS_BY_NAME)}")
            arguments = [_argument(x) for x in node.args]
            names = [keyword.arg for keyword in node.keywords]
            if None in names or len(set(names)) < len(names):
                raise ValueError(f"{name} takes each argument once, and no **; got {_short(ast.unparse(node))}")
            named = {str(keyword.arg): _argument(keyword.value) for keyword in node.keywords}
            try:
                return TERMS_BY_NAME[name](*arguments, **named)
            except TypeError as error:
                raise ValueError(f"{name}: {error}") from None
        case ast.Call(func=ast.Attribute(value=ast.Name(id="Bias" | "Score" as name), attr="of")):
            raise ValueError(f"{name}.of takes a function, which cannot be parsed from text; build it in Python")
        case ast.BinOp(left=factor, op=ast.Mult(), right=right) if not isinstance(factor, ast.Call):
            bias = _term(right)
            if not isinstance(bias, Bias):
                raise ValueError(f"a number may multiply a bias alone, got {bias!r}")
            return _argument(factor) * bias
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _term(left), _term(right)
            try:
                return OPERATORS[type(op)](a, b)
            except TypeError:
                raise ValueError(f"{a!r} and {b!r} do not combine: masks take &, |, ^ and -, biases + and -") from None
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            inner = _term(operand)
            if not isinstance(inner, Mask):
                raise ValueError(f"~ takes a mask, got {inner!r}")
            return ~inner
        case ast.Name(id=name) if name in TERMS_BY_NAME:
            raise ValueError(f"{name} is a class, not a term; write {name}(...)")
        case _:
            raise ValueError(
                f"not part of a term: {_short(ast.unparse(node))}; terms are names with numbers, &, |, ^, ~, +, - and *"
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
