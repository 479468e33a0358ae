"""MERGED"""

import re
from fractions import Fraction

MAX_LENGTH = 256
MAX_DEPTH = 32
MAX_DIGITS = 9

_SYMBOL = re.compile(r" *([0-9]+|[-+*/()])")


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value and the numbers in the order they are written. Raises `ValueError` outside the grammar;
    the model sees the message as a tool result."""
    parser = _ExpressionParser(_symbols(expression))
    value = parser.sum(depth=0)
    if parser.peek():
        raise ValueError(f"unexpected {parser.peek()!r} after a complete expression")
    return value, parser.numbers


def _symbols(expression: str) -> list[str]:
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_LENGTH}")
    body = expression.removesuffix("\n").rstrip(" ")
    symbols, position = [], 0
    while position < len(body):
        match = _SYMBOL.match(body, position)
        if match is None:
            raise ValueError(f"unexpected character at {position}")
        symbols.append(match[1])
        position = match.end()
    return symbols


class _ExpressionParser:
    """Recursive-descent parser that evaluates while parsing and collects the operands in `numbers`."""

    def __init__(self, symbols: list[str]) -> None:
        self.numbers: list[int] = []
        self._symbols = symbols
        self._position = 0

    def peek(self) -> str:
        """Return the next symbol, or "" at the end."""
        return self._symbols[self._position] if self._position < len(self._symbols) else ""

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.peek() in ("+", "-"):
            if self._take() == "+":
                value += self._product(depth)
            else:
                value -= self._product(depth)
        return value

    def _take(self) -> str:
        symbol = self.peek()
        self._position += 1
        return symbol

    def _product(self, depth: int) -> Fraction:
        value = self._atom(depth)
        while self.peek() in ("*", "/"):
            if self._take() == "*":
                value *= self._atom(depth)
            else:
                value = _divide(value, self._atom(depth))
        return value

    def _atom(self, depth: int) -> Fraction:
        symbol = self._take()
        if symbol.isdigit():
            self.numbers.append(_number(symbol))
            return Fraction(self.numbers[-1])
        if symbol != "(":
            raise ValueError(f"expected a number or '(', found {symbol!r}")
        if depth == MAX_DEPTH:
            raise ValueError(f"parentheses nest deeper than {MAX_DEPTH}")
        value = self.sum(depth + 1)
        if self._take() != ")":
            raise ValueError("a parenthesis is never closed")
        return value


def _number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, more than {MAX_DIGITS}")
    if digits[0] == "0" and len(digits) > 1:
        raise ValueError(f"{digits} has a leading zero")
    return int(digits)


def _divide(dividend: Fraction, divisor: Fraction) -> Fraction:
    if not divisor:
        raise ValueError("division by zero")
    return dividend / divisor
