"""The list of checks, the language of -k, and versions."""

from __future__ import annotations

from typing import Any

import pytest

from ml4core_conformance import catalog
from ml4core_conformance.check import PROFILES, Check
from ml4core_conformance.expression import ExpressionError, parse


def made(name: str, **more: Any) -> Check:
    return Check(name, more.pop("profile", "ops"), lambda subject: None, "doc", **more)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", "abc"),
        ("TOPK", "a"),
        ("ops", "ab"),
        ("ops and not topk", "b"),
        ("topk or model", "ac"),
        ("not (topk or model)", "b"),
        ("not ops and not model", ""),
        ("ops.*[topk/*]", "a"),
        ("ops.?", ""),
        ("[topk/scores]", "a"),
    ],
)
def test_expression(text: str, meant: str) -> None:
    ids = {"a": "ops.exact[topk/scores]", "b": "ops.elements[rope/bf16]", "c": "model.logits"}
    matches = parse(text)
    assert "".join(key for key, id in ids.items() if matches(id)) == meant


@pytest.mark.parametrize("text", ["and", "a or", "not", "(a", "a)", "a b", "(", "a and or b"])
def test_malformed_expression(text: str) -> None:
    with pytest.raises(ExpressionError, match="works: words of check ids"):
        parse(text)


def test_the_suite_is_whole() -> None:
    checks = catalog.all_checks()
    assert checks
    broken = [check.id for check in checks if check.family == catalog.BROKEN]
    assert not broken
    order = [PROFILES.index(check.profile) for check in checks]
    assert order == sorted(order)
    assert all(check.doc.strip() for check in checks)


def test_a_module_that_gives_no_checks_is_an_error_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_module(name: str) -> None:
        raise ImportError(f"{name} is broken")

    monkeypatch.setattr(catalog, "import_module", no_module)
    checks = catalog.all_checks()
    assert checks
    assert {check.family for check in checks} == {catalog.BROKEN}
    with pytest.raises(RuntimeError, match=r"gives no checks: ImportError: .* is broken"):
        checks[0].run(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("checks", "told"),
    [
        ([made("a"), made("a")], "a: two checks have this id"),
        ([made("a", profile="fast")], "no profile 'fast'"),
        ([made("a", since=99)], "since 99"),
        ([made("a", requires=frozenset({"kv:bf61"}))], "unknown capability words"),
    ],
)
def test_impossible_checks(checks: list[Check], told: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        catalog.validate(checks)
    assert told in str(refused.value)


def test_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "API_VERSION", 2)
    monkeypatch.setattr(catalog, "SUPPORTED_API_VERSIONS", frozenset({1, 2}))
    checks = [made("a"), made("b", since=2), made("c", profile="plugin")]

    def ids(**how: Any) -> list[str]:
        return [check.id for check in catalog.choose(checks, **how)]

    assert ids(api=2) == ["a", "b", "c"]
    assert ids(api=1) == ["a", "c"]  # a check made for newer backends does not judge an older one
    assert ids(api=2, profiles=["plugin"]) == ["c"]
    assert ids(api=2, expression="a or b", profiles=["ops"]) == ["a", "b"]
    for api in (0, 3):
        with pytest.raises(ValueError, match="judges backends of API version 1, 2"):
            ids(api=api)
    with pytest.raises(ValueError, match="no profile fast; works: plugin"):
        ids(api=2, profiles=["fast"])
