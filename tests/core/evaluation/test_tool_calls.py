"""Answers of a form: what counts as valid, what as right."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4core.evaluation import schema
from ml4core.evaluation.tool_calls import (
    Call,
    encode,
    judge_call,
    judge_json,
    load_cases,
    parse_calls,
)
from ml4core.serving.tokenizer import Tokenizer

TOOL_CALLS, ARGS, END = 9, 32, 2


def words(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)[1:]


def call(tokenizer: Tokenizer, name: str, arguments: str) -> list[int]:
    return [TOOL_CALLS, *words(tokenizer, name), ARGS, *words(tokenizer, arguments)]


def test_cases_ask_for_calls_that_their_schemas_allow() -> None:
    cases = load_cases()
    assert min(len(some) for some in cases.values()) >= 20
    for case in cases["tools"]:
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in case["tools"]}
        jsonschema.validate(case["arguments"], schemas[case["name"]])
        assert schema.problem(case["arguments"], schemas[case["name"]]) is None


def test_the_right_answers_are_judged_so(tokenizer: Tokenizer) -> None:
    cases = load_cases()
    for case in cases["tools"]:
        ids = call(tokenizer, case["name"], json.dumps(case["arguments"]))
        assert judge_call(tokenizer, case, [*ids, END]) == (True, True)
    for case in cases["json"]:
        assert judge_json(tokenizer, case, words(tokenizer, json.dumps(case["value"]))) == (
            True,
            True,
        )


@pytest.mark.parametrize(
    ("name", "arguments", "valid"),
    [
        ("get", '{"city": "Oslo"}', True),  # not what was asked for
        ("get", '{"city": 5}', False),
        ("get", '{"town": "Rome"}', False),
        ("get", '{"city": "Rome", "unit": "K"}', False),
        ("get", '{"city": "Rome"', False),
        ("get", '["Rome"]', False),
        ("got", '{"city": "Rome"}', False),
    ],
)
def test_a_wrong_call(tokenizer: Tokenizer, name: str, arguments: str, valid: bool) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    case: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "get", "parameters": parameters}}],
        "name": "get",
        "arguments": {"city": "Rome"},
    }
    ids = call(tokenizer, name, arguments)
    assert judge_call(tokenizer, case, ids) == (valid, False)
    right = call(tokenizer, "get", '{"city": "Rome"}')
    assert judge_call(tokenizer, case, right + ids) == (valid, False)  # one call too many
    assert judge_call(tokenizer, case, words(tokenizer, "It rains.")) == (False, False)


def test_calls_are_read_from_ids(tokenizer: Tokenizer) -> None:
    ids = call(tokenizer, "a", '{"x": 1}') + call(tokenizer, "b", "no") + [END]
    assert parse_calls(tokenizer, ids) == [Call("a", {"x": 1}), Call("b", None)]
    assert parse_calls(tokenizer, words(tokenizer, '[TOOL_CALLS]a[ARGS]{"x": 1}')) == []


@pytest.mark.parametrize(("text", "valid"), [('{"a": 2}', True), ("Sure: {}", False), ("", False)])
def test_json_that_is_wrong(tokenizer: Tokenizer, text: str, valid: bool) -> None:
    ids = words(tokenizer, text) if text else []
    assert judge_json(tokenizer, {"value": {"a": 1}}, ids) == (valid, False)


def test_a_prompt_offers_its_tools(tokenizer: Tokenizer) -> None:
    case = load_cases()["tools"][0]
    text = tokenizer.decode(encode(tokenizer, case["messages"], case["tools"]), False)
    assert "[AVAILABLE_TOOLS]" in text
    assert case["tools"][0]["function"]["name"] in text
    assert text.endswith("[/INST]")
    assert encode(tokenizer, case["messages"], ()) == tokenizer.encode_chat(case["messages"])


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "s": {"type": "string", "enum": ["a", "b"]},
        "l": {"type": "array", "items": {"type": "string"}},
        "o": {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
    },
    "required": ["n"],
}
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from("abc")
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("nxslob"), inner),
    max_leaves=8,
)


def strict(part: Any) -> Any:
    """The schema as `problem` reads it: no key but those that are named."""
    if isinstance(part, dict):
        part = {key: strict(value) for key, value in part.items()}
        if isinstance(part.get("properties"), dict):
            part["additionalProperties"] = False
    return part


@given(values)
def test_schemas_are_read_as_jsonschema_reads_them(value: Any) -> None:
    validator = jsonschema.Draft202012Validator(strict(SCHEMA))
    assert (schema.problem(value, SCHEMA) is None) == validator.is_valid(value)
