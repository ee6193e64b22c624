"""``/v1/chat/completions``: the next message of a chat."""

from __future__ import annotations

from typing import Any

from ml4core.engine.errors import RequestError
from ml4core.serving.chat import AnswerStream, ChatPrompt, ToolCallDelta
from ml4core.serving.http import logprobs
from ml4core.serving.http.choice import Choice, Piece
from ml4core.serving.http.exchange import Exchange
from ml4core.serving.http.requests import (
    Header,
    check_salt,
    check_streaming,
    common_job,
    logprob_limit,
)
from ml4core.serving.http.service import LONG, Service
from ml4core.serving.protocol import ChatRequest


class ChatForm:
    """How chats are written."""

    def __init__(
        self, header: Header, service: Service, request: ChatRequest, prompt: ChatPrompt
    ) -> None:
        self.stream = header.stream
        self.usage = header.usage
        self.usage_always = header.usage_always
        self.choices: list[Choice] = []
        self._header = header
        self._tokenizer = service.tokenizer
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        self._prompt_logprobs = request.prompt_logprobs is not None
        self._ids = bool(request.return_token_ids)
        self.plain = not (self.usage_always or self._ids or self._top is not None)
        self._prompt_ids = prompt.token_ids
        self._begun: set[int] = set()

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        assert isinstance(choice.stream, AnswerStream)
        told = choice.stream.message()
        message: dict[str, Any] = {"role": "assistant", "content": told.content}
        if told.reasoning is not None:
            message["reasoning"] = told.reasoning
        if told.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in told.tool_calls
            ]
        return self._told(choice, piece, "message", message)

    def part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            delta = {"role": "assistant"}
            if not (piece.content or piece.reasoning or piece.tool_calls):
                delta["content"] = ""
        if piece.content:
            delta["content"] = piece.content
        if piece.reasoning:
            delta["reasoning"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = _calls(piece.tool_calls)
        return self._told(choice, piece, "delta", delta)

    def body(self, choices: list[dict[str, Any]], *, event: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if event else "chat.completion"
        body = self._header.body(kind, choices)
        if event:
            return body
        if self._prompt_logprobs:
            entries = self.choices[0].prompt_logprobs or []
            body["prompt_logprobs"] = logprobs.of_prompt(self._tokenizer, entries)
        if self._ids:
            body["prompt_token_ids"] = self._prompt_ids
        return body

    def _told(
        self, choice: Choice, piece: Piece, name: str, value: dict[str, Any]
    ) -> dict[str, Any]:
        told: dict[str, Any] = {"index": choice.index, name: value, "logprobs": None}
        if self._top is not None:
            told["logprobs"] = logprobs.of_chat(self._tokenizer, piece.logprobs, self._top)
        told["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            told["stop_reason"] = piece.stop_reason
        if self._ids:
            told["token_ids"] = piece.token_ids
        return told


def _calls(deltas: list[ToolCallDelta]) -> list[dict[str, Any]]:
    """One for each call."""
    told: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        call = told.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
        if delta.id is not None:
            call |= {"id": delta.id, "type": "function"}
            call["function"]["name"] = delta.name
        call["function"]["arguments"] += delta.arguments
    return list(told.values())


async def open_chat(
    service: Service, request: ChatRequest, size: int, header: Header
) -> tuple[Exchange, ChatForm]:
    """Raises ``RequestError`` or ``ApiError``. ``size``: of the body, in bytes."""
    service.check_model(request.model)
    check_salt(request.cache_salt)
    check_streaming(request)
    formed = request.response_format or request.structured_outputs or request.tools
    images = any(_has_image(message.get("content")) for message in request.messages)
    # A form is compiled, and images are decoded, which may take as long as a long text.
    long = LONG if formed or images else size
    prompt = await service.read(long, lambda: _encode(service, request), images=images)
    field, limit = _limit(request)
    chosen: dict[str, Any] = {
        "max_tokens": service.limited("messages", prompt.token_ids, limit, None, field),
        "logprobs": _top(service, request),
    }
    if prompt.form is not None:
        chosen["structured_outputs"] = prompt.form
    params = request.sampling_params(**chosen)
    service.check_params(params)
    job = common_job(service, request, prompt.token_ids, params, prompt.images)
    form = ChatForm(header, service, request, prompt)
    form.choices = [
        Choice(
            index,
            0,
            AnswerStream(
                service.tokenizer,
                params,
                tools=prompt.tools.choice != "none",
                reasoning=request.include_reasoning is not False,
            ),
        )
        for index in range(params.n)
    ]
    return Exchange(service, [job], form.choices), form


def _has_image(content: object) -> bool:
    parts = content if isinstance(content, list) else ()
    return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def _encode(service: Service, request: ChatRequest) -> ChatPrompt:
    for i, message in enumerate(request.messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        length = sum(len(text) for text in texts if isinstance(text, str))
        service.check_size(f"messages[{i}].content", length)
    return service.template.encode(request, service.image_reader())


def _limit(request: ChatRequest) -> tuple[str, int | None]:
    """The field that limits the answer, and its value."""
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        works = f"the same as max_completion_tokens, which is {newer}; or one of the two"
        raise RequestError("max_tokens", older, works)
    field, limit = ("max_completion_tokens", newer) if newer is not None else ("max_tokens", older)
    if limit is not None and limit < 1:
        raise RequestError(field, limit, "1 or above")
    return field, limit


def _top(service: Service, request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs", request.top_logprobs, "with logprobs true")
    logprob_limit(service, "top_logprobs", request.top_logprobs)
    logprob_limit(service, "prompt_logprobs", request.prompt_logprobs)
    return (request.top_logprobs or 0) if request.logprobs else None
