"""The interpreter of CEL decides as the specification of the language requires."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cel import CelError, evaluate

POD: dict[str, Any] = {
    "spec": {"containers": [{"name": "a", "env": [{"name": "X"}]}, {"name": "b"}]},
    "tags": {"k": "v"},
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 < 2 && !(2 <= 1)", True),
        ("pod.spec.containers.all(c, c.name in ['a', \"b\"])", True),
        ("pod.spec.containers.exists(c, c.name == 'b')", True),
        ("pod.spec.containers.filter(c, has(c.env)).all(c, c.env[0].name == 'X')", True),
        ("has(pod.spec.volumes) ? pod.spec.volumes : []", []),
        ("has(pod.spec.containers)", True),
        ("pod.tags.all(key, key.startsWith('k') && pod.tags[key] == 'v')", True),
        ("size(pod.spec.containers) == 2 || pod.missing.field", True),
        ("pod.missing || true", True),
        ("false && pod.missing", False),
        ("pod.spec.containers.exists(c, c.env[0].name == 'X')", True),
        ("{}.all(key, false)", True),
        ("'a.b'.matches('^a') && 'x' != null", True),
        ("dyn(pod).tags == pod.tags", True),
    ],
)
def test_expression_has_its_value(expression: str, value: Any) -> None:
    assert evaluate(expression, pod=POD) == value


@pytest.mark.parametrize(
    "expression",
    [
        "pod.missing",
        "pod.missing == null",
        "pod.missing || false",
        "has(pod.a.b)",
        "pod.spec.containers.all(c, c.env[0].name == 'X')",
    ],
)
def test_absent_field_is_an_error_that_no_operator_ignores(expression: str) -> None:
    with pytest.raises(CelError):
        evaluate(expression, pod=POD)


@pytest.mark.parametrize("expression", ["pod.spec.", "a ==", "pod.map(x, x)", "'a' + 'b'", "1 2", "pod @ x", "f(1)"])
def test_unsupported_expression_is_refused(expression: str) -> None:
    with pytest.raises(SyntaxError):
        evaluate(expression, pod=POD, a=1)
