"""Forms that requests ask for: what each lets through, and whose fault it is if there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ml4core.engine.errors import RequestError
from ml4core.serving.chat import ChatTemplate
from ml4core.serving.grammars import LLGrammars
from ml4core.serving.protocol import ChatRequest, read_body
from ml4core.serving.tokenizer import Tokenizer

Ids = Callable[..., list[int]]

C, A, T, E, END = "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "</s>"
OK, WRONG, OTHER = '{"a": 1}', '{"a": "x"}', '{"b": [1]}'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}
EXACT: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
}


def tool(name: str, strict: bool = False, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name, "strict": strict, "parameters": parameters or SCHEMA}
    return {"type": "function", "function": function}


def named(name: str) -> dict[str, Any]:
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


FREE = {"tools": [tool("f"), tool("g")]}
STRICT = {"tools": [tool("f", True), tool("g")]}
MUST = FREE | {"tool_choice": "required"}
ONE = {"parallel_tool_calls": False}
HIGH = {"reasoning_effort": "high"}

CASES: dict[str, tuple[dict[str, Any], list[str], bool]] = {
    "a call": (MUST, [C, "f", A, OK, END], True),
    "two calls": (MUST, [C, "f", A, OK, C, "g", A, OK, END], True),
    "two where one is allowed": (MUST | ONE, [C, "f", A, OK, C], False),
    "text where a call must be": (MUST, ["Well"], False),
    "nothing where a call must be": (MUST, [END], False),
    "another tool": (MUST, [C, "h"], False),
    "wrong arguments": (MUST, [C, "f", A, WRONG], False),
    "the named tool": (FREE | named("g"), [C, "g", A, OK, END], True),
    "another than the named": (FREE | named("g"), [C, "f"], False),
    "the named tool twice": (FREE | named("g"), [C, "g", A, OK, C], False),
    "strict: text": (STRICT, ["Well.\nFine.", END], True),
    "strict: text and a call": (STRICT, ["Well. ", C, "f", A, OK, END], True),
    "strict: wrong arguments": (STRICT, [C, "f", A, WRONG], False),
    "not strict beside it": (STRICT, [C, "g", A, OTHER, END], True),
    "one call at most": (FREE | ONE, ["x", C, "f", A, OTHER, END], True),
    "one call at most, and a second": (FREE | ONE, [C, "f", A, OTHER, C], False),
    "an object": (JSON, [OTHER, END], True),
    "a list": (JSON, ["[1"], False),
    "a schema": (EXACT, [OK, END], True),
    "against a schema": (EXACT, [OTHER], False),
    "reasoning first": (JSON | HIGH, [T, "so\nit is", E, OK, END], True),
    "reasoning that need not be": (JSON | HIGH, [OK, END], True),
    "reasoning that may not be": (JSON, [T], False),
    "reasoning before a call": (MUST | HIGH, [T, "so", E, C, "f", A, OK, END], True),
    "JSON or calls: JSON": (JSON | FREE, [OTHER, END], True),
    "JSON or calls: a call": (JSON | FREE, [C, "f", A, OTHER, END], True),
    "JSON or calls: text": (JSON | FREE, ["Well"], False),
}


@pytest.fixture(scope="module")
def grammars(v15: Tokenizer) -> LLGrammars:
    pytest.importorskip("llguidance")
    return LLGrammars(v15)


def form_of(tokenizer: Tokenizer, body: dict[str, Any]) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}]} | body
    return ChatTemplate(tokenizer).encode(read_body(ChatRequest, body)).form


@pytest.mark.parametrize("name", CASES)
def test_what_an_answer_may_be(v15: Tokenizer, grammars: LLGrammars, ids: Ids, name: str) -> None:
    body, parts, good = CASES[name]
    matcher = grammars.matcher(form_of(v15, body))
    matcher.accept(ids(*parts))
    assert (matcher.error == "") is good


@pytest.mark.parametrize("body", [{}, FREE, FREE | {"tool_choice": "none"}, HIGH])
def test_free_answers_cost_nothing(v15: Tokenizer, body: dict[str, Any]) -> None:
    assert form_of(v15, body) is None


def test_v13_may_reason_whenever_it_can(v13: Tokenizer, ids: Ids) -> None:
    pytest.importorskip("llguidance")
    matcher = LLGrammars(v13).matcher(form_of(v13, JSON))
    matcher.accept(ids(T, "so", E, OK, END))
    assert matcher.error == ""


BAD_SCHEMA = {"type": "object", "properties": {"a": {"not": {}}}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD_SCHEMA}}},
        "response_format.json_schema.schema",
    ),
    "no schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema.schema",
    ),
    "what is no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
        "response_format.json_schema.schema",
    ),
    "a schema of all": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
        "response_format.json_schema.schema",
    ),
    "a schema of all beside calls": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}} | FREE,
        "response_format.json_schema.schema",
    ),
    "a schema for an object": (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
    ),
    "a tool's": (
        {"tools": [tool("f"), tool("g", True, BAD_SCHEMA)]},
        "tools[1].function.parameters",
    ),
    "the named tool's": (
        {"tools": [tool("f"), tool("g", False, BAD_SCHEMA)]} | named("g"),
        "tools[1].function.parameters",
    ),
    "two forms": ({"structured_outputs": {"regex": "a"}} | JSON, "structured_outputs"),
    "a form and a call": ({"structured_outputs": {"regex": "a"}} | MUST, "structured_outputs"),
    "a form that can't be compiled": (
        {"structured_outputs": {"regex": "("}},
        "structured_outputs.regex",
    ),
    "a schema that is too long": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"enum": ["x" * 600_000]}},
            }
        },
        "response_format.json_schema.schema",
    ),
    "tools that are too long": (
        {"tools": [tool("f", True, {"const": "x" * 600_000})]},
        "tools",
    ),
    "an unknown form": ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
}


@pytest.mark.parametrize("name", BAD)
def test_forms_that_cannot_be(v15: Tokenizer, name: str) -> None:
    pytest.importorskip("llguidance")
    body, field = BAD[name]
    with pytest.raises(RequestError) as caught:
        form_of(v15, body)
    assert caught.value.field == field


def test_a_bad_schema_of_a_tool_that_is_not_held_to_it_is_no_matter(v15: Tokenizer) -> None:
    assert form_of(v15, {"tools": [tool("f", False, BAD_SCHEMA)]}) is None


def test_vllms_field_reaches_the_parameters() -> None:
    body = {"messages": [], "structured_outputs": {"choice": ["a", "b"]}}
    form = read_body(ChatRequest, body).sampling_params().structured_outputs
    assert form is not None
    assert form.choice == ("a", "b")
