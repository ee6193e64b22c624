"""What clients are told, and what the log is, without a server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.engine.outputs import SequenceOutput
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.errors import shown
from ml4core.serving.http import logs
from ml4core.serving.http.answers import EventStream
from ml4core.serving.http.choice import Choice
from ml4core.serving.http.flags import ServerArgs
from ml4core.serving.http.plain_stream import EmptyStream, PlainStream
from ml4core.serving.http.service import IMAGE_THREADS, LONG, Service
from ml4core.serving.process.wire import Facts
from ml4core.serving.tokenizer import Tokenizer

TINY = Path(str(resources.files("ml4core") / "assets" / "ml4-tiny" / "tekken.json"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def output(ids: list[int], reason: Any = None) -> SequenceOutput:
    return SequenceOutput("", 0, ids, reason, 1, 0, len(ids), None, None, None)


def test_ids_of_text_that_is_held_back_are_told_with_it(tokenizer: Tokenizer) -> None:
    """Each id of a stream comes once, though some of its events would have no text."""
    ids = tokenizer.encode("one two three")[1:]
    params = SamplingParams(stop=("one two three four",))
    choice = Choice(0, 0, PlainStream(tokenizer, params))
    told, text = [], ""
    for place, token in enumerate(ids):
        choice.take(output([token], "length" if place == len(ids) - 1 else None))
        if piece := choice.told():
            told += piece.token_ids
            text += piece.content
    assert told == ids
    assert text == "one two three"


def test_an_answer_of_no_tokens_has_none(tokenizer: Tokenizer) -> None:
    choice = Choice(0, 0, EmptyStream(tokenizer, SamplingParams(max_tokens=1)))
    assert not choice.take(output([5], "stop"))
    piece = choice.told()
    assert (piece.content, piece.token_ids, piece.finish_reason) == ("", [], "length")
    assert choice.stream.num_tokens == 0


def test_a_fault_within_a_stream_is_its_last_event(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> Any:
        raise RuntimeError("a secret of the server")

    closed: list[bool] = []
    exchange: Any = SimpleNamespace(
        finished=False,
        next=fails,
        choices=[],
        first_token_seconds=None,
        close=lambda: closed.append(True),
        usage=lambda: {
            "prompt_tokens": 1,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    )
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    stream = EventStream(exchange, SimpleNamespace(usage=False), [])  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR, "ml4core.serving"):
        asyncio.run(stream({"type": "http"}, send, send))  # type: ignore[arg-type]
    start, end = sent
    assert start["status"] == 200
    event, done, rest = end["body"].split(b"\n\n")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert (done, rest, end["more_body"]) == (b"data: [DONE]", b"", False)
    assert closed == [True]
    assert "a stream failed" in caplog.text


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_request_adds_no_line_to_the_log(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("ml4core.serving", "uvicorn.error")
    before = {n: (logging.getLogger(n).handlers, logging.getLogger(n).propagate) for n in names}
    try:
        log = logs.set_up(form)
        log.info("request", extra={"fields": {"path": "/a\nrequest path=/b\x1b[31m", "status": 1}})
    finally:
        for name, (handlers, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "\x1b" not in told
    assert "/b" in told


def test_texts_do_not_wait_for_images() -> None:
    """A host of images may take its time, for as many requests as there are threads for them."""
    link: Any = SimpleNamespace(stats=None, ended=None, pid=os.getpid())
    facts = Facts("", str(TINY), 8192, 64, 2, 64, {})
    service = Service(link, facts, EngineArgs("ml4-tiny"), ServerArgs())
    answered = threading.Event()

    async def body() -> None:
        slow = [
            asyncio.create_task(service.read(LONG, lambda: answered.wait(60), images=True))
            for _ in range(IMAGE_THREADS + 1)
        ]
        await asyncio.sleep(0)  # they are handed over
        try:
            assert await asyncio.wait_for(service.read(LONG, lambda: 7), 30) == 7
        finally:
            answered.set()
        assert await asyncio.gather(*slow) == [True] * len(slow)

    try:
        asyncio.run(body())
    finally:
        service.close()


def test_a_value_that_is_nested_too_deep_is_told_by_its_type() -> None:
    value: list[Any] = []
    for _ in range(10_000):
        value = [value]
    assert shown(value) == "a value of type list too long to print"
