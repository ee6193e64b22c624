"""Events of a stream: text in the form of the event before it reads as a whole event does."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4core.serving.http.answers import EventStream
from ml4core.serving.http.chats import ChatForm
from ml4core.serving.http.choice import Piece
from ml4core.serving.http.completions import CompletionForm, CompletionRequest
from ml4core.serving.http.requests import Header
from ml4core.serving.protocol import ChatRequest

SERVICE: Any = SimpleNamespace(tokenizer=None)
PROMPT: Any = SimpleNamespace(token_ids=[1])
ODD = '"\\u0000"\\"'
"""What a client may put into ids and names, so that it looks like the place of the text."""


class Usage:
    def usage(self) -> dict[str, int]:
        return {"total_tokens": 7}


def stream(chat: bool, *, usage: bool = False, always: bool = False, **fields: Any) -> EventStream:
    header = Header(f"x-{ODD}", f"m{ODD}", 1, stream=True, usage=usage, usage_always=always)
    form: Any
    if chat:
        form = ChatForm(header, SERVICE, ChatRequest(messages=[], **fields), PROMPT)
    else:
        form = CompletionForm(header, SERVICE, CompletionRequest(prompt="a", **fields))
        form.prompts = [SimpleNamespace(text="", ids=[1])]
    return EventStream(Usage(), form, ())  # type: ignore[arg-type]


def texts(events: list[Any], chat: bool) -> list[str]:
    choices = [event["choices"][0] for event in events]
    return [one["delta"].get("content", "") if chat else one["text"] for one in choices]


def decoded(raw: bytes) -> Any:
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n") == 2, "an event is one line"
    return json.loads(raw[6:])


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("usage", [True, False])
@given(told=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_events_hold_their_text_whatever_it_is(chat: bool, usage: bool, told: list[str]) -> None:
    made = stream(chat, usage=usage)
    choices: list[Any] = [SimpleNamespace(index=index, place=0) for index in (0, 1)]
    for choice in choices:
        pieces = [Piece(text) for text in told] + [Piece("end", finish_reason="stop")]
        raw = [made._event(choice, piece) for piece in pieces]
        slow = [made._whole_event(choice, piece) for piece in pieces]
        events = [decoded(one) for one in raw]
        assert texts(events, chat) == [*told, "end"]
        assert events[1:] == [decoded(one) for one in slow[1:]]
        assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"
        assert all(("usage" in event) is usage for event in events)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "fields", [{"return_token_ids": True}, {"usage": True, "always": True}], ids=["ids", "usage"]
)
def test_what_differs_in_more_than_text_is_told(chat: bool, fields: dict[str, Any]) -> None:
    made = stream(chat, **fields)
    choice: Any = SimpleNamespace(index=0, place=0)
    pieces = [Piece("a", token_ids=[5]), Piece("b", token_ids=[6]), Piece("c", token_ids=[7])]
    events = [decoded(made._event(choice, piece)) for piece in pieces]
    assert texts(events, chat) == ["a", "b", "c"]
    if "return_token_ids" in fields:
        assert [event["choices"][0]["token_ids"] for event in events] == [[5], [6], [7]]
    else:
        assert all(event["usage"] == {"total_tokens": 7} for event in events)
