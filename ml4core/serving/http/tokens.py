"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

from ml4core.engine.errors import RequestError
from ml4core.serving.http.service import Service
from ml4core.serving.protocol import Body, ChatRequest, Tool, read_body


class TokenizeText(Body):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(Body):
    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class Detokenize(Body):
    tokens: list[int]
    model: str | None = None


async def tokenize(service: Service, given: object, size: int) -> dict[str, Any]:
    """Raises ``RequestError``."""
    chat = isinstance(given, dict) and "messages" in given
    kind: Any = TokenizeChat if chat else TokenizeText
    body = read_body(kind, given)
    service.check_model(body.model)
    ids = await service.read(size, lambda: _ids(service, body))
    told: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.facts.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        told["token_strs"] = [service.tokenizer.decode([i], False) for i in ids]
    return told


async def detokenize(service: Service, given: object, size: int) -> dict[str, Any]:
    """Raises ``RequestError``."""
    body = read_body(Detokenize, given)
    service.check_model(body.model)
    last = service.facts.vocab_size - 1
    for place, token in enumerate(body.tokens):
        if not 0 <= token <= last:
            raise RequestError(f"tokens[{place}]", token, f"ids from 0 to {last}")
    text = await service.read(size, lambda: service.tokenizer.decode(body.tokens, False))
    return {"prompt": text}


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
