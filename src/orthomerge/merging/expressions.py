"""Arithmetic on task vectors, as one line of a recipe: `c + (b - a)`, `-0.5 * toxic`.

Grammar: sums of products of numbers, names and parentheses; a name that is not a plain word goes in quotes. At most
one factor of a product may be a vector.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from orthomerge.errors import RecipeError, nearest
from orthomerge.merging.vectors import TaskVector

__all__ = ["evaluate"]

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)|([A-Za-z_][\w.]*)|'([^']*)'|\"([^\"]*)\"|([-+*/()]))")
_DEEPEST = 50


def evaluate(text: str, vectors: Mapping[str, TaskVector]) -> TaskVector:
    """The task vector that an expression stands for."""
    return _Parser(text, vectors).parse()


class _Parser:
    def __init__(self, text: str, vectors: Mapping[str, TaskVector]) -> None:
        self._text = text
        self._vectors = vectors
        self._tokens = _tokens(text)
        self._depth = 0

    def parse(self) -> TaskVector:
        value = self._sum()
        if self._tokens:
            raise self._error(f"{self._tokens[0][1]!r} is not expected there")
        if not isinstance(value, TaskVector):
            raise self._error("it is a number, not a task vector")
        return value

    def _sum(self) -> TaskVector | float:
        value = self._product()
        while (operator := self._take("+-")) is not None:
            other = self._product()
            if isinstance(value, TaskVector) != isinstance(other, TaskVector):
                raise self._error("a number and a task vector cannot be added")
            value = value + other if operator == "+" else value - other  # type: ignore[operator]
        return value

    def _product(self) -> TaskVector | float:
        value = self._factor()
        while (operator := self._take("*/")) is not None:
            other = self._factor()
            if isinstance(other, TaskVector) and (operator == "/" or isinstance(value, TaskVector)):
                raise self._error("task vectors can be multiplied and divided by numbers only")
            if operator == "/" and other == 0:
                raise self._error("it divides by zero")
            value = value * other if operator == "*" else value / other  # type: ignore[operator]
        return value

    def _factor(self) -> TaskVector | float:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error("it is nested too deeply")
        try:
            return self._atom()
        finally:
            self._depth -= 1

    def _atom(self) -> TaskVector | float:
        if not self._tokens:
            raise self._error("it ends too early")
        kind, token = self._tokens.pop(0)
        if kind == "number":
            return float(token)
        if kind == "name":
            if token not in self._vectors:
                raise RecipeError(
                    f"'vector: {self._text}' names {token!r}, which is no expert; {nearest(token, self._vectors)}"
                )
            return self._vectors[token]
        if token == "-":
            return -self._factor()
        if token == "(":
            value = self._sum()
            if self._take(")") is None:
                raise self._error("a parenthesis is not closed")
            return value
        raise self._error(f"{token!r} is not expected there")

    def _take(self, operators: str) -> str | None:
        if self._tokens and self._tokens[0][0] == "operator" and self._tokens[0][1] in operators:
            return self._tokens.pop(0)[1]
        return None

    def _error(self, what: str) -> RecipeError:
        return RecipeError(f"'vector: {self._text}' cannot be read: {what}; write for example c + (b - a)")


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise RecipeError(
                f"'vector: {text}' cannot be read at {text[position:].strip()[:10]!r}; write for example c + (b - a)"
            )
        number, word, single, double, operator = match.groups()
        name = next((part for part in (word, single, double) if part is not None), None)
        found.append(("number", number) if number else ("name", name) if name is not None else ("operator", operator))
        position = match.end()
    return found
