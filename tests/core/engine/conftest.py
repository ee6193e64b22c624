"""A backend without a model, whose tokens depend on every key that they should have seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch

from ml4core.api import Fault, FaultError, StepBuckets, StepOutput, StepPlan, StepShape
from ml4core.engine.block_pool import BlockPool
from ml4core.engine.core import EngineCore
from ml4core.engine.feeding import Made, feed_plan
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.outputs import SequenceOutput
from ml4core.engine.sampler_io import SampledToken, SamplerRow
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.scheduler import SchedulerConfig
from ml4core.engine.steps import StepInput, StepResult

VOCAB = 1000
LATENT, INDEX = KVGroup("latent"), KVGroup("index")


def draw(context: Sequence[int], row: SamplerRow) -> int:
    """The token after a context: a hash of it, and of the noise where there is a temperature."""
    noise = (row.seed, row.position) if row.params.temperature else ()
    text = repr((list(context), noise)).encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") % VOCAB


@dataclass
class NullStep:
    """Keys were read when the step was launched; draws are made as late as those of a model."""

    runner: NullRunner
    step: StepInput
    contexts: list[list[list[int]]]  # of each draw, those of its rows
    fault: Fault | None = None
    made: Made | None = None
    emitted: list[list[int]] = field(default_factory=list)

    def settle(self) -> Made:
        if self.made is None:
            step, depth = self.step, self.runner.depth
            drafts = []
            for contexts, row in zip(self.contexts, step.rows, strict=True):
                known, context = [*row.prompt_ids, *row.output_ids], contexts[0]
                if depth:  # an end may have cut the run that the window stands behind
                    context = context[: len(known)]
                assert known == context, "what a sampler would see"
                own = row.window(len(contexts)) if depth else [row]
                tokens: list[int] = []
                for context, one in zip(contexts, own, strict=True):
                    if tokens and context[-1] != tokens[-1]:
                        break  # the draft before was rejected
                    tokens.append(draw(context, one))
                self.emitted.append(tokens)
                drafts.append(self.runner.guess(contexts[0] + tokens, row))
            counts = torch.tensor([len(tokens) for tokens in self.emitted], dtype=torch.int64)
            ids = torch.full((len(counts), 1 + depth), -1)
            for i, tokens in enumerate(self.emitted):
                ids[i, : len(tokens)] = torch.tensor(tokens)
            if depth:
                self.made = Made(ids, counts, torch.tensor(drafts).view(-1, depth))
                self.runner.store_drafts(self)
            else:
                self.made = Made(ids)
        return self.made

    def result(self) -> StepResult:
        if self.fault is not None:
            raise FaultError(self.fault)
        drafts = self.settle().drafts
        tokens = [[SampledToken(token, None) for token in tokens] for tokens in self.emitted]
        return StepResult(tokens, [], () if drafts is None else drafts.tolist())


@dataclass
class NullRunner:
    """Keeps (position, token) in each slot of each group, as a model keeps keys. A draw reads what
    its row sees through the page table and holds it against the row's position: a key that is
    missing, stale or another request's shows at once.

    With ``depth`` it drafts: each draft is what will be drawn with the chance ``skill``. The draft
    group gets the rows of accepted tokens, then a block, and must have every row of its window.
    """

    kv: KVManager
    fail_at: int = 0
    error: BaseException | None = None
    steps: int = 0
    plans: list[Any] = field(default_factory=list)
    keep_plans: bool = False
    depth: int = 0
    skill: float = 0.5
    lacking: int = 0  # rows of a window that a drafter had to do without, after a prefix hit
    last: NullStep | None = None

    def __post_init__(self) -> None:
        size = self.kv.block_size
        self.rng = random.Random(1)
        self.caches = {
            group.name: np.full((self.kv.pools[group.name].blocks * size, 2), -1, np.int64)
            for group in self.kv.groups
        }

    def launch(self, step: StepInput) -> NullStep:
        self.steps += 1
        if self.steps == self.fail_at and self.error is not None:
            raise self.error
        plan = step.plan
        if self.keep_plans:
            self.plans.append(plan)
        if self.last is not None and self.last.fault is None:
            self.last.settle()
        if step.feed is not None:
            assert isinstance(step.before, NullStep)
            feed_plan(plan, step.feed, step.before.settle(), self.kv.block_size, VOCAB)
        ids, positions = plan.token_ids.numpy(), plan.positions.numpy()
        for group in self.kv.groups:
            if group.ahead:
                continue
            slots = plan.slots[group.name].numpy()
            real = plan.visible.numpy() > 0
            assert (slots[~real] == -1).all(), "padding is never written"
            slots = slots[real]
            assert (slots >= self.kv.block_size).all(), "the null page is never written"
            assert len(set(slots.tolist())) == len(slots)
            self.caches[group.name][slots] = np.stack([positions, ids], -1)[real]
        contexts = []
        for i, first in enumerate(step.first_rows):
            rows = range(first, first + step.width) if i in step.windows else [first]
            assert step.drawn[i] < len(plan.logits_indices)
            assert int(plan.logits_indices[step.drawn[i]]) == first
            contexts.append([self._context(plan, r) for r in rows if plan.visible[r] > 0])
        fault = Fault("null", "made to fail", self.steps) if self.steps == self.fail_at else None
        self.last = NullStep(self, step, contexts, fault)
        return self.last

    def guess(self, context: list[int], row: SamplerRow) -> list[int]:
        """Drafts behind a context."""
        found: list[int] = []
        for i in range(self.depth):
            position = len(context) + i - 1
            token = draw(context + found, replace(row, position=position))
            found.append(token if self.rng.random() < self.skill else self.rng.randrange(VOCAB))
        return found

    def store_drafts(self, step: NullStep) -> None:
        """What a drafter does behind a step."""
        made, plan, size = step.made, step.step.plan, self.kv.block_size
        assert made is not None
        assert made.counts is not None
        counts = dict(zip(step.step.requests, made.counts.tolist(), strict=True))
        windows = {step.step.requests[i] for i in step.step.windows}
        for group in (group for group in self.kv.groups if group.ahead):
            cache, table = self.caches[group.name], plan.block_tables[group.name].tolist()
            written = set()
            for row, slot in enumerate(plan.slots[group.name].tolist()):
                request = int(plan.row_request[row])
                offset = row - int(plan.query_start[request])
                if slot < 0 or (request in windows and offset >= counts[request]):
                    continue
                assert slot >= size, "the null page is never written"
                written.add(slot)
                cache[slot] = int(plan.positions[row]), int(plan.token_ids[row])
            for i, (request, tokens) in enumerate(
                zip(step.step.requests, step.emitted, strict=True)
            ):
                context = step.contexts[i][0] + tokens
                anchor = len(context) - 1
                for position in range(anchor, anchor + self.depth):
                    page = table[request][position // size]
                    assert page > 0, "a block has rows of its own"
                    assert page * size + position % size not in written
                    cache[page * size + position % size] = -2, 0
                assert group.window is not None
                for position in range(max(0, anchor - group.window + 1), anchor):
                    page = table[request][position // size]
                    if page == 0:
                        self.lacking += 1
                        continue
                    assert cache[page * size + position % size].tolist() == [
                        position,
                        context[position],
                    ]

    def _context(self, plan: Any, row: int) -> list[int]:
        """The tokens that a row sees in the first group; other groups must agree."""
        position, request = int(plan.positions[row]), int(plan.row_request[row])
        size = self.kv.block_size
        whole: list[int] | None = None
        for group in self.kv.groups:
            if not group.required or group.ahead:
                continue
            first = 0 if group.window is None else max(0, position + 1 - group.window)
            places = np.arange(first, position + 1)
            pages = plan.block_tables[group.name].numpy()[request][places // size]
            assert (pages > 0).all(), f"{group.name}: a key of row {position} is dropped"
            found = self.caches[group.name][pages.astype(np.int64) * size + places % size]
            assert (found[:, 0] == places).all(), f"{group.name}: another request's keys"
            tokens = found[:, 1].tolist()
            if whole is None:
                whole = tokens
            assert whole[first:] == tokens, f"{group.name}: stale keys"
        assert whole is not None
        return whole


@dataclass
class Rig:
    """An engine core over the null runner, and what came out of it."""

    core: EngineCore
    runner: NullRunner
    kv: KVManager
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], str] = field(default_factory=dict)
    last: dict[tuple[str, int], SequenceOutput] = field(default_factory=dict)

    def step(self) -> list[SequenceOutput]:
        outputs = self.core.step()
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.ends, "an output after the end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            self.last[key] = output
            if output.finish_reason is not None:
                self.ends[key] = output.finish_reason
        return outputs

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
            if self.core.cause is not None:
                raise self.core.cause
        raise AssertionError(f"still at work after {limit} steps")

    def assert_empty(self) -> None:
        """No page is held, no reference is left, no slot is taken."""
        for pool in self.kv.pools.values():
            assert pool.used_pages == 0
            assert all(pool.refs(page) == 0 for page in range(pool.blocks))
        assert not self.core.has_work
        assert self.core.stats().running == self.core.stats().waiting == 0


MakeRig = Callable[..., Rig]


def make(
    blocks: int | Mapping[str, int] = 64,
    *,
    groups: Sequence[KVGroup] = (LATENT, INDEX),
    block_size: int = 4,
    caching: bool = False,
    overlap: bool = False,
    max_model_len: int = 200,
    eos: frozenset[int] = frozenset(),
    seed: int = 0,
    buckets: StepBuckets | None = None,
    skill: float = 0.5,
    wrap: Callable[[Any], Any] = lambda runner: runner,
    together: Any = None,
    **config: Any,
) -> Rig:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16} | config
    sizes = {g.name: blocks if isinstance(blocks, int) else blocks[g.name] for g in groups}
    pools = {name: BlockPool(name, count) for name, count in sizes.items()}
    step_rows = settings["max_num_batched_tokens"] * (2 if overlap else 1)
    kv = KVManager(groups, pools, block_size, step_rows=step_rows, caching=caching)
    runner = NullRunner(kv, depth=settings.get("drafts", 0), skill=skill)
    core = EngineCore(
        wrap(runner),
        kv,
        SchedulerConfig(**settings),
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        eos_ids=eos,
        seed=seed,
        overlap=overlap,
        buckets=buckets,
        together=together,
    )
    return Rig(core, runner, kv)


@pytest.fixture
def make_rig() -> MakeRig:
    return make


def expect(
    prompt: Sequence[int], params: SamplingParams, seed: int = 0, stops: Sequence[int] = ()
) -> list[int]:
    """What a request must give, whatever runs beside it."""
    context, made = list(prompt), []
    for _ in range(params.max_tokens or 0):
        row = SamplerRow(params, prompt, made, seed, len(context) - 1)
        token = draw(context, row)
        context.append(token)
        made.append(token)
        if token in stops:
            break
    return made


@pytest.fixture(name="expect")
def expect_fixture() -> Callable[..., list[int]]:
    return expect


class Static:
    """An executor with buffers of its own: a plan is copied into them, and each call spoils what
    the one before has returned, of which the plan may have parts.
    """

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []
        self.given: list[torch.Tensor] = []

    def compile(self, step: Callable[..., StepOutput], shape: StepShape) -> Callable[..., Any]:
        self.shapes.append(shape)
        kept: dict[str, torch.Tensor] = {}

        def call(weights: Any, plan: StepPlan, kv: Any) -> StepOutput:
            if not kept:
                kept.update({name: one.clone() for name, one in plan.tensors().items()})
            for name, tensor in plan.tensors().items():
                kept[name].copy_(tensor)
            for tensor in self.given:
                spoiled = {torch.bool: True, torch.int64: -(2**40)}
                tensor.fill_(spoiled.get(tensor.dtype, float("nan")))
            output = step(weights, plan.replace_tensors(kept), kv)
            self.given = [output.logits, *output.taps, output.fault]
            return output

        return call

    def eager_break(self, function: Any) -> Any:
        return function


@pytest.fixture
def static_executor() -> Callable[[], Static]:
    return Static
