"""Forms by llguidance: what each lets through, and what can't be compiled."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.structured_outputs import StructuredOutputsParams as Form
from ml4core.serving.grammars import LLGrammars
from ml4core.serving.tokenizer import Tokenizer

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
KINDS = [{"type": "object", "properties": {"k": {"const": c}}, "required": ["k"]} for c in "ab"]

CASES: dict[str, tuple[Form, str, bool]] = {
    "schema": (Form(json=OBJECT), '{"a": 12}', True),
    "indented": (Form(json=OBJECT), '{\n  "a": 12\n}', True),
    "schema as a text": (Form(json=json.dumps(OBJECT)), '{"a":12}', True),
    "another type": (Form(json=OBJECT), '{"a": "', False),
    "another key": (Form(json=OBJECT), '{"b', False),
    "not to its end": (Form(json=OBJECT), '{"a": 12', False),
    "blanks": (Form(json=OBJECT), "{   ", False),
    "one of several": (Form(json={"oneOf": KINDS}), '{"k": "b"}', True),
    "letters": (Form(json={"enum": ["\u00e9\U0001fae0"]}), '"\u00e9\U0001fae0"', True),
    "names of special tokens": (Form(json={"type": "string"}), '"[TOOL_CALLS]</s>"', True),
    "an object": (Form(json_object=True), '{"x": [1, {}]}', True),
    "a list": (Form(json_object=True), "[1]", False),
    "regex": (Form(regex=r"a/\d+"), "a/12", True),
    "beyond a regex": (Form(regex=r"a/\d+"), "a/x", False),
    "an escaped slash": (Form(regex=r"a\/[\/]\\/\d"), "a//\\/1", True),
    "choice": (Form(choice=("yes", 'no\n"\u00e9')), 'no\n"\u00e9', True),
    "grammar": (Form(grammar='start: "a" ("b" | "c")+'), "abcb", True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_form_lets_through(grammars: LLGrammars, tokenizer: Tokenizer, name: str) -> None:
    form, text, good = CASES[name]
    matcher = grammars.matcher(form)
    matcher.accept([*tokenizer.encode(text)[1:], tokenizer.eos_id])
    assert (matcher.error == "") is good


def test_special_tokens_stand_in_grammars_by_their_ids(
    grammars: LLGrammars, tokenizer: Tokenizer
) -> None:
    form = Form(grammar='start: "a" <[9]> "b"')
    a, b = tokenizer.encode("a")[1:], tokenizer.encode("b")[1:]
    matcher = grammars.matcher(form)
    matcher.accept([*a, tokenizer.special_tokens["[TOOL_CALLS]"], *b, tokenizer.eos_id])
    assert matcher.error == ""
    other = grammars.matcher(form)
    other.accept([*a, *tokenizer.encode("[TOOL_CALLS]")[1:]])
    assert other.error


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"oneOf": [schema, {"type": "string"}, {"type": "array", "items": schema}]}
    return schema


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown keyword": ({"json": {"not": {}}}, "json"),
    "choices that overlap": ({"json": nested(3)}, "json"),
    "no schema": ({"json": "{"}, "json"),
    "a list": ({"json": [1]}, "json"),
    "what is no JSON": ({"json": {"a": object()}}, "json"),
    "long": ({"json": json.dumps({"enum": ["x" * 600_000]})}, "json"),
    "long regex": ({"regex": "x" * 600_000}, "regex"),
    "many properties": ({"json": {"properties": {f"{i}": {} for i in range(20_000)}}}, "json"),
    "bad regex": ({"regex": "("}, "regex"),
    "bad grammar": ({"grammar": "start: x"}, "grammar"),
    "no choice": ({"choice": []}, "choice"),
    "a text for choices": ({"choice": "ab"}, "choice"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled(grammars: LLGrammars, name: str) -> None:
    """B102: refused, with the reason, and soon."""
    fields, field = BAD[name]
    began = time.monotonic()
    with pytest.raises(RequestError) as caught:
        grammars.check(Form(**fields))
    assert caught.value.field == f"structured_outputs.{field}"
    assert time.monotonic() - began < 5


def test_what_looks_endless_compiles_at_once(grammars: LLGrammars) -> None:
    """B102: these are no harder than others, since automata are made as they are needed."""
    began = time.monotonic()
    recursive = {"$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n"}}, "type": "object"}}}
    grammars.check(Form(regex="(a{1,5000}){1,5000}"))
    grammars.check(Form(json={"type": "string", "maxLength": 10**9}))
    grammars.check(Form(json=recursive | {"$ref": "#/$defs/n"}))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("fields", "found"), [({}, "nothing"), ({"regex": "a", "json_object": True}, "regex and json")]
)
def test_exactly_one_form(fields: dict[str, Any], found: str) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs: {found}"):
        Form(**fields)


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"allowed_token_ids": (5,)}])
def test_what_a_form_cannot_be_had_with(more: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(more))):
        SamplingParams(structured_outputs=Form(json_object=True), **more)


def test_a_schema_is_taken_as_it_is_when_given() -> None:
    schema = {"enum": ["a"]}
    form = Form(json=schema)
    schema["enum"].append("b")
    assert json.loads(form.text) == {"enum": ["a"]}


def test_compiled_forms_are_kept_but_not_for_ever(tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance")
    own = LLGrammars(tokenizer)
    for i in range(100):
        own.check(Form(choice=(f"c{i}",)))
    assert len(own._compiled) == 64
