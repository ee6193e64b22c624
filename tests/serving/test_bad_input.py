"""What a client may get wrong: each a 4xx that names the field, its value and what works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
LONGEST = 4096

Case = tuple[str, str, Any, int, str | None, tuple[str, ...]]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 2} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Hello", "max_tokens": 2} | fields


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return chat(messages=[{"role": role, "content": content}])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# name: path, body (bytes go as they are), status, param, words of the message
CASES: dict[str, tuple[str, Any, int, str | None, tuple[str, ...]]] = {
    # the body
    "empty body": (CHAT, b"", 400, "body", ("empty",)),
    "no JSON": (CHAT, b'{"messages": [', 400, "body", ("not JSON", "character")),
    "a list": (CHAT, b"[1]", 400, "body", ("[1]", "a JSON object")),
    "a number": (TEXT, b"7", 400, "body", ("7",)),
    "not UTF-8": (TEXT, b'{"prompt": "\xff"}', 400, "body", ("not UTF-8", "0xff")),
    "half a pair": (TEXT, b'{"prompt": "\\ud800"}', 400, "body", ("surrogate",)),
    "a key twice": (TEXT, b'{"prompt": "a", "n": 1, "n": 2}', 400, "body", ("'n'", "twice")),
    "deep nesting": (CHAT, b"[" * 100_000, 400, "body", ("nested too deep",)),
    "a long number": (TEXT, b'{"n": ' + b"9" * 5000 + b"}", 400, "body", ("digits",)),
    "too large": (TEXT, text(prompt="a" * 7_000_000), 413, "body", ("6,291,456",)),
    # fields
    "unknown field": (TEXT, text(max_tokns=1), 400, "max_tokns", ("unknown", "max_tokens")),
    "unknown in chat": (CHAT, chat(functions=[]), 400, "functions", ("unknown", "tools")),
    "no prompt": (TEXT, {"max_tokens": 1}, 400, "prompt", ("missing",)),
    "no messages": (CHAT, {"max_tokens": 1}, 400, "messages", ("missing",)),
    "wrong type": (TEXT, text(max_tokens="7"), 400, "max_tokens", ("'7'", "integer")),
    "a bool as number": (TEXT, text(n=True), 400, "n", ("True",)),
    "a fraction": (TEXT, text(max_tokens=1.5), 400, "max_tokens", ("1.5",)),
    "stream of a text": (TEXT, text(stream="yes"), 400, "stream", ("'yes'",)),
    "unknown model": (CHAT, chat(model="gpt-5"), 404, "model", ("gpt-5", "ml4-tiny")),
    "NaN": (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "temperature", ("nan", "0 to")),
    "infinity": (TEXT, b'{"prompt": "a", "top_p": Infinity}', 400, "top_p", ("inf",)),
    "below zero": (TEXT, text(temperature=-0.1), 400, "temperature", ("-0.1", "0 to")),
    "top_p zero": (TEXT, text(top_p=0), 400, "top_p", ("above 0",)),
    "top_k": (TEXT, text(top_k=-2), 400, "top_k", ("-2",)),
    "min_p": (TEXT, text(min_p=1.1), 400, "min_p", ("1.1",)),
    "penalty": (TEXT, text(presence_penalty=3), 400, "presence_penalty", ("-2 to 2",)),
    "a seed of 65 bits": (TEXT, text(seed=2**64), 400, "seed", ("64-bit",)),
    "bias of a word": (TEXT, text(logit_bias={"a": 1}), 400, "logit_bias", ("a", "ids")),
    "bias out of range": (TEXT, text(logit_bias={"99999": 1}), 400, "logit_bias", ("99999",)),
    "stop id": (TEXT, text(stop_token_ids=[-1]), 400, "stop_token_ids", ("-1",)),
    "stop ids": (TEXT, text(stop_token_ids=[5] * 9000), 400, "stop_token_ids", ("9,000", "8,192")),
    "no allowed id": (TEXT, text(allowed_token_ids=[]), 400, "allowed_token_ids", ("empty",)),
    "usage without stream": (
        *(TEXT, text(stream_options={"include_usage": True}), 400),
        *("stream_options", ("stream true",)),
    ),
    "unknown stream option": (
        *(CHAT, chat(stream=True, stream_options={"usage": True}), 400),
        *("stream_options.usage", ("unknown", "include_usage")),
    ),
    "salt": (TEXT, text(cache_salt=""), 400, "cache_salt", ("empty",)),
    "long salt": (TEXT, text(cache_salt="a" * 1025), 400, "cache_salt", ("1,025", "1,024")),
    "priority": (TEXT, text(priority=1), 400, "priority", ("scheduling_policy",)),
    "request id": (TEXT, text(request_id="a b"), 400, "request_id", ("ASCII",)),
    "a form": (
        *(TEXT, text(structured_outputs={"regex": "("}), 400),
        *("structured_outputs.regex", ("can be compiled",)),
    ),
    "suffix": (TEXT, text(suffix="end"), 400, "suffix", ("'end'",)),
    "best_of": (TEXT, text(best_of=3), 400, "best_of", ("3",)),
    # B104: how many
    "n of none": (TEXT, text(n=0), 400, "n", ("0",)),
    "n beyond the batch": (TEXT, text(n=9), 400, "n", ("9", "8", "--max-num-seqs")),
    "n beyond all": (TEXT, text(n=10**9), 400, "n", ("1000000000",)),
    "alike answers": (TEXT, text(n=2, temperature=0), 400, "n", ("temperature",)),
    # B106: how long
    "max_tokens 0": (TEXT, text(max_tokens=0), 400, "max_tokens", ("0", "echo")),
    "max_tokens 0 in chat": (CHAT, chat(max_tokens=0), 400, "max_tokens", ("1 or above",)),
    "max_tokens -1": (TEXT, text(max_tokens=-1), 400, "max_tokens", ("-1",)),
    "max_tokens of all": (TEXT, text(max_tokens=LONGEST), 400, "max_tokens", ("4,096", "4,094")),
    "two limits": (
        *(CHAT, chat(max_tokens=1, max_completion_tokens=2), 400),
        *("max_tokens", ("max_completion_tokens", "2")),
    ),
    "min above max": (TEXT, text(min_tokens=3), 400, "min_tokens", ("max_tokens",)),
    "prompt of the context": (
        *(TEXT, text(prompt=[5] * LONGEST), 400, "prompt", ("4096 tokens", "4095")),
    ),
    "one more": (TEXT, text(prompt=[5] * (LONGEST + 1)), 400, "prompt", ("4097 tokens",)),
    "5 MB": (TEXT, text(prompt="abcd " * 1_000_000), 400, "prompt", ("5,000,000 bytes", "4,095")),
    "5 MB in chat": (
        *(CHAT, said("abcd " * 1_000_000), 400),
        *("messages[0].content", ("5,000,000 bytes", "4,095")),
    ),
    "5 MB in a part": (
        *(CHAT, said([{"type": "text", "text": "abcd " * 1_000_000}]), 400),
        *("messages[0].content", ("5,000,000 bytes", "4,095")),
    ),
    "empty prompt": (TEXT, text(prompt=""), 400, "prompt", ("empty",)),
    "no prompts": (TEXT, text(prompt=[]), 400, "prompt", ("empty",)),
    "an empty one of two": (TEXT, text(prompt=["a", ""]), 400, "prompt[1]", ("empty",)),
    "a mixed prompt": (TEXT, text(prompt=[1, "a"]), 400, "prompt", ("'a'", "integers")),
    "an object as prompt": (TEXT, text(prompt={"a": 1}), 400, "prompt", ("a list",)),
    "id out of range": (TEXT, text(prompt=[5, 99999]), 400, "prompt, token 1", ("99999", "8191")),
    "id below zero": (TEXT, text(prompt=[[-1]]), 400, "prompt, token 0", ("-1",)),
    "empty stop": (TEXT, text(stop=[""]), 400, "stop", ("at least one",)),
    "many stops": (TEXT, text(stop=[str(i) for i in range(65)]), 400, "stop", ("65", "64")),
    "long stops": (TEXT, text(stop=["a" * 2000] * 3), 400, "stop", ("6,000", "4,096")),
    "more prompts than places": (TEXT, text(prompt=["a"] * 73), 400, "prompt", ("73", "72")),
    "stop of numbers": (TEXT, text(stop=[1]), 400, "stop[0]", ("1", "string")),
    # log-probabilities
    "top without": (CHAT, chat(top_logprobs=2), 400, "top_logprobs", ("logprobs true",)),
    "too many": (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", ("20",)),
    "too many of a text": (TEXT, text(logprobs=21), 400, "logprobs", ("21", "--max-logprobs")),
    "streamed prompt's": (
        *(TEXT, text(stream=True, prompt_logprobs=1), 400, "prompt_logprobs", ("without stream",)),
    ),
    # messages
    "empty messages": (CHAT, chat(messages=[]), 400, "messages", ("empty",)),
    "no objects": (CHAT, chat(messages=["hi"]), 400, "messages[0]", ("'hi'",)),
    "unknown role": (CHAT, said("a", "robot"), 400, "messages[0].role", ("robot", "user")),
    "no role": (CHAT, chat(messages=[{"content": "a"}]), 400, "messages[0].role", ("None",)),
    "no content": (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", ("text",)),
    "content of a number": (CHAT, said(7), 400, "messages[0].content", ("7",)),
    "assistant first": (CHAT, said("a", "assistant"), 400, "messages[0].role", ("assistant",)),
    "tool first": (
        *(CHAT, chat(messages=[{"role": "tool", "content": "a", "tool_call_id": "x"}]), 400),
        *("messages[0].role", ("tool",)),
    ),
    "assistant last": (
        *(CHAT, chat(messages=[*HELLO, {"role": "assistant", "content": "a"}]), 400),
        *("messages[1].role", ("assistant", "continue_final_message")),
    ),
    "unknown part": (
        *(CHAT, said([{"type": "video", "text": "a"}]), 400),
        *("messages[0].content[0].type", ("video", "text")),
    ),
    "unknown key of a message": (
        *(CHAT, chat(messages=[{"role": "user", "content": "a", "mood": "x"}]), 400),
        *("messages[0].mood", ("x", "role")),
    ),
    # tools
    "tool without a name": (
        *(CHAT, chat(tools=[{"type": "function", "function": {}}]), 400),
        *("tools[0].function.name", ("missing",)),
    ),
    "a name that can't be": (
        *(CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]), 400),
        *("tools[0].function.name", ("a b",)),
    ),
    "a tool that is not offered": (
        *(CHAT, chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}})),
        *(400, "tool_choice.function.name", ("g", "f")),
    ),
    "choice of nothing": (CHAT, chat(tool_choice="required"), 400, "tool_choice", ("tools",)),
    "effort": (CHAT, chat(reasoning_effort="huge"), 400, "reasoning_effort", ("huge",)),
    # other endpoints
    "tokenize nothing": ("/tokenize", {}, 400, "prompt", ("missing",)),
    "tokenize a number": ("/tokenize", {"prompt": 7}, 400, "prompt", ("7",)),
    "detokenize a word": ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", ("'a'",)),
    "detokenize beyond": ("/detokenize", {"tokens": [1, 8192]}, 400, "tokens[1]", ("8191",)),
    "no such path": ("/v1/nothing", {}, 404, None, ("Not Found",)),
    "method": ("/v1/models", {}, 405, None, ("Method Not Allowed",)),
}


@pytest.fixture(scope="module")
def client(null: Any) -> Iterator[httpx.Client]:
    with null.http() as made:
        yield made


@pytest.mark.parametrize("name", CASES)
def test_is_refused_with_field_value_and_remedy(client: httpx.Client, name: str) -> None:
    path, body, status, param, words = CASES[name]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=raw, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    for word in words:
        assert word in error["message"], error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert len(error["message"]) < 2000, "a long value is cut"


def test_refusals_are_no_matter_of_the_engine(null: Any, client: httpx.Client) -> None:
    """After all of them the server answers, and holds nothing."""
    assert client.post(TEXT, json=text()).status_code == 200
    assert null.metric("ml4_kv_cache_usage_perc") == 0
    assert not [line for line in null.lines if "exception" in line]
    assert not null.noise


HISTORY = {"role": "assistant", "content": "Sure", "tool_calls": None}
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "123456789"}
USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be kind"}


@pytest.mark.parametrize(
    ("messages", "status", "param"),
    [
        ([USER, CALLS, RESULT], 200, None),
        ([USER, CALLS | {"content": "Let me see"}, RESULT], 200, None),
        ([USER, CALLS, RESULT, USER], 200, None),
        ([USER, CALLS, RESULT, {"role": "assistant", "content": "7"}, USER], 200, None),
        ([SYSTEM, SYSTEM, USER], 200, None),
        ([SYSTEM, USER, USER], 200, None),
        ([USER, HISTORY, USER], 200, None),
        ([{"role": "developer", "content": "Be kind"}, USER], 200, None),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], 200, None),
        ([USER, CALLS | {"tool_calls": []}, USER], 400, "messages[1].content"),
        ([USER, CALLS, RESULT | {"tool_call_id": None}], 400, "messages[2].tool_call_id"),
        ([USER, RESULT], 400, "messages[1].role"),
    ],
)
def test_histories(
    client: httpx.Client, messages: list[Any], status: int, param: str | None
) -> None:
    """B088."""
    answer = client.post(CHAT, json=chat(messages=messages, tools=[TOOL]))
    assert answer.status_code == status, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (text(prompt=[5] * (LONGEST - 1), max_tokens=1), 1),
        (text(prompt=[5] * (LONGEST - 1), max_tokens=None), 1),
        (text(prompt=[5] * (LONGEST - 3)), 2),
        (text(max_tokens=LONGEST - 2, ignore_eos=True), LONGEST - 2),
        (text(max_tokens=None), 16),
    ],
)
def test_limits_at_their_edges(client: httpx.Client, body: Any, limit: int) -> None:
    """B106: what just fits is served, to its end."""
    answer = client.post(TEXT, json=body).json()
    assert answer["usage"]["completion_tokens"] == limit
    assert answer["choices"][0]["finish_reason"] == "length"
