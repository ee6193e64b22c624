"""The wire between a server and its engine's process."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4core.api import Fault, FaultError
from ml4core.bench.host import null_core
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.errors import CheckpointError
from ml4core.serving.process.channel import Channel, ChannelClosedError
from ml4core.serving.process.inbox import EngineGoneError, Inbox
from ml4core.serving.process.link import EngineLink
from ml4core.serving.process.loop import EngineLoop
from ml4core.serving.process.null_engine import TalkingRunner, open_null
from ml4core.serving.process.opening import open_model
from ml4core.serving.process.wire import Abort, Add, Frames, Made, Rejected, Stopped, frame


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(1, 64), min_size=1))
def test_messages_come_whole_however_the_bytes_are_cut(
    bodies: list[bytes], cuts: list[int]
) -> None:
    raw = b"".join(frame(body) for body in bodies)
    frames, found, at = Frames(), [], 0
    for i in range(len(raw) + 1):
        size = cuts[i % len(cuts)]
        found += list(frames.feed(raw[at : at + size]))
        at += size
        if at >= len(raw):
            break
    assert found == bodies


def made(number: int) -> Made:
    return Made([(number, 0, [1] * 50_000, None, 1, 0, 1, None, None, None)], [], None, number)


@pytest.fixture
def ends() -> Any:
    ours, theirs = socket.socketpair()
    yield Channel(theirs), ours
    ours.close()
    theirs.close()


def test_a_server_that_does_not_read_stops_nothing(ends: Any) -> None:
    """What comes meanwhile goes as one message, once it reads again."""
    channel, server = ends
    for number in range(40):
        channel.put(made(number))  # far more than a socket takes
    channel.put(Rejected(7, "a", "b", "c"))
    frames, found = Frames(), []
    server.setblocking(False)
    while not found or not isinstance(found[-1], Rejected):
        channel.flush()
        try:
            found += list(frames.feed(server.recv(1 << 20)))
        except BlockingIOError:
            continue
    *messages, last = found
    assert last.id == 7
    assert len(messages) < 10
    assert [output[0] for m in messages for output in m.outputs] == list(range(40))
    assert messages[-1].steps == 39


def test_a_server_that_goes_is_noticed(ends: Any) -> None:
    channel, server = ends
    server.sendall(frame(Abort(3)) + frame([Abort(4), Abort(5)]))
    assert list(channel.receive(wait=True)) == [Abort(3), Abort(4), Abort(5)]
    assert list(channel.receive(wait=False)) == []
    server.close()
    with pytest.raises(ChannelClosedError):
        list(channel.receive(wait=True))


async def started(open: Any) -> EngineLink:
    link = await EngineLink.start(open)
    await link.facts()
    return link


async def read(box: Inbox) -> int:
    """Tokens up to the end."""
    count = 0
    while True:
        for news in await box.next():
            count += len(news.output.token_ids)
            if news.output.finish_reason is not None:
                return count


def null(seconds: float = 0.0) -> Any:
    return partial(open_null, EngineArgs("ml4-tiny", max_num_seqs=2, max_model_len=512), seconds)


def run(body: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(200):
            await body

    asyncio.run(limited())


def test_an_end_that_meets_its_abort_counts_once() -> None:
    """A stop string ends an answer here while the engine ends it there; the others go on."""

    def made(index: int, reason: str | None) -> bytes:
        output = (0, index, [5], reason, 1, 0, 1, None, None, None)
        return frame(Made([output], [], None, 1))

    async def body() -> None:
        link, box = EngineLink(), Inbox()
        assert link.submit(box, 0, [1], SamplingParams(n=2)) == 0
        link.abort(0, 0)
        assert link.open_sequences == 1
        link.data_received(made(0, "length"))
        assert link.open_sequences == 1
        link.abort(0, 0)
        assert link.open_sequences == 1
        link.data_received(made(1, None) + made(1, "length"))
        assert link.open_sequences == 0
        assert [news.output.index for news in await box.next()] == [0, 1, 1]

    run(body())


def test_what_requests_share_is_sent_once() -> None:
    async def body() -> None:
        link, written = EngineLink(), []
        link._transport = SimpleNamespace(  # type: ignore[assignment]
            write=written.append, is_closing=lambda: False
        )
        params = SamplingParams(logit_bias={i: 0.5 for i in range(5000)})
        for place in range(100):
            link.submit(Inbox(), place, [1], params)
        await asyncio.sleep(0)
        (whole,) = written
        assert len(whole) < 2 * len(frame(params))
        (found,) = Frames().feed(whole)
        assert [(add.id, add.params) for add in found] == [(i, params) for i in range(100)]

    run(body())


@pytest.mark.parametrize(("code", "told"), [(-9, "SIGKILL"), (-35, "signal 35"), (3, "code 3")])
def test_what_ended_a_process_is_told(code: int, told: str) -> None:
    async def body() -> None:
        link, box = EngineLink(), Inbox()
        link._process = SimpleNamespace(wait=lambda seconds: code)  # type: ignore[assignment]
        link.submit(box, 0, [1], SamplingParams())
        link.connection_lost(None)
        with pytest.raises(EngineGoneError, match=told):
            await box.next()

    run(body())


@pytest.mark.multiprocess
def test_requests_of_a_link() -> None:
    async def body() -> None:
        link = await started(null(0.001))
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        boxes = [Inbox() for _ in range(3)]
        numbers = [link.submit(box, 7, [1, 2], params) for box in boxes]
        assert link.open_sequences == 3
        first = await boxes[0].next()
        assert first[0].place == 7
        link.abort(numbers[1])
        link.abort(numbers[1])
        assert link.open_sequences == 2
        rest = await asyncio.gather(read(boxes[0]), read(boxes[2]))
        assert [rest[0] + len(first[0].output.token_ids), rest[1]] == [200, 200]
        assert link.open_sequences == 0
        # What can't be served comes back as the engine says it.
        bad = Inbox()
        link.submit(bad, 0, [10**6], params)
        with pytest.raises(RequestError, match=r"prompt, token 0: 1000000 \(works: ids from 0"):
            await bad.next()
        assert link.open_sequences == 0
        left = Inbox()
        link.submit(left, 0, [1], SamplingParams(max_tokens=500, ignore_eos=True))
        assert await link.close() == 0
        with pytest.raises(EngineGoneError):
            await read(left)
        with pytest.raises(EngineGoneError):
            link.submit(Inbox(), 0, [1], params)

    run(body())


@pytest.mark.multiprocess
def test_what_opening_raises_is_raised_here() -> None:
    async def body() -> None:
        link = await EngineLink.start(partial(open_model, EngineArgs("/no/such/folder")))
        with pytest.raises(CheckpointError, match="/no/such/folder"):
            await link.facts()
        assert "/no/such/folder" in str(link.ended)
        assert await link.close() == 1

    run(body())


class FailsAt:
    """Steps, of which one can't be launched."""

    def __init__(self, step: int) -> None:
        self._left = step
        self._runner = TalkingRunner(7, 0.0)

    def launch(self, step: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise ZeroDivisionError("in a step")
        return self._runner.launch(step)


def test_no_token_of_a_failed_step_leaves(ends: Any) -> None:
    channel, server = ends
    core = null_core(1, 100, overlap=False)
    core._runner = FailsAt(3)
    server.sendall(frame(Add(5, [1, 2], SamplingParams(max_tokens=50))))
    fault = EngineLoop(core, channel).run()
    assert fault is not None
    assert fault.code == "exception"
    channel.drain(10)
    *made, last = Frames().feed(server.recv(1 << 20))
    assert isinstance(last, Stopped)
    assert "ZeroDivisionError: in a step" in last.text
    assert sum(len(output[2]) for one in made for output in one.outputs) == 2


def test_an_alarm_stops_an_engine_that_has_nothing_to_do(ends: Any) -> None:
    channel, server = ends
    core = null_core(1, 100, overlap=False)
    alarm, ring = os.pipe()
    channel.alarms = (alarm,)
    lost = Fault("rank", "rank 1 has gone", 0, 1)

    def look() -> Fault | None:
        core.stop(lost)
        return core.fault

    threading.Timer(0.2, os.write, (ring, b"!")).start()
    assert EngineLoop(core, channel, look).run() == lost
    os.close(ring)
    os.close(alarm)
    channel.drain(10)
    (told,) = Frames().feed(server.recv(1 << 20))
    assert told == Stopped("rank", "rank 1 has gone")
    with pytest.raises(FaultError):
        core.add_request("a", [1], SamplingParams())
