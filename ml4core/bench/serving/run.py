"""Sends a load to a server and takes the times of what comes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ml4core.bench.serving.client import LOST, Client, Reply
from ml4core.bench.serving.datasets import Conversation, Sample
from ml4core.bench.serving.outcome import Outcome

Api = Literal["openai", "openai-chat"]
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class LoadOptions:
    """How a load is sent.

    Attributes:
        rate: requests a second; infinity sends all at once.
        burstiness: shape of the gamma law of the gaps: 1 is a Poisson process, less is burstier.
        concurrency: conversations that are open at once at most; None for no such limit.
        stream: whether answers come as events; else only the whole is timed.
    """

    model: str
    api: Api = "openai"
    endpoint: str | None = None
    rate: float = float("inf")
    burstiness: float = 1.0
    concurrency: int | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    seed: int = 0
    stream: bool = True


@dataclass(frozen=True)
class Measured:
    """A load that was sent.

    Attributes:
        seconds: from the first request to the last token.
        client_cpu: seconds of processor time that this process took meanwhile.
        peak: requests that were open at once at most.
    """

    outcomes: list[Outcome]
    seconds: float
    client_cpu: float
    peak: int


async def measure(client: Client, load: Sequence[Conversation], options: LoadOptions) -> Measured:
    """Requests that fail are outcomes, too."""
    gate = asyncio.Semaphore(options.concurrency or len(load))
    outcomes: list[Outcome] = []
    open_now = peak = 0

    async def converse(conversation: Conversation) -> None:
        nonlocal open_now, peak
        async with gate:
            for sample in conversation.turns:
                if sample.think_s:
                    await asyncio.sleep(sample.think_s)
                open_now += 1
                peak = max(peak, open_now)
                outcomes.append(await send(client, sample, options))
                open_now -= 1

    began, cpu = time.perf_counter(), time.process_time()
    tasks = []
    for conversation, wait in zip(load, _gaps(options), strict=False):
        if wait:
            await asyncio.sleep(max(0.0, began + wait - time.perf_counter()))
        tasks.append(asyncio.create_task(converse(conversation)))
    await asyncio.gather(*tasks)
    ended = max((o.ended for o in outcomes if o.ended), default=time.perf_counter())
    return Measured(outcomes, ended - began, time.process_time() - cpu, peak)


async def send(client: Client, sample: Sample, options: LoadOptions) -> Outcome:
    """One request."""
    path = options.endpoint or ENDPOINTS[options.api]
    raw = json.dumps(body(sample, options)).encode()
    sent = time.perf_counter()
    try:
        reply = await client.request("POST", path, raw)
    except LOST as error:
        return Outcome(sent, error=f"{type(error).__name__}: {error}")
    if reply.status != 200:
        return Outcome(sent, error=f"{reply.status}: {reply.body.decode('utf-8', 'replace')[:500]}")
    return _streamed(sent, reply) if options.stream else _whole(sent, reply)


def body(sample: Sample, options: LoadOptions) -> dict[str, Any]:
    """What is sent."""
    found: dict[str, Any] = {"model": options.model, "max_tokens": sample.output_len}
    if options.api == "openai-chat":
        chat = isinstance(sample.prompt, list)
        content = sample.prompt if chat else [{"role": "user", "content": sample.prompt}]
        found["messages"] = content
    else:
        found["prompt"] = sample.prompt
    if options.stream:
        found |= {"stream": True, "stream_options": {"include_usage": True}}
    if options.ignore_eos:
        found["ignore_eos"] = True
    if options.temperature is not None:
        found["temperature"] = options.temperature
    return found


def _streamed(sent: float, reply: Reply) -> Outcome:
    found = Outcome(sent)
    rest = b""
    for moment, part in reply.parts:
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue
            told = json.loads(event[6:])
            if "error" in told:
                found.error = str(told["error"].get("message"))
                return found
            if told.get("usage"):
                found.prompt_tokens = told["usage"]["prompt_tokens"]
                found.output_tokens = told["usage"]["completion_tokens"]
            if any(_holds(choice) for choice in told["choices"]):
                found.times.append(moment)
    if not found.times:
        found.error = "the answer held nothing"
    return found


def _holds(choice: dict[str, Any]) -> bool:
    """Whether there is something of an answer in it."""
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return bool(delta.get("content") or delta.get("reasoning") or delta.get("tool_calls"))


def _whole(sent: float, reply: Reply) -> Outcome:
    usage = json.loads(reply.body)["usage"]
    return Outcome(
        sent,
        times=[reply.parts[-1][0]],
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
    )


def _gaps(options: LoadOptions) -> Iterator[float]:
    """When each conversation begins, in seconds after the first."""
    draw, at = random.Random(options.seed), 0.0
    while True:
        yield at
        if options.rate != float("inf"):
            shape = options.burstiness
            at += draw.gammavariate(shape, 1 / (options.rate * shape))
