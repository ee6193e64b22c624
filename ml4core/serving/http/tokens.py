"""``/tokenize`` and ``/detokenize``: for a long text all of it takes long, its JSON too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ml4core.engine.errors import RequestError
from ml4core.serving.http.answers import JsonAnswer
from ml4core.serving.http.service import Service
from ml4core.serving.protocol import Body, ChatRequest, Tool, read_body


class TokenizeText(Body):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(Body):
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    model: str | None = None
    tools: Annotated[list[Tool] | None, Field(fail_fast=True)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class Detokenize(Body):
    tokens: Annotated[list[int], Field(fail_fast=True)]
    model: str | None = None


def tokenize(service: Service, given: object) -> JsonAnswer:
    """Raises ``RequestError``."""
    chat = isinstance(given, dict) and "messages" in given
    kind: Any = TokenizeChat if chat else TokenizeText
    body = read_body(kind, given)
    service.check_model(body.model)
    ids = _ids(service, body)
    told: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.facts.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        told["token_strs"] = [service.tokenizer.decode([i], False) for i in ids]
    return JsonAnswer(told)


def detokenize(service: Service, given: object) -> JsonAnswer:
    """Raises ``RequestError``."""
    body = read_body(Detokenize, given)
    service.check_model(body.model)
    last = service.facts.vocab_size - 1
    for place, token in enumerate(body.tokens):
        if not 0 <= token <= last:
            raise RequestError(f"tokens[{place}]", token, f"ids from 0 to {last}")
    return JsonAnswer({"prompt": service.tokenizer.decode(body.tokens, False)})


def _ids(service: Service, body: TokenizeText | TokenizeChat) -> list[int]:
    if isinstance(body, TokenizeText):
        ids = service.tokenizer.encode(body.prompt, "prompt")
        return ids[1:] if body.add_special_tokens is False else ids
    chat = ChatRequest(
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    return service.template.encode(chat).token_ids
