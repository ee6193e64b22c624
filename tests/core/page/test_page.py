"""The page in a real browser, against a server that answers by a script."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[3] / "ml4core" / "serving" / "assets" / "page.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        reason = f"needs one of {', '.join(BROWSERS)}"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; continuous integration has to install it")
        pytest.skip(reason)
    return found


@pytest.mark.multiprocess
def test_the_page_works_in_a_browser(served: tuple[str, Any], tmp_path: Path) -> None:
    address, told = served
    process = subprocess.Popen(
        [
            *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--remote-debugging-port=0", f"--user-data-dir={tmp_path}", address),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert told.done.wait(200), f"the page never reported; it asked {len(told.chats)} times"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    seen = told.seen
    assert "error" not in seen, seen["error"]

    assert seen["title"] == "fake-model \u00b7 ml4core"
    assert seen["facts"] == "cpu \u00b7 a device \u00b7 8,192 tokens of context"
    assert seen["streaming"] == ["Hel", "Stop"], "text is there before the answer has ended"
    assert seen["answer"].startswith("Hello \u00e9 <img src=x"), "what is made is text, no markup"
    assert seen["reasoning"] == "so"
    assert "30 tokens" in seen["meta"]
    assert "tokens/s" in seen["meta"]
    assert "16 of 20 from the cache" in seen["meta"]
    assert "cut at the limit" in seen["meta"]
    assert "2.80 tokens a step (90%, 60%, 30% accepted)" in seen["meta"]
    assert seen["bars"] == ["90%", "60%", "30%"]
    assert seen["call"] == [["look", {"n": 42}]]
    assert (seen["after"], seen["result"]) == ("fine", "a result")
    assert seen["image"] == ["data:image/png;base64,", 3]
    assert "stopped" in seen["stopped"]
    assert told.gone.wait(60), "a stopped answer ends at the server, too"
    assert seen["failed"] == "temperature: 9 (works: 0 to 2)"
    assert seen["restored"] == "bad"

    assert seen["dot"] == "ready"
    for text in ("running3", "pages: latent25%", "tokens made5,678", "125.0 ms", "draft 190%"):
        assert text in seen["live"]
    for text in ("cpu 1", "32,768 tokens", "31 MB", "ffncompose", "fused: too narrow", "no driver"):
        assert text in seen["start"]
    assert seen["hidden"] == [True, False, True]
    assert seen["theme"]
    assert seen["cleared"] == 0
    assert not seen["injected"]
    assert seen["unnamed"] == []
    assert seen["elsewhere"] == []
    check_requests(told.chats)


def check_requests(chats: list[dict[str, Any]]) -> None:
    first, second, third, fourth = chats[:4]
    assert first["stream"]
    assert first["stream_options"] == {"include_usage": True}
    assert first["messages"] == [{"role": "user", "content": "one"}]
    assert "tools" not in first
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert second["tools"] == [tool]
    assert [message["role"] for message in third["messages"]] == [
        *("user", "assistant", "user", "assistant", "tool")
    ]
    result = {"role": "tool", "tool_call_id": "abc123def", "content": "a result"}
    assert third["messages"][-1] == result
    assert third["messages"][-2]["tool_calls"][0]["function"]["arguments"] == '{"n": 42}'
    image, text = fourth["messages"][-1]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "three"}


def test_the_page_names_no_other_place() -> None:
    """It works without a network, and says nothing to anybody but its server."""
    html = PAGE.read_text("utf-8")
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<>]*", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html
    assert not re.search(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=[\"'](?!data:)", html)
    assert "innerHTML" not in html


def test_the_server_gives_it_at_its_root() -> None:
    pytest.importorskip("starlette")
    from ml4core.serving.http.page import Page

    answer = asyncio.run(Page().get(None))  # type: ignore[arg-type]
    assert answer.body == PAGE.read_bytes()
    assert answer.media_type == "text/html; charset=utf-8"
    assert answer.headers["x-frame-options"] == "DENY"
