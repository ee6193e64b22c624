"""From an exchange to an HTTP answer: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from json.encoder import encode_basestring
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ml4core.engine.errors import RequestError
from ml4core.serving.http import errors
from ml4core.serving.http.choice import Choice, Piece
from ml4core.serving.http.errors import ApiError, ClientGoneError
from ml4core.serving.http.exchange import Exchange
from ml4core.serving.process.inbox import EngineGoneError

CLIENT_GONE = 499
"""The status of what nobody reads, for the log."""
DONE = b"data: [DONE]\n\n"
DIRECT = "ml4core.send"
"""Of a scope: the server's own ``send``, below all that stands between it and a route."""

_LOG = logging.getLogger("ml4core.serving")


class Form(Protocol):
    """How an endpoint writes its answers.

    Attributes:
        stream: as events.
        usage: an event at the end that tells of tokens.
        usage_always: each event tells of them.
        plain: text alone, behind an answer's first event, is all that its events differ in.
    """

    stream: bool
    usage: bool
    usage_always: bool
    plain: bool

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """An element of ``choices``, all of it."""
        ...

    def part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """An element of ``choices`` of an event."""
        ...

    def body(self, choices: list[dict[str, Any]], *, event: bool) -> dict[str, Any]:
        """The object around them."""
        ...


async def answer(request: Request, exchange: Exchange, form: Form) -> Response:
    """The answer, once it is known that there will be one. Closes the exchange, now or when all is
    told. Raises ``ApiError``.
    """
    handed = False
    try:
        exchange.watch(request.receive)
        touched = await _next(exchange)
        if form.stream:
            handed = True
            return EventStream(exchange, form, touched)
        while not exchange.finished:
            await _next(exchange)
        choices = [form.whole(choice, choice.told()) for choice in exchange.choices]
        note(request.scope, exchange)
        return JsonAnswer(form.body(choices, event=False) | {"usage": exchange.usage()})
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    finally:
        if not handed:
            exchange.close()


async def _next(exchange: Exchange) -> Iterable[Choice]:
    try:
        return await exchange.next()
    except RequestError as error:
        raise errors.of_request(error) from error
    except EngineGoneError as error:
        raise errors.of_engine(error) from error


class JsonAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class EventStream(Response):
    """Events as answers grow. What a client was too slow to read comes to it at once: as one event
    for each answer.
    """

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, form: Form, touched: Iterable[Choice]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._form = form
        self._touched = touched
        # Of a choice: what stands around the text of its events; None from its first event on,
        # until there is one to be taken.
        self._around: dict[int, tuple[bytes, bytes] | None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._tell(scope.get(DIRECT, send))
                end = DONE
            except ClientGoneError:
                return
            except Exception as error:  # 200 has been said
                if not isinstance(error, ApiError):
                    fields = {"id": scope.get("ml4core.id")}
                    _LOG.exception("a stream failed", extra={"fields": fields})
                end = b"data: " + errors.body(errors.told(error)) + b"\n\n" + DONE
            await _write(send, end, more=False)
        finally:
            note(scope, exchange)
            exchange.close()

    async def _tell(self, send: Send) -> None:
        exchange, form, touched = self._exchange, self._form, self._touched
        while True:
            events = b"".join(
                self._event(choice, piece) for choice in touched if (piece := choice.told())
            )
            if events:
                await _write(send, events)
            if exchange.finished:
                break
            touched = await _next(exchange)
        if form.usage:
            last = form.body([], event=True) | {"usage": exchange.usage()}
            await _write(send, b"data: " + encode(last) + b"\n\n")

    def _event(self, choice: Choice, piece: Piece) -> bytes:
        if not (self._form.plain and piece.plain and choice.index in self._around):
            self._around.setdefault(choice.index, None)
            return self._whole_event(choice, piece)
        around = self._around[choice.index]
        if around is None:
            # Between quotes there can be no other: a backslash within a text is written as two.
            head, _, tail = self._whole_event(choice, Piece("\0")).rpartition(rb'"\u0000"')
            around = self._around[choice.index] = head, tail
        return around[0] + encode_basestring(piece.content).encode() + around[1]

    def _whole_event(self, choice: Choice, piece: Piece) -> bytes:
        form = self._form
        event = form.body([form.part(choice, piece)], event=True)
        if form.usage:
            event["usage"] = self._exchange.usage() if form.usage_always else None
        return b"data: " + encode(event) + b"\n\n"


async def _write(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def note(scope: Scope, exchange: Exchange) -> None:
    """For the line in the log."""
    usage = exchange.usage()
    scope.setdefault("state", {})["ml4core"] = {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "first_token_s": exchange.first_token_seconds,
        "finish_reasons": [choice.stream.finish_reason for choice in exchange.choices],
    }
