"""One benchmark of a server: a run for each concurrency, its facts, and lines for people."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ml4core import __version__
from ml4core.bench.serving.client import LOST, Client
from ml4core.bench.serving.datasets import Conversation
from ml4core.bench.serving.outcome import METRICS, summary
from ml4core.bench.serving.run import LoadOptions, measure, send

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


class ServerError(RuntimeError):
    """The server can't be measured."""


@dataclass(frozen=True)
class BenchOptions:
    """``concurrencies``: a run for each; None for one without a limit."""

    url: str
    api_key: str | None
    concurrencies: Sequence[int | None] = (None,)
    warmups: int = 0
    percentiles: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] | None = None
    devices: int = 1


async def served_model(client: Client) -> str:
    """The first name that the server answers to. Raises ``ServerError``."""
    try:
        reply = await client.request("GET", "/v1/models")
    except LOST as error:
        raise ServerError(
            f"no server at {client.address.host}:{client.address.port}: {error}"
        ) from (error)
    if reply.status != 200:
        raise ServerError(f"/v1/models answers {reply.status}: {reply.body.decode()[:200]}")
    return str(json.loads(reply.body)["data"][0]["id"])


def bench(
    options: BenchOptions,
    load: Callable[[], Sequence[Conversation]],
    sent: LoadOptions,
    told: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """The results, each of which is ``told`` as it comes. Raises ``ServerError``."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_bench(options, load(), sent, told))


async def _bench(
    options: BenchOptions,
    load: Sequence[Conversation],
    sent: LoadOptions,
    told: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    client = Client(options.url, options.api_key)
    try:
        if not sent.model:
            sent = replace(sent, model=await served_model(client))
        for _ in range(options.warmups):
            done = await send(client, load[0].turns[0], sent)
            if done.error is not None:
                raise ServerError(f"the warm-up failed: {done.error}")
        results = []
        for concurrency in options.concurrencies:
            here = replace(sent, concurrency=concurrency)
            before = await _processor_seconds(client)
            measured = await measure(client, load, here)
            after = await _processor_seconds(client)
            facts = _facts(here, options)
            facts |= summary(
                measured.outcomes,
                measured.seconds,
                percentiles=options.percentiles,
                goodput=options.goodput,
            )
            facts["max_concurrency"] = concurrency or measured.peak
            facts["max_concurrent_requests"] = measured.peak
            facts["client_cpu"] = measured.client_cpu / measured.seconds
            for name, seconds in after.items():
                facts[f"{name}_cpu"] = (seconds - before.get(name, 0.0)) / measured.seconds
            told(facts)
            results.append(facts)
        return results
    finally:
        await client.close()


def _facts(sent: LoadOptions, options: BenchOptions) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ml4core": __version__,
        "backend": sent.api,
        "base_url": options.url,
        "model": sent.model,
        "request_rate": "inf" if sent.rate == float("inf") else sent.rate,
        "burstiness": sent.burstiness,
        "ignore_eos": sent.ignore_eos,
        "temperature": sent.temperature,
        "seed": sent.seed,
        "devices": options.devices,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


async def _processor_seconds(client: Client) -> dict[str, float]:
    """Of the server's processes, where it tells."""
    found = {}
    try:
        text = (await client.request("GET", "/metrics")).body.decode()
    except (*LOST, UnicodeDecodeError):
        return {}
    for line in text.splitlines():
        for name, metric in (
            ("server", "process_cpu_seconds_total"),
            ("engine", "ml4_engine_process_cpu_seconds_total"),
        ):
            if line.startswith(f"{metric} "):
                found[name] = float(line.split()[1])
    return found


def text(facts: Mapping[str, Any]) -> str:
    """A result for people."""
    cpu = [f"{n} {facts[k]:.2f}" for n, k in _CPU.items() if k in facts]
    lines = [
        f"{facts['completed']} requests in {facts['duration']:.2f} s, {facts['failed']} failed, "
        f"at most {facts['max_concurrent_requests']} at once",
        f"  requests/s {facts['request_throughput']:.1f}   output tokens/s "
        f"{facts['output_throughput']:.1f}   all tokens/s {facts['total_token_throughput']:.1f}   "
        f"events/s {facts['event_throughput']:.0f}",
        f"  processors in use: {', '.join(cpu)}",
    ]
    if "request_goodput" in facts:
        lines.append(f"  good requests/s {facts['request_goodput']:.1f}")
    for metric in METRICS:
        keys = [k for k in facts if k.endswith(f"_{metric}_ms")]
        if keys:
            told = "   ".join(f"{k.split('_')[0]} {facts[k]:.2f}" for k in keys)
            lines.append(f"  {_NAMES[metric]}, ms: {told}")
    lines += [f"  failed: {error}" for error in facts["errors"]]
    return "\n".join(lines) + "\n"


_CPU = {"client": "client_cpu", "server": "server_cpu", "engine": "engine_cpu"}


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
