"""Metrics for Prometheus: what the server measures, and the engine's state as it was told last.

Names are vLLM's with our prefix; by option each is there under vLLM's own name, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ml4core import __version__
from ml4core.engine.outputs import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "ml4_"
VLLM_PREFIX = "vllm:"

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_COUNT = tuple(m * 10**p for p in range(7) for m in (1, 2, 5))
_N = (1, 2, 5, 10, 20)

HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("from the request to its first token", _TTFT),
    "inter_token_latency_seconds": ("between two outputs of an answer", _TOKEN),
    "request_time_per_output_token_seconds": ("mean of an answer, behind its first", _TOKEN),
    "e2e_request_latency_seconds": ("from the request to its last token", _REQUEST),
    "request_queue_time_seconds": ("before the first row of a step", _REQUEST),
    "request_prefill_time_seconds": ("from the first row to the first token", _REQUEST),
    "request_decode_time_seconds": ("from the first token to the last", _REQUEST),
    "request_inference_time_seconds": ("from the first row to the last token", _REQUEST),
    "request_prompt_tokens": ("tokens of a prompt", _COUNT),
    "request_generation_tokens": ("tokens of an answer", _COUNT),
    "request_params_n": ("answers asked for", _N),
    "request_params_max_tokens": ("limit of an answer", _COUNT),
}


class Metrics:
    """The metrics of one server.

    Attributes:
        requests: HTTP answers by path and status.
    """

    def __init__(
        self,
        model: str,
        stats: Callable[[], EngineStats | None],
        ready: Callable[[], bool],
        open_requests: Callable[[], int],
        *,
        engine_pid: int,
        vllm_names: bool = False,
    ) -> None:
        """
        Args:
            stats: the engine's state.
            ready: whether requests are taken.
            open_requests: HTTP requests whose answers have not ended.
            vllm_names: give each metric a second time.
        """
        registry = CollectorRegistry(auto_describe=False)
        self._times: dict[str, Any] = {}
        for name, (text, buckets) in HISTOGRAMS.items():
            histogram = Histogram(
                PREFIX + name, text, ["model_name"], buckets=buckets, registry=registry
            )
            self._times[name] = histogram.labels(model)
        self._ended = Counter(
            PREFIX + "request_success",
            "answers that ended, by why",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.requests = Counter(
            PREFIX + "http_requests", "HTTP answers", ["path", "status"], registry=registry
        )
        self.cancelled = Counter(
            PREFIX + "requests_cancelled", "requests whose client went", registry=registry
        )
        for name, text, count in (
            ("open_requests", "requests whose answers have not ended", open_requests),
            ("event_loop_tasks", "tasks of the server", lambda: len(asyncio.all_tasks())),
        ):
            Gauge(PREFIX + name, text, registry=registry).set_function(count)
        # Memory, processor time and files of both processes; nothing where the system has no /proc.
        ProcessCollector(registry=registry)
        ProcessCollector("ml4_engine", lambda: engine_pid, registry=registry)
        registry.register(_EngineState(model, stats, ready))
        self._registry: Any = registry
        if vllm_names:
            self._registry = _Both(registry)
        self._model = model

    def observe(self, name: str, value: float) -> None:
        """A value of one of ``HISTOGRAMS``."""
        self._times[name].observe(value)

    def ended(self, reason: str) -> None:
        self._ended.labels(self._model, reason).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Both(Collector):
    """A registry whose metrics come twice."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield metric
            if metric.name.startswith(PREFIX):
                yield _renamed(metric)


def _renamed(metric: Metric) -> Metric:
    def name(own: str) -> str:
        return VLLM_PREFIX + own.removeprefix(PREFIX)

    found = Metric(name(metric.name), metric.documentation, metric.type)
    found.samples = [sample._replace(name=name(sample.name)) for sample in metric.samples]
    return found


class _EngineState(Collector):
    """The engine's state and counts, as they were told last."""

    def __init__(
        self, model: str, stats: Callable[[], EngineStats | None], ready: Callable[[], bool]
    ) -> None:
        self._labels = [model]
        self._stats = stats
        self._ready = ready

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            PREFIX + "ready", "whether requests are taken", labels=["model_name", "version"]
        )
        up.add_metric([*self._labels, __version__], float(self._ready()))
        yield up
        stats = self._stats()
        if stats is not None:
            yield from self._gauges(stats)
            yield from self._counters(stats)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("num_requests_running", "answers that run", stats.running),
            ("num_requests_waiting", "answers that wait", stats.waiting),
            ("kv_cache_usage_perc", "fullest group of pages, 0 to 1", _most(stats.usage)),
        ):
            yield self._one(GaugeMetricFamily, name, text, value)
        yield self._by(
            GaugeMetricFamily, "kv_group_usage_perc", "pages in use, 0 to 1", "group", stats.usage
        )

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        hits = stats.cache_hits
        first = next(iter(hits), "")  # all groups hit alike, but for windows
        for name, text, value in (
            ("num_preemptions", "answers put back to be computed again", stats.preemptions),
            ("prompt_tokens", "prompt tokens computed", stats.prompt_tokens),
            ("generation_tokens", "tokens made", stats.output_tokens),
            ("engine_steps", "steps run", stats.steps),
            ("prefix_cache_queries", "prompt tokens looked up", stats.cache_queries.get(first, 0)),
            ("prefix_cache_hits", "prompt tokens found", hits.get(first, 0)),
        ):
            yield self._one(CounterMetricFamily, name, text, value)
        for name, text, found in (
            ("kv_group_cache_queries", "prompt tokens looked up", stats.cache_queries),
            ("kv_group_cache_hits", "prompt tokens found", hits),
        ):
            yield self._by(CounterMetricFamily, name, text, "group", found)
        drafts = stats.drafts
        if drafts is None:
            return
        for name, text, value in (
            ("spec_decode_num_drafts", "windows judged", drafts.drafts),
            ("spec_decode_num_draft_tokens", "drafts judged", drafts.draft_tokens),
            ("spec_decode_num_accepted_tokens", "drafts accepted", drafts.accepted_tokens),
        ):
            yield self._one(CounterMetricFamily, name, text, value)
        places = {str(place): count for place, count in enumerate(drafts.accepted)}
        yield self._by(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "drafts accepted, by place in the window",
            "position",
            places,
        )

    def _one(self, family: Any, name: str, text: str, value: float) -> Metric:
        made: Metric = family(PREFIX + name, text, labels=["model_name"])
        made.add_metric(self._labels, value)  # type: ignore[attr-defined]
        return made

    def _by(
        self, family: Any, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        made: Metric = family(PREFIX + name, text, labels=["model_name", label])
        for key, value in values.items():
            made.add_metric([*self._labels, key], value)  # type: ignore[attr-defined]
        return made


def _most(values: Mapping[str, float]) -> float:
    return max(values.values(), default=0.0)
