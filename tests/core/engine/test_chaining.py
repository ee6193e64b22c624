"""A step in flight, padded steps, and executors that use their memory again: all change nothing."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.api import StepBuckets, StepOutput, StepPlan
from ml4core.engine import steps
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.transfers import HostCopy, upload
from ml4core.models.seeded import make_seeded
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")

BUCKETS = StepBuckets(
    decode=(1, 2, 4, 16),
    prefill_requests=(1, 4, 16),
    prefill_rows=(8, 32, 128, 512),
    pages=(2, 4, 8),
    logits=(4, 16, 128, 512),
)

Start = Callable[..., Engine]


def seeds(fast: int, total: int) -> list[Any]:
    """Of mixtures: those beyond the first ones are for `make test-full`."""
    return [*range(fast), *(pytest.param(i, marks=pytest.mark.slow) for i in range(fast, total))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("chain") / "m", "micro", layers=4, vocab=320)


@pytest.fixture(scope="module")
def choice() -> Any:
    return select("cpu")


@pytest.fixture
def start(folder: Path, choice: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    opened: list[Engine] = []
    backend = type(choice.backend)
    plain = backend.open

    def start(buckets: StepBuckets | None = None, executor: Any = None, **flags: Any) -> Engine:
        def open(self: Any, deployment: Any) -> Any:
            session = plain(self, deployment)
            session.step_buckets = buckets
            session.executor = executor or session.executor
            return session

        monkeypatch.setattr(backend, "open", open)
        args = EngineArgs(str(folder), backend="cpu", block_size=16, **flags)
        engine = open_engine(args, choice=choice, sequences=8, tokens_each=100)
        opened.append(engine)
        return engine

    yield start
    for engine in opened:
        engine.close()


def mixture(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests that ask for what the sampler has, all at random."""
    rng = random.Random(seed)
    found = []
    for _ in range(rng.randint(3, 8)):
        prompt = [rng.randrange(320) for _ in range(rng.randint(1, 40))]
        heat = rng.choice([0.0, 0.0, 0.7, 1.3])
        params = SamplingParams(
            n=rng.choice([1, 2]) if heat else 1,
            temperature=heat,
            seed=rng.randrange(1000),
            max_tokens=rng.randint(1, 12),
            min_tokens=rng.choice([0, 1]),
            stop_token_ids=tuple(rng.sample(range(320), 30)),
            ignore_eos=True,
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.05]),
            frequency_penalty=rng.choice([0.0, 0.0, 1.5]),
            presence_penalty=rng.choice([0.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=rng.choice([None, {3: 5.0}]),
            logprobs=rng.choice([None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        found.append((prompt, params))
    return found


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> Mapping[Any, Any]:
    """By answer: the end, tokens and prompt, and each logprob beside them."""
    core, done = engine.core, {}

    def told(entries: Any) -> Any:
        found = [entry or {} for entry in entries or ()]
        return [(list(entry), [one.logprob for one in entry.values()]) for entry in found]

    for i, (prompt, params) in enumerate(requests):
        core.add_request(str(i), prompt, params)
    while core.has_work:
        for one in core.step():
            key = (one.request_id, one.index)
            tokens, logprobs, prompt_logprobs, _ = done.get(key, ([], [], [], None))
            done[key] = (
                tokens + one.token_ids,
                logprobs + told(one.logprobs),
                prompt_logprobs + told(one.prompt_logprobs),
                one.finish_reason,
            )
        if core.cause is not None:
            raise core.cause
    assert {pool.used_pages for pool in engine.runner.pools.values()} == {0}
    return done


def assert_same(found: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        got = found[key]
        assert (got[0], got[3]) == (want[0], want[3]), key
        for entries, others in ((got[1], want[1]), (got[2], want[2])):
            assert [ids for ids, _ in entries] == [ids for ids, _ in others]
            for (_, values), (_, theirs) in zip(entries, others, strict=True):
                assert values == pytest.approx(theirs, abs=1e-4)


def test_a_step_is_launched_before_the_tokens_of_the_last_are_on_the_host(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    engine.core.overlap = True
    events: list[str] = []
    launch, wait = engine.runner.launch, HostCopy.wait

    def launched(plan: StepPlan) -> StepOutput:
        events.append("launch")
        return launch(plan)

    def waited(self: HostCopy) -> list[torch.Tensor]:
        events.append("wait")
        return wait(self)

    monkeypatch.setattr(engine.runner, "launch", launched)
    monkeypatch.setattr(steps.HostCopy, "wait", waited)
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=4, frequency_penalty=0.5, logprobs=1, ignore_eos=True
    )
    run(engine, [([5] * 9, params), ([7] * 3, params)])
    assert events == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


@pytest.mark.parametrize("seed", seeds(6, 12))  # with each of the flags below
def test_random_mixes_are_the_same_overlapped(start: Start, seed: int) -> None:
    requests = mixture(seed)
    flags: dict[str, Any] = {"max_num_batched_tokens": 24} if seed % 3 == 0 else {}
    engine = start(enable_prefix_caching=seed % 2 == 0, **flags)
    in_turn = run(engine, requests)
    engine.core.overlap = True
    assert_same(run(engine, requests), in_turn)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", seeds(3, 6))
def test_padded_steps_on_static_memory_give_the_same(
    start: Start, static_executor: Callable[[], Any], seed: int, overlap: bool
) -> None:
    requests = mixture(seed)
    want = run(start(), requests)
    executor = static_executor()
    engine = start(BUCKETS, executor)
    engine.core.overlap = overlap
    executor.shapes.clear()
    assert_same(run(engine, requests), want)
    assert executor.shapes
    for shape in executor.shapes:
        assert shape.decode.requests in (0, *BUCKETS.decode)
        assert shape.prefill.requests in (0, *BUCKETS.prefill_requests)
        assert shape.prefill.rows in (0, *BUCKETS.prefill_rows)
        assert shape.logits in BUCKETS.logits
        assert {count for _, count in shape.pages} <= set(BUCKETS.pages)
    assert len(set(executor.shapes)) == len(executor.shapes), "a program for each shape, once"


def test_sizes_of_buckets() -> None:
    assert [BUCKETS.padded("decode", n) for n in (0, 1, 3, 16, 17)] == [0, 1, 4, 16, 17]
    assert StepBuckets().padded("pages", 5) == 5
    for wrong in ((0, 1), (2, 2), (4, 3)):
        with pytest.raises(ValueError, match=r"pages of the step buckets are .* ascend from 1"):
            StepBuckets(pages=wrong)


def test_a_plan_is_a_map_of_tensors(start: Start) -> None:
    engine = start()
    plans: list[StepPlan] = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore
    run(engine, [([1, 2, 3], SamplingParams(max_tokens=1))])
    (plan,) = plans
    tensors = plan.tensors()
    assert list(tensors)[-4:] == [
        "block_tables.latent", "block_tables.index", "slots.latent", "slots.index"
    ]  # fmt: skip
    assert tensors["token_ids"] is plan.token_ids
    other = plan.replace_tensors({"token_ids": plan.token_ids + 1, "slots.index": plan.positions})
    assert other.token_ids.tolist() == [2, 3, 4]
    assert other.slots["index"] is plan.positions
    assert other.slots["latent"] is plan.slots["latent"]
    assert other.shape is plan.shape
    with pytest.raises(ValueError, match=r"\['slots.draft'\] are no tensors of a plan"):
        plan.replace_tensors({"slots.draft": plan.positions})


def test_uploads_keep_types_and_shapes() -> None:
    import numpy as np

    arrays = [np.arange(6).reshape(2, 3), np.zeros(0, np.int32), np.ones((1, 2), np.float32)]
    for array, sent in zip(arrays, upload(arrays, torch.device("cpu")), strict=True):
        assert sent.numpy().dtype == array.dtype
        assert sent.shape == array.shape
        assert (sent.numpy() == array).all()


def test_a_step_is_forgotten_once_its_result_is_known(start: Start) -> None:
    """Each takes its tokens from the one before, and none may keep all that were before it."""
    engine = start()
    engine.core.overlap = True
    handles: list[weakref.ref[Any]] = []
    launch = engine.core._runner.launch

    def launched(step: Any) -> Any:
        handle = launch(step)
        handles.append(weakref.ref(handle))
        return handle

    engine.core._runner.launch = launched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.core.add_request("a", [1, 2, 3], params)
    while engine.core.has_work:
        engine.core.step()
        gc.collect()
        assert sum(handle() is not None for handle in handles) <= 2
    assert len(handles) == 12


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", ["draw", "launch", "result"])
def test_a_call_that_was_broken_off_leaves_an_engine_that_serves(
    start: Start, monkeypatch: pytest.MonkeyPatch, overlap: bool, place: str
) -> None:
    """As by Ctrl-C at any point of a step."""
    engine = start()
    engine.core.overlap = overlap
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
    prompts = [[1, 2, 3], [4] * 20]
    want = engine.generate(prompts, params)
    owner, name = {
        "draw": (engine.core._runner._steps._sampler, "draw"),  # type: ignore[attr-defined]
        "launch": (engine.runner, "launch"),
        "result": (steps.HostCopy, "wait"),
    }[place]
    plain, calls = getattr(owner, name), itertools.count(1)

    def broken(*args: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, params)
    assert {pool.used_pages for pool in engine.runner.pools.values()} == {0}
    assert engine.generate(prompts, params) == want
