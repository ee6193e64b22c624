"""Chats to prompts: what works gives these texts, what doesn't is refused by its place."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ml4core.engine.errors import RequestError
from ml4core.serving.chat import ChatTemplate
from ml4core.serving.chat.tools import MAX_TOOLS
from ml4core.serving.protocol import ChatRequest, read_body
from ml4core.serving.tokenizer import Tokenizer

USER: dict[str, Any] = {"role": "user", "content": "hi"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "S"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "yo"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}

SCHEMALESS = {"name": "f", "parameters": {"required": 3}}


def calling(*ids: str, arguments: str = '{"a": 1}', **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls} | more


def result(of: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": "42"}


def parts(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def text_of(tokenizer: Tokenizer, *messages: Any, **fields: Any) -> str:
    request = read_body(ChatRequest, {"messages": list(messages)} | fields)
    ids = ChatTemplate(tokenizer).encode(request).token_ids
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    return shown.replace('[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS]', "")


GOOD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "one": ([USER], "<s>[INST]hi[/INST]"),
    "system": ([SYSTEM, USER], "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]hi[/INST]"),
    "developer": (
        [{"role": "developer", "content": "S"}, USER],
        "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]hi[/INST]",
    ),
    "two systems": (
        [SYSTEM, SYSTEM, USER],
        "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]hi[/INST]",
    ),
    "empty text": ([{"role": "user", "content": ""}], "<s>[INST][/INST]"),
    "content and calls": (
        [USER, calling("c1", content="x"), result()],
        '<s>[INST]hi[/INST]x[TOOL_CALLS]f[ARGS]{"a": 1}</s>[TOOL_RESULTS]42[/TOOL_RESULTS]',
    ),
    "tool, then user": (
        [USER, calling("c1"), result(), USER],
        '<s>[INST]hi[/INST][TOOL_CALLS]f[ARGS]{"a": 1}</s>[TOOL_RESULTS]42[/TOOL_RESULTS]'
        "[INST]hi[/INST]",
    ),
    "long ids, in another order": (
        [
            USER,
            calling("call_abcdefghijkl", "c2", arguments=""),
            result("c2"),
            result("call_abcdefghijkl"),
        ],
        "<s>[INST]hi[/INST][TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}</s>"
        "[TOOL_RESULTS]42[/TOOL_RESULTS][TOOL_RESULTS]42[/TOOL_RESULTS]",
    ),
    "arguments that are no JSON": (
        [USER, calling("c1", arguments='{"a'), result()],
        '<s>[INST]hi[/INST][TOOL_CALLS]f[ARGS]"{\\"a"</s>[TOOL_RESULTS]42[/TOOL_RESULTS]',
    ),
    "reasoning": (
        [USER, {"role": "assistant", "content": "b", "reasoning": "a"}, USER],
        "<s>[INST]hi[/INST][THINK]a[/THINK]b</s>[INST]hi[/INST]",
    ),
    "what a client sends back": (
        [USER, ANSWER | {"refusal": None, "audio": None, "reasoning": None}, USER],
        "<s>[INST]hi[/INST]yo</s>[INST]hi[/INST]",
    ),
    "assistant first": ([ANSWER, USER], "<s>yo</s>[INST]hi[/INST]"),
}


@pytest.mark.parametrize("name", GOOD)
def test_histories_that_work(tokenizer: Tokenizer, name: str) -> None:
    """B088: as agents send them."""
    messages, text = GOOD[name]
    assert text_of(tokenizer, *messages) == text


BAD: dict[str, tuple[list[Any], str, str]] = {
    "none": ([], "messages", "at least one message"),
    "no object": ([USER, []], "messages[1]", "dictionary"),
    "unknown role": ([{"role": "robot", "content": "x"}], "messages[0].role", "one of system"),
    "role of a list": ([{"role": ["user"], "content": "x"}], "messages[0].role", "one of system"),
    "unknown field": ([USER | {"extra": 1}], "messages[0].extra", "with role user"),
    "null content": ([{"role": "user", "content": None}], "messages[0].content", "a text"),
    "content of a number": ([{"role": "user", "content": 3}], "messages[0].content", "a text"),
    "no parts": ([{"role": "user", "content": []}], "messages[0].content", "at least one part"),
    "bad part": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "video"}]}],
        "messages[0].content[1].type",
        "text",
    ),
    "no text": ([parts("a", "") | {"content": [{"type": "text"}]}], "messages[0].content[0]", "a"),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        "messages[0].content[0].type",
        "takes no images",
    ),
    "an image of the system": (
        [{"role": "system", "content": [{"type": "image_url"}]}, USER],
        "messages[0].content[0].type",
        "text, in a message of system",
    ),
    "not UTF-8": ([{"role": "user", "content": "\ud800"}], "messages[0].content", "UTF-8 text"),
    "tool first": ([result()], "messages[0].role", "first"),
    "system after assistant": ([USER, ANSWER, SYSTEM], "messages[2].role", "after assistant"),
    "assistant last": ([USER, ANSWER], "messages[1].role", "continue_final_message"),
    "nothing said": ([USER, {"role": "assistant"}, USER], "messages[1].content", "tool_calls"),
    "empty answer": (
        [USER, {"role": "assistant", "content": ""}, USER],
        "messages[1].content",
        "tool_calls",
    ),
    "a call without a result": ([USER, calling("c1"), USER], "messages[2].role", "role tool"),
    "a call left open": ([USER, calling("c1", "c2"), result()], "messages[2]", "for c2"),
    "many calls left open": (
        [USER, calling(*(f"c{i}" for i in range(900))), result("c7")],
        "messages[2]",
        "for c0, c1, c2, c3 and 895 more",
    ),
    "a result too many": (
        [USER, calling("c1"), result(), result()],
        "messages[3].tool_call_id",
        "none is open",
    ),
    "a result of another": (
        [USER, calling("c1"), result("zz")],
        "messages[2].tool_call_id",
        "result: c1",
    ),
    "calls of one id": ([USER, calling("c1", "c1")], "messages[1].tool_calls[1].id", "differ"),
    "the id of no call": ([USER, calling("null")], "messages[1].tool_calls[0].id", "another"),
    "calls of no list": ([USER, ANSWER | {"tool_calls": 3}], "messages[1].tool_calls", "a list"),
    "arguments of an object": (
        [USER, {"role": "assistant", "tool_calls": [{"id": "a", "function": {"arguments": {}}}]}],
        "messages[1].tool_calls[0].function.arguments",
        "as a text",
    ),
    "arguments nested too deep": (
        [USER, calling("c1", arguments="[" * 10_000 + "]" * 10_000), result()],
        "messages",
        "fewer levels",
    ),
    "old calls": (
        [USER, ANSWER | {"function_call": {"name": "f"}}],
        "messages[1].function_call",
        "not served",
    ),
    "a prefix in the middle": ([USER, ANSWER | {"prefix": True}, USER], "messages[1].prefix", ""),
}


@pytest.mark.parametrize("name", BAD)
def test_histories_that_do_not(v15: Tokenizer, name: str) -> None:
    """B088: with the message and the role or part."""
    messages, field, remedy = BAD[name]
    with pytest.raises(RequestError) as caught:
        text_of(v15, *messages)
    assert caught.value.field.startswith(field)
    assert remedy in caught.value.remedy


BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"messages": [USER], "temprature": 1}, "temprature"),
    "number in quotes": ({"messages": [USER], "temperature": "1"}, "temperature"),
    "a fraction": ({"messages": [USER], "n": 1.5}, "n"),
    "no messages": ({"model": "m"}, "messages"),
    "bad effort": ({"messages": [USER], "reasoning_effort": "much"}, "reasoning_effort"),
    "effort of others": ({"messages": [USER], "reasoning_effort": "low"}, "reasoning_effort"),
    "tool without a name": (
        {"messages": [USER], "tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
    ),
    "a tool's unknown field": (
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
        "tools[0].function.x",
    ),
    "a name with blanks": (
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f g"}}]},
        "tools[0].function.name",
    ),
    "tools of one name": ({"messages": [USER], "tools": [TOOL, TOOL]}, "tools[1].function.name"),
    "no schema": (
        {"messages": [USER], "tools": [{"type": "function", "function": SCHEMALESS}]},
        "tools[0].function.parameters",
    ),
    "tools beyond count": (
        {
            "messages": [USER],
            "tools": [
                {"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)
            ],
        },
        "tools",
    ),
    "a choice of none": ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    "another choice": ({"messages": [USER], "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    "a tool that isn't": (
        {
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice.function.name",
    ),
    "going on with a user": (
        {"messages": [USER], "continue_final_message": True},
        "continue_final_message",
    ),
    "going on in a form": (
        {
            "messages": [USER, ANSWER],
            "continue_final_message": True,
            "response_format": {"type": "json_object"},
        },
        "continue_final_message",
    ),
    "both ways on": (
        {"messages": [USER], "add_generation_prompt": False},
        "add_generation_prompt",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_do_not(v15: Tokenizer, name: str) -> None:
    body, field = BODIES[name]
    with pytest.raises(RequestError) as caught:
        ChatTemplate(v15).encode(read_body(ChatRequest, body))
    assert caught.value.field == field


FAULTS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [1] * 500},
    "tools": {"messages": [USER], "tools": [1] * 500},
    "stops": {"messages": [USER], "stop": [1] * 500},
    "stop ids": {"messages": [USER], "stop_token_ids": ["a"] * 500},
    "allowed ids": {"messages": [USER], "allowed_token_ids": ["a"] * 500},
    "choices": {"messages": [USER], "structured_outputs": {"choice": [1] * 500}},
    "fields": {"messages": [USER]} | {f"field{i}": 1 for i in range(500)},
    "fields of an option": {
        "messages": [USER],
        "stream_options": {f"field{i}": 1 for i in range(500)},
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_of_a_great_many_faults_few_are_kept(name: str) -> None:
    """An error object takes hundreds of times the bytes that a body needs for a fault."""
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(FAULTS[name])
    assert caught.value.error_count() <= 2
    with pytest.raises(RequestError):
        read_body(ChatRequest, FAULTS[name])


def test_what_clients_add_for_others_is_dropped() -> None:
    body = {"messages": [USER], "user": "u", "metadata": {"a": "b"}, "store": False}
    assert read_body(ChatRequest, body) == ChatRequest(messages=[USER])


def test_an_answer_goes_on(tokenizer: Tokenizer) -> None:
    text = text_of(tokenizer, USER, ANSWER, continue_final_message=True)
    assert text == "<s>[INST]hi[/INST]yo"


def test_tools_stand_in_the_prompt_unless_they_must_not_be_called(tokenizer: Tokenizer) -> None:
    assert "[AVAILABLE_TOOLS]" in text_of(tokenizer, USER, tools=[TOOL])
    assert "[AVAILABLE_TOOLS]" not in text_of(tokenizer, USER, tools=[TOOL], tool_choice="none")


def test_effort_is_told_to_the_model(v15: Tokenizer, v13: Tokenizer) -> None:
    assert '"reasoning_effort": "high"' in text_of(v15, USER, reasoning_effort="high")
    assert text_of(v13, USER, reasoning_effort="none") == "<s>[INST]hi[/INST]"
    with pytest.raises(RequestError, match="reasoning_effort: high"):
        text_of(v13, USER, reasoning_effort="high")


def test_sampling_fields_reach_the_parameters() -> None:
    body = {"messages": [USER], "temperature": 0, "stop": "a", "logit_bias": {"5": 1}, "top_k": 3}
    params = read_body(ChatRequest, body).sampling_params(max_tokens=7)
    assert (params.temperature, params.stop, params.top_k) == (0, ("a",), 3)
    assert params.logit_bias == {5: 1.0}
    assert params.max_tokens == 7


def test_a_bias_of_no_token_is_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias: x"):
        read_body(ChatRequest, {"messages": [USER], "logit_bias": {"x": 1}}).sampling_params()
