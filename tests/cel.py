"""A small interpreter of CEL, for the expressions of admission policies: what the API server would decide.

It covers the part of the language that the policies use, by its specification: a field that is absent is an error,
``&&`` and ``||`` ignore an error of one side where the other side decides, and macros stop nowhere. Anything else is
refused, so that no expression is evaluated differently from the API server without notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

__all__ = ["AdmissionPolicy", "CelError", "evaluate"]

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<string>"[^"\\]*"|'[^'\\]*')|(?P<number>\d+)|(?P<name>[A-Za-z_]\w*)"""
    r"""|(?P<sign>&&|\|\||==|!=|<=|>=|[!<>?:.,()\[\]{}+-]))"""
)
_CONSTANTS: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}

_FUNCTIONS: Final = frozenset({"dyn", "endsWith", "matches", "size", "split", "startsWith"})

Expression = Callable[[Mapping[str, Any]], Any]
"""A parsed expression: variables → value; raises :class:`CelError`."""


class CelError(Exception):
    """The API server would report an error of the expression, such as a field that does not exist."""


def evaluate(expression: str, **variables: Any) -> Any:
    """Return the value of ``expression``.

    Raises:
        CelError: the expression has no value with these variables.
        SyntaxError: it is not in the supported part of the language.
    """
    return _Parser(expression).parse()(variables)


class AdmissionPolicy:
    """A ValidatingAdmissionPolicy, from its manifest."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self._spec = manifest["spec"]

    def refusals(self, **variables: Any) -> list[str]:
        """Return the messages of the validations that fail; none where the policy does not apply.

        An error of an expression refuses the request, as ``failurePolicy: Fail`` requires.
        """
        assert self._spec["failurePolicy"] == "Fail"
        if not all(evaluate(each["expression"], **variables) for each in self._spec.get("matchConditions", [])):
            return []
        named: dict[str, Any] = {}
        for each in self._spec.get("variables", []):
            try:
                named[each["name"]] = evaluate(each["expression"], variables=named, **variables)
            except CelError:
                continue  # an error where the variable is used
        found = []
        for each in self._spec["validations"]:
            try:
                valid = evaluate(each["expression"], variables=named, **variables)
            except CelError:
                valid = False
            if not valid:
                found.append(each["message"])
        return found


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0

    def parse(self) -> Expression:
        parsed = self._ternary()
        if self._peek() != ("end", ""):
            raise SyntaxError(f"unexpected {self._peek()[1]!r}")
        return parsed

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _take(self, *signs: str) -> str:
        """Return the next token if it is one of ``signs``, else the empty text."""
        kind, text = self._peek()
        if (kind == "sign" and text in signs) or (kind == "name" and text == "in" and "in" in signs):
            self._at += 1
            return text
        return ""

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise SyntaxError(f"{sign!r} expected, not {self._peek()[1]!r}")

    def _name(self) -> str:
        kind, text = self._peek()
        if kind != "name":
            raise SyntaxError(f"a name expected, not {text!r}")
        self._at += 1
        return text

    def _ternary(self) -> Expression:
        condition = self._or()
        if not self._take("?"):
            return condition
        yes = self._or()
        self._expect(":")
        no = self._ternary()
        return lambda known: (yes if _boolean(condition(known)) else no)(known)

    def _or(self) -> Expression:
        left = self._and()
        while self._take("||"):
            left = _decided(left, self._and(), by=True)
        return left

    def _and(self) -> Expression:
        left = self._relation()
        while self._take("&&"):
            left = _decided(left, self._relation(), by=False)
        return left

    def _relation(self) -> Expression:
        left = self._unary()
        while sign := self._take("==", "!=", "<", "<=", ">", ">=", "in"):
            left = _compared(sign, left, self._unary())
        return left

    def _unary(self) -> Expression:
        if self._take("!"):
            inner = self._unary()
            return lambda known: not _boolean(inner(known))
        return self._member(self._primary())

    def _primary(self) -> Expression:
        kind, text = self._peek()
        if self._take("("):
            inner = self._ternary()
            self._expect(")")
            return inner
        if self._take("["):
            items = self._arguments("]")
            return lambda known: [each(known) for each in items]
        if self._take("{"):
            self._expect("}")
            return lambda known: {}
        self._at += 1
        if kind == "string":
            return lambda known: text[1:-1]
        if kind == "number":
            return lambda known: int(text)
        if kind != "name":
            raise SyntaxError(f"unexpected {text!r}")
        if text in _CONSTANTS:
            return lambda known: _CONSTANTS[text]
        if not self._take("("):
            return lambda known: _selected(known, text)
        if text == "has":
            start = self._at
            self._arguments(")")
            return _has(self._tokens[start : self._at - 1])
        arguments = self._arguments_of(text)
        return lambda known: _called(text, [each(known) for each in arguments])

    def _member(self, target: Expression) -> Expression:
        while True:
            if self._take("."):
                target = self._field(target, self._name())
            elif self._take("["):
                key = self._ternary()
                self._expect("]")
                target = _indexed(target, key)
            else:
                return target

    def _field(self, target: Expression, name: str) -> Expression:
        if not self._take("("):
            return lambda known: _selected(target(known), name)
        if name in ("all", "exists", "filter"):
            variable = self._name()
            self._expect(",")
            body = self._ternary()
            self._expect(")")
            return _macro(name, target, variable, body)
        arguments = self._arguments_of(name)
        return lambda known: _called(name, [target(known), *(each(known) for each in arguments)])

    def _arguments_of(self, function: str) -> list[Expression]:
        if function not in _FUNCTIONS:
            raise SyntaxError(f"not supported: {function}()")
        return self._arguments(")")

    def _arguments(self, end: str) -> list[Expression]:
        found: list[Expression] = []
        while not self._take(end):
            if found:
                self._expect(",")
            found.append(self._ternary())
        return found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None:
            raise SyntaxError(f"not supported: {text[at:]!r}")
        assert found.lastgroup is not None
        yield found.lastgroup, found[found.lastgroup]
        at = found.end()


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise CelError(f"no such overload: {value!r} is not a bool")
    return value


def _decided(left: Expression, right: Expression, *, by: bool) -> Expression:
    """Return the operator that one side alone decides with ``by``, whatever the other side is, even an error."""

    def value(known: Mapping[str, Any]) -> bool:
        error = None
        for side in (left, right):
            try:
                if _boolean(side(known)) is by:
                    return by
            except CelError as found:
                error = found
        if error is not None:
            raise error
        return not by

    return value


def _compared(sign: str, left: Expression, right: Expression) -> Expression:
    def value(known: Mapping[str, Any]) -> bool:
        one, other = left(known), right(known)
        if sign == "in":
            return bool(one in other)
        if sign in ("==", "!="):
            return bool(one == other) is (sign == "==")
        return bool({"<": one < other, "<=": one <= other, ">": one > other, ">=": one >= other}[sign])

    return value


def _selected(target: Any, name: str) -> Any:
    if not isinstance(target, Mapping) or name not in target:
        raise CelError(f"no such key: {name}")
    return target[name]


def _indexed(target: Expression, key: Expression) -> Expression:
    def value(known: Mapping[str, Any]) -> Any:
        of, at = target(known), key(known)
        try:
            return of[at]
        except (LookupError, TypeError) as error:
            raise CelError(f"no such key: {at}") from error

    return value


def _has(tokens: list[tuple[str, str]]) -> Expression:
    """Return whether the last field of a path exists; the fields before it must."""
    *path, (_, dot), (_, last) = tokens
    assert dot == "."
    inner = _Parser("")
    inner._tokens = path
    target = inner.parse()
    return lambda known: last in target(known)


def _macro(name: str, target: Expression, variable: str, body: Expression) -> Expression:
    def value(known: Mapping[str, Any]) -> Any:
        holds: list[bool] = []
        kept: list[Any] = []
        error = None
        for each in target(known):
            try:
                holds.append(_boolean(body({**known, variable: each})))
                if holds[-1]:
                    kept.append(each)
            except CelError as found:
                error = found
        if name == "filter" and error is None:
            return kept
        decided = name == "exists"
        if name != "filter" and decided in holds:
            return decided
        if error is not None:
            raise error
        return not decided

    return value


def _called(name: str, values: list[Any]) -> Any:
    match name, values:
        case "size", [value]:
            return len(value)
        case "dyn", [value]:
            return value
        case "startsWith", [str(text), str(prefix)]:
            return text.startswith(prefix)
        case "endsWith", [str(text), str(suffix)]:
            return text.endswith(suffix)
        case "matches", [str(text), str(pattern)]:
            return re.search(pattern, text) is not None
        case "split", [str(text), str(separator)]:
            return text.split(separator)
    raise SyntaxError(f"not supported: {name}() of {values!r}")
