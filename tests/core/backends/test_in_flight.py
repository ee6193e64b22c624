"""A step in flight, with captured steps on static buffers: the host never waits within a launch,
and what it sends for the next step doesn't reach memory that the running one still reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import StepBuckets, StepOutput, StepPlan, StepShape
from ml4core.engine import steps as steps_module
from ml4core.engine.block_pool import BlockPool
from ml4core.engine.core import EngineCore
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.sampler import Sampler
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.scheduler import SchedulerConfig
from ml4core.engine.steps import ModelSteps, StepInput
from ml4core_triton.executor import GraphExecutor
from support.stream import Stream

VOCAB, PAGE, PAGES = 97, 4, 40
BUCKETS = StepBuckets(decode=(1, 2, 4, 8), verify=(1,), pages=(16,), logits=(1, 2, 4, 8))
TOKENS = 12
PROMPTS = [[5, 6, 7], [90, 1], list(range(20, 33)), [3], [44, 2, 44, 2, 44]]


class NoFault:
    def publish(self) -> None:
        pass


def likely(context: list[int]) -> int:
    """The token after a context: all of it counts, by its place."""
    return sum((token + 1) * (place + 3) for place, token in enumerate(context)) % VOCAB


def forward(weights: object, plan: StepPlan, cache: Tensor) -> StepOutput:
    """The same of a paged cache, with shapes that depend on no data. The last row of the cache
    takes what padding writes.
    """
    slots = plan.slots["latent"]
    cache.index_copy_(0, torch.where(slots < 0, len(cache) - 1, slots), plan.token_ids)
    pages = plan.block_tables["latent"].to(torch.int64)[plan.row_request]
    places = torch.arange(pages.shape[1] * PAGE)
    keys = pages.repeat_interleave(PAGE, 1) * PAGE + places % PAGE
    seen = places < plan.visible.unsqueeze(-1)
    sums = torch.where(seen, (cache[keys] + 1) * (places + 3), 0).sum(-1)
    target = sums[plan.logits_indices].remainder(VOCAB)
    logits = -(torch.arange(VOCAB) - target.unsqueeze(-1)).abs().to(torch.float32)
    return StepOutput(logits, (), torch.zeros((), dtype=torch.bool))


class Runner:
    """A model of one group, run by an executor."""

    block_size, vocab_size, backend = PAGE, VOCAB, "toy"

    def __init__(self, executor: GraphExecutor) -> None:
        self.executor = executor
        self.cache = torch.zeros(PAGES * PAGE + 1, dtype=torch.int64)
        self.programs: dict[StepShape, Callable[..., StepOutput]] = {}

    def launch(self, plan: StepPlan) -> StepOutput:
        program = self.programs.get(plan.shape)
        if program is None:
            program = self.programs[plan.shape] = self.executor.compile(forward, plan.shape)
        return program(self, plan, self.cache)

    def check(self, failed: Tensor) -> None:
        assert not bool(failed)


class Watched:
    """Launches, of which each tells how many times the host waited in it."""

    def __init__(self, steps: ModelSteps, stream: Stream) -> None:
        self.steps, self.stream = steps, stream
        self.waited = 0
        self.ahead = 0  # launches while the step before had not run

    def launch(self, step: StepInput) -> Any:
        before, queued = len(self.stream.waits), bool(self.stream._queue)
        handle = self.steps.launch(step)
        self.waited += len(self.stream.waits) - before
        self.ahead += queued
        return handle


def serve(monkeypatch: pytest.MonkeyPatch, hasty: bool) -> tuple[list[list[int]], Watched, Any]:
    stream = Stream()
    monkeypatch.setattr(steps_module, "HostCopy", stream.copies())
    with torch.inference_mode(), stream:
        executor = GraphExecutor(stream, BUCKETS, NoFault())  # type: ignore[arg-type]
        runner: Any = Runner(executor)
        watched = Watched(ModelSteps(runner, Sampler({"sample": None}, VOCAB)), stream)  # type: ignore[dict-item]
        kv = KVManager(
            [KVGroup("latent")], {"latent": BlockPool("latent", PAGES)}, PAGE, step_rows=64
        )
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
        core = EngineCore(
            watched, kv, config, vocab_size=VOCAB, max_model_len=60, overlap=True, buckets=BUCKETS
        )
        made: dict[str, list[int]] = {}
        waiting = list(enumerate(PROMPTS))
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        while waiting or core.has_work:
            if waiting:  # one after the other, so that batches of many sizes run
                place, prompt = waiting.pop(0)
                core.add_request(str(place), prompt, params)
            for output in core.step():
                made.setdefault(output.request_id, []).extend(output.token_ids)
            assert core.cause is None, core.cause
            if hasty:
                memory = executor._inputs._memory.values()
                stream.hasty = {one.untyped_storage().data_ptr() for one in memory}
    return [made[str(place)] for place in range(len(PROMPTS))], watched, executor


def wanted(prompt: list[int]) -> list[int]:
    context = list(prompt)
    for _ in range(TOKENS):
        context.append(likely(context))
    return context[len(prompt) :]


def test_replays_ahead_of_the_host_give_each_request_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, watched, executor = serve(monkeypatch, hasty=False)
    assert made == [wanted(prompt) for prompt in PROMPTS]
    assert watched.waited == 0, watched.stream.waits
    assert watched.ahead >= TOKENS, "steps are launched while the one before has not run"
    assert len(executor.captures) >= 2


def test_a_host_that_writes_into_the_buffers_of_a_running_step_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _, _ = serve(monkeypatch, hasty=True)
    assert made != [wanted(prompt) for prompt in PROMPTS]
