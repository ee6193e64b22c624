"""A server that stands for ours: the page with a probe in it, and answers by what is said."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "ml4core" / "serving" / "assets" / "page.html"
PROBE = Path(__file__).with_name("probe.js")

EVIL = "<img src=x onerror='window.injected=true'>"
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 30,
    "total_tokens": 50,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"num_drafts": 10, "accepted_per_position": [9, 6, 3]},
}
METRICS = """# HELP ml4_ready whether requests are taken
# TYPE ml4_ready gauge
ml4_ready{model_name="fake-model",version="1"} 1.0
ml4_num_requests_running{model_name="fake-model"} 3.0
ml4_num_requests_waiting{model_name="fake-model"} 0.0
ml4_kv_group_usage_perc{group="latent",model_name="fake-model"} 0.25
ml4_prompt_tokens_total{model_name="fake-model"} 1234.0
ml4_generation_tokens_total{model_name="fake-model"} 5678.0
ml4_time_to_first_token_seconds_count{model_name="fake-model"} 4.0
ml4_time_to_first_token_seconds_sum{model_name="fake-model"} 0.5
ml4_spec_decode_num_drafts_total{model_name="fake-model"} 10.0
ml4_spec_decode_num_accepted_tokens_total{model_name="fake-model"} 18.0
ml4_spec_decode_num_accepted_tokens_per_pos_total{model_name="fake-model",position="0"} 9.0
"""
REPORT = {
    "backend": {"name": "cpu", "distribution": "ml4core", "version": "1"},
    "device": {"name": "a device", "kind": "real"},
    "passed_over": [{"name": "other", "reasons": [f"no driver {EVIL}"]}],
    "model": "fake-model",
    "dtype": "float32",
    "weights": {"formats": ["bf16"], "bytes": 31_000_000},
    "kv": {
        "layouts": {"latent": "fp32"},
        "owners": {"latent": 10},
        "bytes_per_token": 26624,
        "tokens": 32768,
        "bytes": 991_000_000,
    },
    "max_model_len": 8192,
    "speculation": {"method": "dspark", "num_speculative_tokens": 3},
    "assumptions": {},
    "parts": [{"part": "ffn", "provider": "compose", "rejected": ["fused: too narrow"]}],
}


class Told:
    """What the server was asked, and what the probe has seen."""

    def __init__(self) -> None:
        self.chats: list[dict[str, Any]] = []
        self.go = threading.Event()
        self.gone = threading.Event()
        self.done = threading.Event()
        self.seen: dict[str, Any] = {}


def pixel() -> str:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class Handler(BaseHTTPRequestHandler):
    told: Told

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/":
            html = PAGE.read_text("utf-8")
            script = f"window.PIXEL = '{pixel()}';\n{PROBE.read_text('utf-8')}"
            self.reply(html.replace("</body>", f"<script>{script}</script></body>"), "text/html")
        elif self.path == "/metrics":
            self.reply(METRICS, "text/plain")
        elif self.path == "/report":
            self.reply(json.dumps(REPORT), "application/json")
        elif self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "fake-model"}]}), "application/json")
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        if self.path == "/go":
            self.told.go.set()
        elif self.path == "/seen":
            self.told.seen = json.loads(body)
            self.told.done.set()
        elif self.path == "/v1/chat/completions":
            self.chat(json.loads(body))
            return
        self.reply("{}", "application/json")

    def reply(self, text: str, kind: str, status: int = 200) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", f"{kind}; charset=utf-8")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def chat(self, body: dict[str, Any]) -> None:
        self.told.chats.append(body)
        last = body["messages"][-1]
        said = last["content"] if isinstance(last["content"], str) else "an image"
        if said == "bad":
            error = {"error": {"message": "temperature: 9 (works: 0 to 2)"}}
            self.reply(json.dumps(error), "application/json", 400)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if said == "one":
            self.event({"role": "assistant", "reasoning": "so"})
            self.event({"content": "Hel"})
            assert self.told.go.wait(60)
            self.event({"content": f"lo \u00e9 {EVIL}"}, "length")
        elif said == "two":
            begun: dict[str, Any] = {"index": 0, "id": "abc123def", "type": "function"}
            begun["function"] = {"name": "look", "arguments": '{"n"'}
            self.event({"tool_calls": [begun]})
            rest = {"index": 0, "function": {"arguments": ": 42}"}}
            self.event({"tool_calls": [rest]}, "tool_calls")
        elif said == "endless":
            self.until_gone()
            return
        else:
            self.event({"content": "fine"}, "stop")
        self.write({"choices": [], "usage": USAGE})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, delta: dict[str, Any], finish: str | None = None) -> None:
        self.write({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def write(self, value: Any) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def until_gone(self) -> None:
        wait = threading.Event()
        try:
            for _ in range(1000):
                self.event({"content": "more "})
                wait.wait(0.05)
        except OSError:
            self.told.gone.set()


@pytest.fixture
def served() -> Iterator[tuple[str, Told]]:
    """The server's address, and what it is told."""
    told = Told()
    handler = type("Own", (Handler,), {"told": told})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", told
    server.shutdown()
    server.server_close()
    thread.join()
