"""Metrics, logs and traces tell what happened."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

TEXT = "/v1/completions"

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "request_success",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
}
"""Without their prefix."""


class Counted:
    """How much each sample of a server's metrics grows."""

    def __init__(self, server: Any, metric: Callable[..., float]) -> None:
        self._server = server
        self._metric = metric
        self._before = server.get("/metrics").text

    def grown(self, name: str, **labels: str) -> float:
        after = self._server.get("/metrics").text
        try:
            before = self._metric(self._before, name, **labels)
        except AssertionError:
            before = 0.0
        return self._metric(after, name, **labels) - before


def test_counts_are_exact(null: Any, metric: Callable[..., float], until: Any) -> None:
    counted = Counted(null, metric)
    for _ in range(3):
        body = {"prompt": [5] * 10, "max_tokens": 7, "ignore_eos": True, "n": 2}
        assert null.post(TEXT, body).status_code == 200
    null.post(TEXT, {"prompt": ""})
    until(lambda: counted.grown("ml4_generation_tokens_total") == 42)
    assert counted.grown("ml4_prompt_tokens_total") >= 30
    for name, value in (
        ("ml4_request_success_total", 6),
        ("ml4_time_to_first_token_seconds_count", 3),
        ("ml4_e2e_request_latency_seconds_count", 3),
        ("ml4_request_queue_time_seconds_count", 3),
        ("ml4_request_prompt_tokens_sum", 30),
        ("ml4_request_generation_tokens_sum", 42),
        ("ml4_request_time_per_output_token_seconds_count", 6),
        ("ml4_request_params_n_sum", 6),
        ("ml4_inter_token_latency_seconds_count", 36),
    ):
        assert counted.grown(name) == value, name
    assert counted.grown("ml4_http_requests_total", path=TEXT, status="200") == 3
    assert counted.grown("ml4_http_requests_total", path=TEXT, status="400") == 1


def test_prefix_hits_by_group(null: Any, metric: Callable[..., float], until: Any) -> None:
    counted = Counted(null, metric)
    prompt = list(range(1000, 1200))  # three pages of 64, and a part
    for _ in range(2):
        null.post(TEXT, {"prompt": prompt, "max_tokens": 1})
    for group in ("latent", "index"):
        until(lambda group=group: counted.grown("ml4_kv_group_cache_hits_total", group=group))
        assert counted.grown("ml4_kv_group_cache_hits_total", group=group) == 192
        assert counted.grown("ml4_kv_group_cache_queries_total", group=group) == 400
    assert counted.grown("ml4_prefix_cache_hits_total") == 192


def test_each_metric_has_vllms_name_by_option(tiny: Any, null: Any) -> None:
    assert "vllm:" not in null.get("/metrics").text
    tiny.post(TEXT, {"prompt": "Once upon a", "max_tokens": 24})
    families = {family.name: family for family in parsed(tiny.get("/metrics").text)}
    ours = {name.removeprefix("ml4_") for name in families if name.startswith("ml4_")}
    theirs = {name.removeprefix("vllm:") for name in families if name.startswith("vllm:")}
    assert ours == theirs
    assert theirs >= NAMES
    for name in NAMES:
        labels = families[f"vllm:{name}"].samples[0].labels
        assert labels["model_name"] == "ml4-tiny"
    places = families["ml4_spec_decode_num_accepted_tokens_per_pos"].samples
    assert [s.labels["position"] for s in places] == [str(i) for i in range(len(places))]
    accepted = families["ml4_spec_decode_num_accepted_tokens"].samples[0].value
    assert sum(s.value for s in places) == accepted > 0


def test_lines_of_the_log_have_the_requests_id(null: Any, until: Any) -> None:
    with null.http(headers={"x-request-id": "my-request.1"}) as client:
        answer = client.post(TEXT, json={"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True})
    assert answer.headers["x-request-id"] == "my-request.1"
    assert answer.json()["id"] == "cmpl-my-request.1"
    line = until(lambda: next((x for x in null.lines if x.get("id") == "my-request.1"), None))
    assert line["event"] == "request"
    assert (line["status"], line["path"]) == (200, TEXT)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (2, 3)
    assert line["finish_reasons"] == ["length"]
    assert 0 < line["first_token_s"] <= line["seconds"]


def test_a_bad_id_is_replaced(null: Any) -> None:
    with null.http(headers={"x-request-id": "a b"}) as client:
        assert client.get("/health").headers["x-request-id"] != "a b"


def test_lines_for_people() -> None:
    from ml4core.serving.http import logs

    logger = logs.set_up("text")
    written = io.StringIO()
    (handler,) = logger.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(written)
    logger.info("request", extra={"fields": {"id": "x", "seconds": 0.25, "none": None}})
    logger.warning("odd", extra={"fields": {"reasons": ["a", "b"]}})
    first, second = written.getvalue().splitlines()
    assert first.endswith("Z request id=x seconds=0.25")
    assert second.endswith("Z warning: odd reasons=a,b")


def test_requests_are_traced() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from ml4core.serving.http.tracing import Tracer

    exporter = sdk.InMemorySpanExporter()
    tracer = Tracer("unused", "ml4-tiny", exporter)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    scope = {"method": "POST", "path": TEXT, "headers": [(b"traceparent", parent.encode())]}
    facts = {"prompt_tokens": 3, "completion_tokens": 4, "finish_reasons": ["stop"]}
    tracer.request(scope, "id-1", 200, 0.5, facts)
    tracer.request(scope | {"path": "/health"}, "id-2", 200, 0.5, {})
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" in parent
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert 0.45e9 < span.end_time - span.start_time < 0.55e9


def test_the_report_and_versions(tiny: Any) -> None:
    report = tiny.get("/report").json()
    assert report["backend"]["name"] == "cpu"
    assert report["speculation"]["method"] == "dspark"
    version = tiny.get("/version").json()
    assert version["backend"]["name"] == "cpu"
    schema = tiny.get("/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]
    assert json.dumps(schema)


def test_tokens_there_and_back(tiny: Any) -> None:
    with tiny.http() as client:

        def post(path: str, body: Any) -> httpx.Response:
            return client.post(path, json=body)

        found = post("/tokenize", {"prompt": "Hello you", "return_token_strs": True}).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert "".join(found["token_strs"][1:]) == "Hello you"
        assert post("/detokenize", {"tokens": found["tokens"][1:]}).json()["prompt"] == "Hello you"
        chat = post("/tokenize", {"messages": [{"role": "user", "content": "Hello you"}]}).json()
        assert chat["count"] > found["count"]
