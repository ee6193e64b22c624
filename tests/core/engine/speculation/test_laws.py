"""The law of what the engine makes with drafts, over a target and a drafter whose laws are known:
each token depends on the one before it alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import DRAFT_SALT, DraftOutput, StepOutput, StepPlan
from ml4core.compose.context import StageContext
from ml4core.compose.ops import COMPOSED
from ml4core.compose.verify import verify_and_sample
from ml4core.engine.block_pool import BlockPool
from ml4core.engine.collectives import SingleRank
from ml4core.engine.core import EngineCore
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.sampler import Sampler
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.scheduler import SchedulerConfig
from ml4core.engine.speculation import Drafting, Speculation
from ml4core.engine.speculative_config import SpeculativeConfig
from ml4core.engine.steps import ModelSteps

VOCAB, LENGTH, DEPTH = 3, 4, 3
ANSWERS, TOGETHER = 36_000, 1_000
FIRST = 0
"""The prompt: one token."""


def table(seed: int) -> Tensor:
    """Logits [VOCAB, VOCAB] of the next token after each one."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.3


class Chain:
    """Runs steps of a target that looks at one token."""

    block_size, vocab_size = 8, VOCAB

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def launch(self, plan: StepPlan) -> StepOutput:
        logits = self.target[plan.token_ids[plan.logits_indices]]
        return StepOutput(logits, (), torch.zeros((), dtype=torch.bool))

    def check(self, failed: Tensor) -> None:
        assert not failed


class Guesses:
    """A drafter that looks at one token."""

    def __init__(self, law: Tensor) -> None:
        self.law = law

    def propose(self, drafting: Drafting) -> DraftOutput:
        previous, sampling = drafting.anchors, drafting.sampling
        ids, logits = [], []
        for i in range(DEPTH):
            logits.append(self.law[previous])
            at = sampling.positions + DRAFT_SALT * (i + 1)
            previous = COMPOSED["sample"](logits[-1], sampling.temperature, sampling.seeds, at)
            ids.append(previous)
        return DraftOutput(torch.stack(ids, 1), torch.stack(logits, 1))


def core_of(target: Tensor, draft: Tensor, config: SpeculativeConfig, overlap: bool) -> EngineCore:
    context: Any = StageContext(None, None, COMPOSED, SingleRank(), torch.float32)  # type: ignore[arg-type]
    judge = verify_and_sample(context, {})
    speculation = Speculation(Guesses(draft), lambda shape: judge, config, VOCAB)
    groups = [KVGroup("latent")]
    kv = KVManager(groups, {"latent": BlockPool("latent", 2 * TOGETHER)}, 8, step_rows=64)
    return EngineCore(
        ModelSteps(Chain(target), Sampler(COMPOSED, VOCAB), speculation),  # type: ignore[arg-type]
        kv,
        SchedulerConfig(TOGETHER, 4 * TOGETHER, drafts=config.num_speculative_tokens),
        vocab_size=VOCAB,
        max_model_len=8,
        overlap=overlap,
    )


def answers(core: EngineCore, count: int, params: SamplingParams) -> Tensor:
    """Tokens [count, LENGTH] of as many requests, with noise of their own each."""
    made: dict[str, list[int]] = {}
    for first in range(0, count, TOGETHER):
        for i in range(first, first + TOGETHER):
            core.add_request(str(i), [FIRST], params)
        while core.has_work:
            for output in core.step():
                made.setdefault(output.request_id, []).extend(output.token_ids)
            if core.cause is not None:
                raise core.cause
    return torch.tensor(list(made.values()))


def law(target: Tensor, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The chance of each run of tokens after the prompt, by plain enumeration."""
    found = {}
    for run in itertools.product(range(VOCAB), repeat=LENGTH):
        chance, last = 1.0, FIRST
        for i, token in enumerate(run):
            chance *= _odds(target[last].tolist(), run[:i], params)[token]
            last = token
        found[run] = chance
    return found


def _odds(logits: Sequence[float], made: Sequence[int], params: SamplingParams) -> list[float]:
    scores = [x - params.frequency_penalty * made.count(i) for i, x in enumerate(logits)]
    odds = torch.softmax(torch.tensor(scores, dtype=torch.float64) / params.temperature, -1)
    if params.top_k:
        least = odds.sort(descending=True).values[params.top_k - 1]
        odds = torch.where(odds >= least, odds, 0.0)
    return (odds / odds.sum()).tolist()


def distance(runs: Tensor, wanted: dict[tuple[int, ...], float], length: int) -> float:
    """Total variation between the first ``length`` tokens seen and their law."""
    cells: dict[tuple[int, ...], float] = {}
    for run, chance in wanted.items():
        cells[run[:length]] = cells.get(run[:length], 0.0) + chance
    code = torch.zeros(len(runs), dtype=torch.int64)
    for column in runs[:, :length].unbind(1):
        code = code * VOCAB + column
    seen = torch.bincount(code, minlength=VOCAB**length) / len(runs)
    return 0.5 * sum(abs(float(s) - p) for s, p in zip(seen, cells.values(), strict=True))


PARAMS = {
    "plain": SamplingParams(temperature=0.8, max_tokens=LENGTH),
    "cut and penalised": SamplingParams(
        temperature=1.2, top_k=2, frequency_penalty=0.8, max_tokens=LENGTH
    ),
}
MODES = list(itertools.product(("greedy", "probabilistic"), ("standard", "block")))
FAST = {
    ("plain", "greedy", "block"),
    ("plain", "probabilistic", "standard"),
    ("cut and penalised", "greedy", "standard"),
    ("cut and penalised", "probabilistic", "block"),
}
"""Each mode once, and each of its two words with either parameters."""


@pytest.mark.parametrize(
    ("params", "method", "rule"),
    [
        pytest.param(name, *mode, marks=() if (name, *mode) in FAST else pytest.mark.slow)
        for name in PARAMS
        for mode in MODES
    ],
)
def test_the_law_is_the_targets(params: str, method: Any, rule: Any) -> None:
    """B058: also with drafts that are drawn. Two tokens, the step from the second to the third,
    and that to the last: each place of a window.
    """
    target, draft = table(1), table(2)
    config = SpeculativeConfig(DEPTH, method, rule)
    overlap = rule == "block"
    core = core_of(target, draft, config, overlap)
    runs = answers(core, ANSWERS, PARAMS[params])
    wanted = law(target, PARAMS[params])
    assert distance(runs, wanted, 2) < 0.01
    for place in (2, 3):
        shifted = runs[:, place - 1 : place + 1]
        cells: dict[tuple[int, ...], float] = {}
        for run, chance in wanted.items():
            key = run[place - 1 : place + 1]
            cells[key] = cells.get(key, 0.0) + chance
        assert distance(shifted, dict(sorted(cells.items())), 2) < 0.01
    other = law(target, SamplingParams(temperature=2.0, max_tokens=LENGTH))
    assert distance(runs, other, 2) > 0.03, "the distance sees no difference"
    counts = core.stats().drafts
    assert counts is not None
    assert 0.02 < counts.acceptance_rate < 0.95


def test_drawn_drafts_judged_by_their_law_are_accepted_more_often_and_blocks_more_still() -> None:
    """B058: with the drafts' law in place of certainty the first place accepts sum(min(p, q))."""
    target, draft = table(1), table(2)
    params = PARAMS["plain"]
    rates = {}
    for rule in ("standard", "block"):
        core = core_of(target, draft, SpeculativeConfig(DEPTH, "probabilistic", rule), False)  # type: ignore[arg-type]
        answers(core, 6_000, params)
        rates[rule] = core.stats().drafts.acceptance_by_position  # type: ignore[union-attr]
    assert rates["block"][1] >= rates["standard"][1] - 0.01
    # The first window stands behind the first token, whose law is known.
    p = torch.softmax(target / params.temperature, -1)
    q = torch.softmax(draft / params.temperature, -1)
    by_law = torch.minimum(p, q).sum(-1)
    certain = (p * torch.nn.functional.one_hot(q.argmax(-1), VOCAB)).sum(-1)
    core = core_of(target, draft, SpeculativeConfig(1, "probabilistic"), False)
    answers(core, 16_000, SamplingParams(temperature=0.8, max_tokens=3))
    first = float((p[FIRST] * by_law).sum())
    counts = core.stats().drafts
    assert counts is not None
    assert counts.accepted_tokens / counts.drafts == pytest.approx(first, abs=0.012)
    core = core_of(target, draft, SpeculativeConfig(1, "greedy"), False)
    answers(core, 16_000, SamplingParams(temperature=0.8, max_tokens=3))
    counts = core.stats().drafts
    assert counts is not None
    first = float((p[FIRST] * certain).sum())
    assert counts.accepted_tokens / counts.drafts == pytest.approx(first, abs=0.012)
