"""A backend without a model, whose tokens depend on every key that they should have seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from ml4core.api import Fault, FaultError
from ml4core.engine.block_pool import BlockPool
from ml4core.engine.core import EngineCore
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
    """Keys were read when the step was launched; draws are made when they are asked for."""

    contexts: list[list[int]]
    rows: list[SamplerRow]
    fault: Fault | None = None
    done: StepResult | None = None

    def result(self) -> StepResult:
        if self.fault is not None:
            raise FaultError(self.fault)
        if self.done is None:
            tokens = []
            for context, row in zip(self.contexts, self.rows, strict=True):
                assert [*row.prompt_ids, *row.output_ids] == context, "what a sampler would see"
                tokens.append(SampledToken(draw(context, row), None))
            self.done = StepResult(tokens, [])
        return self.done


@dataclass
class NullRunner:
    """Keeps (position, token) in each slot of each group, as a model keeps keys. A draw reads what
    its row sees through the page table and holds it against the row's position: a key that is
    missing, stale or another request's shows at once.
    """

    kv: KVManager
    fail_at: int = 0
    error: BaseException | None = None
    steps: int = 0
    plans: list[Any] = field(default_factory=list)
    keep_plans: bool = False

    def __post_init__(self) -> None:
        size = self.kv.block_size
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
        if step.feed is not None:
            tokens = step.feed.before.result().tokens
            for row, draw_index in zip(step.feed.rows, step.feed.draws, strict=True):
                plan.token_ids[row] = tokens[draw_index].token_id
        ids, positions = plan.token_ids.numpy(), plan.positions.numpy()
        for group in self.kv.groups:
            slots = plan.slots[group.name].numpy()
            assert (slots >= self.kv.block_size).all(), "the null page is never written"
            assert len(set(slots.tolist())) == len(slots)
            self.caches[group.name][slots] = np.stack([positions, ids], -1)
        wanted = plan.logits_indices[step.drawn].tolist() if step.drawn else []
        contexts = [self._context(plan, row) for row in wanted]
        fault = Fault("null", "made to fail", self.steps) if self.steps == self.fail_at else None
        return NullStep(contexts, step.rows, fault)

    def _context(self, plan: Any, row: int) -> list[int]:
        """The tokens that a row sees in the first group; other groups must agree."""
        position, request = int(plan.positions[row]), int(plan.row_request[row])
        size = self.kv.block_size
        whole: list[int] | None = None
        for group in self.kv.groups:
            if not group.required:
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
    **config: Any,
) -> Rig:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16} | config
    sizes = {g.name: blocks if isinstance(blocks, int) else blocks[g.name] for g in groups}
    pools = {name: BlockPool(name, count) for name, count in sizes.items()}
    step_rows = settings["max_num_batched_tokens"] * (2 if overlap else 1)
    kv = KVManager(groups, pools, block_size, step_rows=step_rows, caching=caching)
    runner = NullRunner(kv)
    core = EngineCore(
        runner,
        kv,
        SchedulerConfig(**settings),
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        eos_ids=eos,
        seed=seed,
        overlap=overlap,
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
