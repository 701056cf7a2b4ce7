"""Evaluate arithmetic on task vectors that is written as text: `c + (b - a)`, `-0.5 * toxic`.

Allowed are names, numbers, `+ - * /` and parentheses; a name that is not an identifier must be quoted.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.merging.vectors import TaskVector

_TOKEN = re.compile(r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)|([A-Za-z_][\w.]*)|'([^']*)'|\"([^\"]*)\"")
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(text: str, vectors: Mapping[str, TaskVector]) -> TaskVector:
    """Evaluate an expression to a task vector."""
    try:
        value = _value(*_parsed(text, vectors))
    except SyntaxError:
        reason = "a name, number, operator or parenthesis is missing, or not expected"
    except (TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        reason = str(error)
    else:
        if isinstance(value, TaskVector):
            return value
        reason = "it is a number, not a task vector"
    raise RecipeError(f"'vector: {text}' cannot be read: {reason}; write for example c + (b - a)")


def _parsed(text: str, vectors: Mapping[str, TaskVector]) -> tuple[ast.AST, dict[str, TaskVector]]:
    """Return the syntax tree, with placeholders `_0`, `_1`, ... for names, and the task vector of each placeholder."""
    named = dict[str, TaskVector]()

    def placeholder(match: re.Match[str]) -> str:
        number, *forms = match.groups()
        if number is not None:
            return f" {number} "
        name = next(form for form in forms if form is not None)
        if name not in vectors:
            raise RecipeError(f"'vector: {text}' names {name!r}, which is no expert; {nearest(name, vectors)}")
        named[f"_{len(named)}"] = vectors[name]
        return f" _{len(named) - 1} "

    plain = " ".join(_TOKEN.sub(placeholder, text).split())
    if unexpected := re.search(r"[^\w\s.()*/+-]", plain):
        raise TypeError(f"{unexpected[0]!r} is not allowed")
    return ast.parse(plain, mode="eval").body, named


def _value(node: ast.AST, named: Mapping[str, TaskVector]) -> Any:
    match node:
        case ast.Name(id=name):
            return named[name]
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, named)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            left, right = _value(node.left, named), _value(node.right, named)
            vectors = isinstance(left, TaskVector), isinstance(right, TaskVector)
            if isinstance(node.op, ast.Add | ast.Sub) and sum(vectors) == 1:
                raise TypeError("a number and a task vector cannot be added")
            if (isinstance(node.op, ast.Mult) and all(vectors)) or (isinstance(node.op, ast.Div) and vectors[1]):
                raise TypeError("task vectors can be multiplied and divided by numbers only")
            return _OPERATORS[type(node.op)](left, right)
    raise TypeError("only names, numbers, + - * / and parentheses are allowed")
