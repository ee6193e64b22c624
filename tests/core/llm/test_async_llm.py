"""`ml4core.AsyncLLM`: requests that come, go, fail and wait, beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import FaultError
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.async_llm import AsyncLLM
from ml4core.serving.errors import EngineClosedError
from ml4core.serving.llm import LLM
from ml4core.serving.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("probed_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=4000)
TEXTS = ["Hello", "One two three four five", "A"]


@pytest.fixture
def engine(folder: Path) -> Any:
    args = EngineArgs(str(folder), backend="cpu", max_num_seqs=4, block_size=16)
    made = AsyncLLM.from_engine_args(args)
    yield made
    made.shutdown()


async def last(engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> RequestOutput:
    final = None
    async for output in engine.generate(prompt, params, name):
        final = output
    assert final is not None
    return final


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


def run(body: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await body

    asyncio.run(limited())


def test_outputs_hold_all_up_to_now(engine: AsyncLLM) -> None:
    async def body() -> None:
        params = replace(GREEDY, max_tokens=64)
        ids: list[int] = []
        text, count, finished = "", 0, False
        prompts = set()
        async for output in engine.generate("Hello", params, "a"):
            assert not finished
            prompts.add(id(output.prompt_token_ids))
            (one,) = output.outputs
            assert one.text.startswith(text)
            assert one.token_ids[: len(ids)] == ids
            text, ids, count, finished = one.text, one.token_ids, count + 1, output.finished
        assert finished
        assert count > 1
        assert len(prompts) == 1, "a copy of a long prompt at each step"
        assert (len(ids), one.finish_reason, output.request_id) == (64, "length", "a")
        assert text == engine.get_tokenizer().decode(ids)

    run(body())


def test_answers_are_those_of_the_other_class(engine: AsyncLLM, llm: LLM, held_pages: Any) -> None:
    want = [done.outputs for done in llm.generate(TEXTS, GREEDY)]

    async def body() -> None:
        together = [last(engine, text, GREEDY, f"r{i}") for i, text in enumerate(TEXTS)]
        assert [done.outputs for done in await asyncio.gather(*together)] == want
        stop = want[1][0].text[6:9]
        stopped = last(engine, TEXTS[1], replace(LONG, stop=(stop,)), "r0")
        other = last(engine, {"prompt": TEXTS[0]}, GREEDY, "r1")
        first, second = await asyncio.gather(stopped, other)
        assert first.outputs[0].text == want[1][0].text.partition(stop)[0]
        assert first.outputs[0].stop_reason == stop
        assert second.outputs == want[0]
        await until(lambda: held_pages(engine.engine) == 0)

    run(body())


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_who_goes_gives_pages_back(engine: AsyncLLM, held_pages: Any, how: str) -> None:
    async def body() -> None:
        want = (await last(engine, "Hello", GREEDY, "b")).outputs
        if how == "cancel":
            task = asyncio.create_task(last(engine, "A", LONG, "a"))
            await until(lambda: held_pages(engine.engine) > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream: Any = engine.generate("A", LONG, "a")
            await anext(stream)
            await stream.aclose()
        # The id is free at once, and what is still told of the first request isn't of this one.
        assert (await last(engine, "Hello", GREEDY, "a")).outputs == want
        await until(lambda: held_pages(engine.engine) == 0)
        assert not engine.errored

    run(body())


def test_abort_ends_with_an_output(engine: AsyncLLM, held_pages: Any) -> None:
    async def body() -> None:
        stream: Any = engine.generate("A", LONG, "a")
        await anext(stream)
        await engine.abort("nobody")
        await engine.abort("a")
        outputs = [output async for output in stream]
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert len(outputs[-1].outputs[0].token_ids) < 4000
        await until(lambda: held_pages(engine.engine) == 0)

    run(body())


def test_a_bad_request_fails_alone(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from ml4core.serving.answers import Answers

    take = Answers.take

    def broken(self: Answers, output: Any) -> Any:
        if self.request_id == "broken":
            raise ZeroDivisionError("in one request")
        return take(self, output)

    monkeypatch.setattr(Answers, "take", broken)

    async def body() -> None:
        want = (await last(engine, "Hello", GREEDY, "x")).outputs
        stream: Any = engine.generate("Hello", LONG, "open")
        await anext(stream)
        results = await asyncio.gather(
            last(engine, "Hello", GREEDY, "good"),
            last(engine, {"prompt_token_ids": [9999]}, GREEDY, "b"),
            last(engine, "", GREEDY, "c"),
            last(engine, "a", GREEDY, "open"),
            last(engine, "a", replace(GREEDY, stop_token_ids=(9999,)), "d"),
            last(engine, "a", "no params", "e"),  # type: ignore[arg-type]
            last(engine, "a", GREEDY, "broken"),
            return_exceptions=True,
        )
        assert isinstance(results[0], RequestOutput)
        assert results[0].outputs == want
        assert [type(one) for one in results[1:]] == [RequestError] * 5 + [ZeroDivisionError]
        assert "request_id: open" in str(results[3])
        assert not engine.errored
        await anext(stream)  # the request whose id was wanted twice goes on
        await stream.aclose()
        with pytest.raises(RequestError, match="priority"):
            await anext(engine.generate("a", GREEDY, "f", priority=1))

    run(body())


def test_a_fault_reaches_each_waiter(
    engine: AsyncLLM, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        "ml4core.registry.notify_fault", lambda fault, manager: told.append(fault.code)
    )

    async def body() -> None:
        tasks = [asyncio.create_task(last(engine, text, LONG, text)) for text in TEXTS]
        await until(lambda: engine.engine.core.stats().running == 3)
        spoil(engine.engine)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in results] == [FaultError] * 3
        assert len({id(one) for one in results}) == 3
        await until(lambda: told == ["nan"])
        with pytest.raises(FaultError, match="nan"):
            await last(engine, "a", GREEDY, "late")
        with pytest.raises(FaultError):
            await engine.check_health()
        assert engine.errored

    run(body())


def test_an_error_of_the_thread_leaves_nobody_waiting(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(engine.engine.core, "step", broken)

    async def body() -> None:
        for name in ("a", "b"):
            with pytest.raises(RuntimeError, match="ZeroDivisionError: odd") as caught:
                await last(engine, "a", GREEDY, name)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)

    run(body())


def test_shutdown_reaches_each_waiter(folder: Path) -> None:
    async def body() -> None:
        async with AsyncLLM(str(folder), max_num_seqs=2) as engine:
            # More than run together: some wait in the queue.
            tasks = [asyncio.create_task(last(engine, text, LONG, text)) for text in TEXTS]
            await until(lambda: engine.engine.core.stats().waiting == 1)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in results] == [EngineClosedError] * 3
        with pytest.raises(EngineClosedError):
            await last(engine, "a", GREEDY, "late")
        engine.shutdown()

    run(body())


def test_a_loop_that_is_gone_frees_its_requests(engine: AsyncLLM, held_pages: Any) -> None:
    loop = asyncio.new_event_loop()
    stream: Any = engine.generate("A", LONG, "a")
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()

    async def body() -> None:
        await until(lambda: held_pages(engine.engine) == 0)
        assert (await last(engine, "Hello", GREEDY, "a")).finished

    run(body())
