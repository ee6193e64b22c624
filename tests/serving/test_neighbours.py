"""Requests that are hard to judge don't disturb those that run beside them."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

CHAT = "/v1/chat/completions"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"oneOf": [schema, {"type": "object", "properties": {"a": schema}}]}
    return schema


RECURSIVE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}
FORMS: dict[str, dict[str, Any]] = {
    "oneOf nested 12 deep": {"schema": nested(12)},
    "a recursive reference": {"schema": RECURSIVE},
    "a huge bound": {"schema": {"type": "string", "maxLength": 10**9}},
    "a reference to nothing": {"schema": {"$ref": "#/$defs/none"}},
    "an unknown type": {"schema": {"type": "thing"}},
    "repeats of repeats": {"regex": "(a{1,5000}){1,5000}"},
    "a regex that ends early": {"regex": "("},
    "a large schema": {"schema": {"enum": [f"value {i}" for i in range(60_000)]}},
    "a grammar of nothing": {"grammar": "start: nothing"},
}


def body(form: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    if "schema" in form:
        schema = {"name": "x", "schema": form["schema"]}
        return asked | {"response_format": {"type": "json_schema", "json_schema": schema}}
    return asked | {"structured_outputs": form}


class Story:
    """A greedy answer, streamed in a thread."""

    def __init__(self, server: Any, tokens: int) -> None:
        self.text = ""
        self.begun = threading.Event()
        self._server = server
        self._tokens = tokens
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self.begun.wait(120)

    def _run(self) -> None:
        messages = [{"role": "user", "content": "Tell me a story about a rabbit named Pip."}]
        asked = {"messages": messages, "temperature": 0, "max_tokens": self._tokens, "stream": True}
        with self._server.http() as client, client.stream("POST", CHAT, json=asked) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    self.text += choice["delta"].get("content", "")
                    self.begun.set()

    def end(self) -> str:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.text


@pytest.fixture(scope="module")
def story(tiny: Any) -> str:
    """What is told when nobody disturbs."""
    return Story(tiny, 24).end()


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_are_hard_to_compile(tiny: Any, story: str, name: str) -> None:
    """B102: served or refused, by its field, and never a fault of the server."""
    running = Story(tiny, 24)
    answer = tiny.post(CHAT, body(FORMS[name]))
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"].startswith(("response_format", "structured_outputs")), error
        assert len(error["message"]) < 2000
    assert running.end() == story


def test_a_very_long_prompt(null: Any, tiny: Any, story: str) -> None:
    """B106: 5 MB are refused with counts before they are divided."""
    running = Story(tiny, 24)
    asked = {"messages": [{"role": "user", "content": "abcd " * 1_000_000}]}
    error = tiny.post(CHAT, asked).json()["error"]
    assert error["param"] == "messages[0].content"
    assert "5,000,000 bytes" in error["message"]
    assert running.end() == story


@pytest.mark.parametrize("text", ["A" * 100_000, " " * 20_000 + "x", "\n" * 20_000, "a1" * 50_000])
def test_long_runs_there_and_back(tiny: Any, story: str, text: str) -> None:
    """B093."""
    running = Story(tiny, 24)
    found = tiny.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    if found.status_code == 400:
        assert found.json()["error"]["param"] == "prompt"
    else:
        back = tiny.post("/detokenize", {"tokens": found.json()["tokens"]})
        assert back.json()["prompt"] == text
    assert running.end() == story
