"""Two hundred clients at once, some of whom go, read slowly or ask for what can't be."""

from __future__ import annotations

import asyncio
import collections
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from ml4core.bench.serving.client import LOST, Client, Connection

pytestmark = pytest.mark.multiprocess

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"

BAD = (
    b"{",
    b'{"prompt": ""}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "n": 1000}',
    b'{"prompt": "a", "unknown": 1}',
    b'{"prompt": [99999999]}',
)


class Tally:
    """What came of the requests.

    Attributes:
        counts: requests by what they were and the status they got.
        faults: what should not have been.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    def expect(self, true: object, text: str) -> None:
        if not true and len(self.faults) < 10:
            self.faults.append(text)


def events(body: bytes) -> list[Any]:
    lines = body.decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class Load:
    """Requests of random kinds, until a time."""

    def __init__(self, url: str, clients: int, longest: int, seed: int) -> None:
        """``longest``: tokens of an answer at most."""
        self.tally = Tally()
        self._clients = clients
        self._url = url
        self._longest = longest
        self._random = random.Random(seed)

    async def run(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        async with asyncio.timeout(seconds + 240):  # whatever was accepted must end
            await asyncio.gather(*(self._client(end) for _ in range(self._clients)))
        await asyncio.sleep(0.1)  # what was aborted closes in the loop

    async def _client(self, end: float) -> None:
        client, loop = Client(self._url), asyncio.get_running_loop()
        kinds = (self._whole, self._stream, self._leave, self._slow, self._bad)
        while loop.time() < end:
            (kind,) = self._random.choices(kinds, (4, 8, 3, 2, 3))
            try:
                await kind(client)
            except LOST as error:
                self.tally.expect(False, f"{kind.__name__}: {error!r}")
        await client.close()

    def _body(self, **fields: Any) -> bytes:
        pick = self._random
        tokens = pick.randint(1, self._longest)
        prompt = [pick.randrange(300, 8000) for _ in range(pick.randint(1, 60))]
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": tokens}
        if pick.random() < 0.2:
            body |= {"n": 2, "logprobs": 1}
        return json.dumps(body | fields).encode()

    async def _whole(self, client: Client) -> None:
        if self._random.random() < 0.5:
            messages = [{"role": "user", "content": "Hello"}]
            raw = json.dumps({"messages": messages, "max_tokens": self._longest}).encode()
            reply = await client.request("POST", CHAT, raw)
        else:
            raw = self._body()
            reply = await client.request("POST", TEXT, raw)
        self._judge("whole", reply.status)
        if reply.status == 200:
            told = json.loads(reply.body)
            self.tally.expect(all(c["finish_reason"] for c in told["choices"]), "no end")

    async def _stream(self, client: Client) -> None:
        await self._read(await client.connection(), client)

    async def _slow(self, client: Client) -> None:
        connection = await client.connection()

        def part(data: bytes) -> None:
            if self._random.random() < 0.2:
                connection.pause()
                delay = self._random.uniform(0.05, 0.5)
                asyncio.get_running_loop().call_later(delay, connection.resume)

        await self._read(connection, client, part)

    async def _read(
        self, connection: Connection, client: Client, part: Callable[[bytes], None] | None = None
    ) -> None:
        raw = self._body(stream=True, stream_options={"include_usage": True})
        headers = {"host": "x", "content-type": "application/json"}
        reply = await connection.request("POST", TEXT, headers, raw, part)
        self._judge("slow" if part else "stream", reply.status)
        connection.abort()
        if reply.status != 200:
            return
        asked = json.loads(raw)
        told = events(reply.body)
        ends = [c["finish_reason"] for e in told for c in e["choices"] if c["finish_reason"]]
        self.tally.expect(ends == ["length"] * asked.get("n", 1), f"ends: {ends}")
        made = asked["max_tokens"] * asked.get("n", 1)
        self.tally.expect(told[-1]["usage"]["completion_tokens"] == made, "tokens are lost")
        self.tally.expect(reply.body.endswith(b"data: [DONE]\n\n"), "no [DONE]")

    async def _leave(self, client: Client) -> None:
        connection = await client.connection()
        left = self._random.randint(0, 5)

        def part(data: bytes) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                task.cancel()

        headers = {"host": "x", "content-type": "application/json"}
        raw = self._body(stream=self._random.random() < 0.7)
        task = asyncio.create_task(connection.request("POST", TEXT, headers, raw, part))
        if self._random.random() < 0.5:
            asyncio.get_running_loop().call_later(self._random.uniform(0, 0.3), task.cancel)
        try:
            reply = await task
        except asyncio.CancelledError:
            self.tally.counts["left"] += 1
        else:
            self._judge("stayed", reply.status)
        finally:
            connection.abort()

    async def _bad(self, client: Client) -> None:
        reply = await client.request("POST", TEXT, self._random.choice(BAD))
        self._judge("bad", reply.status)
        self.tally.expect(400 <= reply.status < 500, f"a bad request got {reply.status}")

    def _judge(self, kind: str, status: int) -> None:
        self.tally.counts[f"{kind} {status}"] += 1
        good = {200, 429} | ({400} if kind == "bad" else set())
        self.tally.expect(status in good, f"{kind} got {status}")


def memory(server: Any) -> tuple[float, float]:
    """Of the server and of its engine, resident, in MiB."""
    return tuple(
        server.metric(name) / 2**20
        for name in ("process_resident_memory_bytes", "ml4_engine_process_resident_memory_bytes")
    )


def check(server: Any, until: Any, seconds: float, clients: int, longest: int) -> Tally:
    asyncio.run(Load(server.url, clients, longest, 1).run(1))  # what is made once is made
    before = memory(server)
    load = Load(server.url, clients, longest, 2)
    asyncio.run(load.run(seconds))
    tally = load.tally
    assert not tally.faults, (tally.faults, tally.counts)
    for kind in ("whole 200", "stream 200", "slow 200", "left", "bad 400"):
        assert tally.counts[kind] > 0, tally.counts
    until(lambda: server.metric("ml4_open_requests") == 0)
    until(lambda: server.metric("ml4_num_requests_running") == 0)
    assert server.metric("ml4_num_requests_waiting") == 0
    assert server.metric("ml4_kv_group_usage_perc") == 0
    # The loop's own, the server's few, and that of the scrape itself.
    until(lambda: server.metric("ml4_event_loop_tasks") < 12)
    for name, old, new in zip(("server", "engine"), before, memory(server), strict=True):
        assert new < old + 48, f"the {name} grew from {old:.0f} to {new:.0f} MiB"
    assert server.get("/ready").status_code == 200
    assert not [line for line in server.lines if "exception" in line]
    return tally


def test_two_hundred_clients(null: Any, until: Any) -> None:
    check(null, until, seconds=20, clients=200, longest=40)


def test_clients_of_the_model(tiny: Any, until: Any) -> None:
    check(tiny, until, seconds=6, clients=40, longest=4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("which", "seconds"), [("null", 60), ("tiny", 300)])
def test_two_hundred_clients_for_minutes(
    request: pytest.FixtureRequest, which: str, seconds: int, until: Any
) -> None:
    server = request.getfixturevalue(which)
    before = memory(server)
    tally = check(server, until, seconds=seconds, clients=200, longest=40)
    print(which, dict(tally.counts), "MiB before and after:", before, memory(server))
