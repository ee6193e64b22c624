"""Whether calls of tools and JSON come out well formed, and right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ml4core.engine.args import EngineArgs
from ml4core.evaluation import schema
from ml4core.evaluation.opened import Tell, answers, opened
from ml4core.evaluation.texts import asset
from ml4core.models.strict_json import decode
from ml4core.serving.tokenizer import Tokenizer

FILE = "tools.json"
LENGTH = 1024
ANSWER = 128
"""Tokens of an answer at most."""


@dataclass(frozen=True)
class Call:
    """A call of a tool. ``arguments``: None if they are no JSON object."""

    name: str
    arguments: dict[str, Any] | None


@dataclass(frozen=True)
class Rate:
    """Of one kind, ``tool calls`` or ``JSON``.

    Attributes:
        valid: a call of an offered tool whose arguments its schema allows; a JSON text.
        right: and the name and the values are those that the prompt asks for.
    """

    kind: str
    valid: tuple[bool, ...]
    right: tuple[bool, ...]


def measure(args: EngineArgs, tokenizer: Tokenizer, limit: int | None, tell: Tell) -> list[Rate]:
    """At most ``limit`` prompts of each kind."""
    cases = load_cases()
    chosen = {kind: some[:limit] for kind, some in cases.items()}
    everything = [case for some in chosen.values() for case in some]
    prompts = [encode(tokenizer, case["messages"], case.get("tools", ())) for case in everything]
    with opened(args, LENGTH) as llm:
        outputs = answers(llm, prompts, ANSWER, lambda done: tell("tools", done, len(everything)))
    replies = iter(output.outputs[0].token_ids for output in outputs)
    calls = [judge_call(tokenizer, case, next(replies)) for case in chosen["tools"]]
    texts = [judge_json(tokenizer, case, next(replies)) for case in chosen["json"]]
    return [_rate("tool calls", calls), _rate("JSON", texts)]


def load_cases() -> dict[str, list[dict[str, Any]]]:
    """``tools``: messages, tools, and the call's name and arguments; ``json``: messages and the
    value.
    """
    cases: dict[str, list[dict[str, Any]]] = json.loads(asset(FILE).read_text("utf-8"))
    return cases


def encode(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Ids of a chat that offers tools, up to where the answer begins."""
    if not tools:
        return tokenizer.encode_chat(messages)
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    request: Any = ChatCompletionRequest.from_openai(
        [dict(message) for message in messages], [dict(tool) for tool in tools]
    )
    template: Any = MistralTokenizer.from_file(str(tokenizer.path))
    ids: list[int] = template.encode_chat_completion(request).tokens
    return ids


def parse_calls(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Call]:
    """The calls in an answer: the name behind each [TOOL_CALLS], the arguments behind [ARGS]."""
    names = {tokenizer.piece(i, False): i for i in range(64)}
    begin, separator = names.get(b"[TOOL_CALLS]"), names.get(b"[ARGS]")
    calls = []
    for part in _split(ids, begin)[1:]:
        name, *rest = _split(part, separator)
        arguments: Any = None
        if len(rest) == 1:
            arguments = _json(tokenizer.decode(rest[0]))
        calls.append(
            Call(tokenizer.decode(name), arguments if isinstance(arguments, dict) else None)
        )
    return calls


def judge_call(
    tokenizer: Tokenizer, case: Mapping[str, Any], ids: Sequence[int]
) -> tuple[bool, bool]:
    """(valid, right) of an answer to a prompt that asks for one call."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case["tools"]}
    calls = parse_calls(tokenizer, ids)
    valid = bool(calls) and all(
        call.name in schemas
        and call.arguments is not None
        and schema.problem(call.arguments, schemas[call.name]) is None
        for call in calls
    )
    wanted = [Call(case["name"], case["arguments"])]
    return valid, valid and calls == wanted


def judge_json(
    tokenizer: Tokenizer, case: Mapping[str, Any], ids: Sequence[int]
) -> tuple[bool, bool]:
    """(valid, right) of an answer to a prompt that asks for JSON alone."""
    value = _json(tokenizer.decode(ids))
    return value is not _NONE, value == case["value"]


def _rate(kind: str, judged: Sequence[tuple[bool, bool]]) -> Rate:
    return Rate(kind, tuple(v for v, _ in judged), tuple(r for _, r in judged))


def _split(ids: Sequence[int], separator: int | None) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


_NONE = object()
"""In place of a value, where there is no JSON."""


def _json(text: str) -> Any:
    try:
        return decode(text)
    except ValueError:
        return _NONE
