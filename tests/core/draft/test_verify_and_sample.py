"""Sampling and verification as a stage: what is emitted at temperature 0, and its law above."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import Sampling, Verifier
from ml4core.compose.ops import COMPOSED
from ml4core.compose.verify import verify_and_sample

from .rig import Rig, context_of, draft_of

VOCAB, DRAWS = 4, 200_000
verify: Verifier = verify_and_sample(context_of(None), {})


def sampling_of(temperature: float, count: int, first: int = 0) -> Sampling:
    return Sampling(
        torch.full((count,), temperature),
        torch.arange(first, first + count),
        torch.full((count,), 50),
    )


class Chain:
    """Laws of the next token given the last one: the target's and a drafter's, as logits."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.target = torch.randn(VOCAB, VOCAB, generator=self.generator) * 1.5
        self.draft = torch.randn(VOCAB, VOCAB, generator=self.generator) * 1.5

    def pick(self, logits: Tensor) -> Tensor:
        odds = torch.softmax(logits, -1)
        return torch.multinomial(odds, 1, True, generator=self.generator).squeeze(-1)

    def emitted(self, depth: int, temperature: float, certain: bool) -> Tensor:
        """Emitted tokens [DRAWS, depth + 1] after token 0, drawn from the target where a run
        ended.
        """
        last = torch.zeros(DRAWS, dtype=torch.int64)
        rows, ids, logits = [self.target[last]], [], []
        for _ in range(depth):
            logits.append(self.draft[last])
            last = logits[-1].argmax(-1) if certain else self.pick(logits[-1] / temperature)
            ids.append(last)
            rows.append(self.target[last])
        found = verify(
            torch.stack(rows, 1).flatten(0, 1),
            sampling_of(temperature, DRAWS),
            torch.stack(ids, 1),
            None if certain else torch.stack(logits, 1),
        )
        assert set(found.counts.tolist()) == set(range(1, depth + 2))
        out = found.ids.clone()
        for i in range(1, depth + 1):
            fresh = self.pick(self.target[out[:, i - 1].clamp(min=0)] / temperature)
            out[:, i] = torch.where(i < found.counts, out[:, i], fresh)
        return out

    def law(self, length: int, temperature: float) -> dict[tuple[int, ...], float]:
        """The target's probability of every run of tokens after token 0."""
        odds = torch.softmax(self.target.double() / temperature, -1)
        law = {}
        for run in itertools.product(range(VOCAB), repeat=length):
            chance, last = 1.0, 0
            for token in run:
                chance *= float(odds[last, token])
                last = token
            law[run] = chance
        return law


def distance(runs: Tensor, law: dict[tuple[int, ...], float]) -> float:
    """Total variation between runs that were seen [n, length] and a law."""
    code = torch.zeros(runs.shape[0], dtype=torch.int64)
    for column in runs.unbind(1):
        code = code * VOCAB + column
    seen = torch.bincount(code, minlength=len(law)) / runs.shape[0]
    return 0.5 * sum(abs(float(s) - p) for s, p in zip(seen, law.values(), strict=True))


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_law_is_the_targets(depth: int, certain: bool) -> None:
    chain = Chain(depth)
    runs = chain.emitted(depth, 0.8, certain)
    assert distance(runs[:, :2], chain.law(2, 0.8)) < 0.01
    assert distance(runs[:, :2], chain.law(2, 1.2)) > 0.02, "the distance sees no difference"
    odds = torch.softmax(chain.target.double() / 0.8, -1)
    for i in range(2, depth + 1):  # the step from each token to the next
        before = torch.bincount(runs[:, i - 1], minlength=VOCAB).double() / DRAWS
        pairs = itertools.product(range(VOCAB), repeat=2)
        law = {(a, b): float(before[a] * odds[a, b]) for a, b in pairs}
        assert distance(runs[:, i - 1 : i + 1], law) < 0.01


def test_greedy_drafts_with_their_logits_would_be_biased() -> None:
    """Why greedy drafts go without: a draft that was not drawn from q must not be judged by q."""
    chain = Chain(1)
    last = torch.zeros(DRAWS, dtype=torch.int64)
    draft = chain.draft[last]
    ids = draft.argmax(-1)
    rows = torch.stack([chain.target[last], chain.target[ids]], 1).flatten(0, 1)
    wrong = verify(rows, sampling_of(1.0, DRAWS), ids.unsqueeze(1), draft.unsqueeze(1))
    right = verify(rows, sampling_of(1.0, DRAWS), ids.unsqueeze(1))
    assert distance(wrong.ids[:, :1], chain.law(1, 1.0)) > 0.03
    assert distance(right.ids[:, :1], chain.law(1, 1.0)) < 0.01


@pytest.mark.parametrize(("with_logits", "share"), [(True, 0.6), (False, 0.3)])
def test_acceptance_of_drawn_drafts(with_logits: bool, share: float) -> None:
    """B058: sum(min(p, q)) if the verifier is given q, sum(p q) if a draft counts as certain."""
    p, q = torch.tensor([0.2, 0.5, 0.3]).log(), torch.tensor([0.6, 0.3, 0.1]).log()
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(q.exp(), DRAWS, True, generator=generator).unsqueeze(1)
    logits = q.expand(DRAWS, 1, 3) if with_logits else None
    rows = p.expand(2 * DRAWS, 3)
    found = verify(rows, sampling_of(1.0, DRAWS), ids, logits)
    assert abs(float((found.counts - 1).float().mean()) - share) < 0.005
    seen = torch.bincount(found.ids[:, 0], minlength=3) / DRAWS
    assert 0.5 * (seen - p.exp()).abs().sum() < 0.01


def greedy(rows: list[list[float]], drafts: list[int]) -> list[int]:
    """What decoding token by token emits, as long as the drafts are what it emits."""
    out = []
    for i, row in enumerate(rows):
        out.append(row.index(max(row)))
        if i == len(drafts) or out[-1] != drafts[i]:
            break
    return out


@pytest.mark.parametrize("with_logits", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_temperature_0_equals_argmax(depth: int, with_logits: bool) -> None:
    generator = torch.Generator().manual_seed(depth)
    rows = torch.randint(0, 4, (40, depth + 1, 9), generator=generator).float()  # with ties
    drafts = torch.tensor([[row.tolist().index(max(row.tolist())) for row in r] for r in rows])
    drafts = drafts[:, :-1].clone()
    for r in range(40):
        if (wrong := r % (depth + 2)) < depth:
            drafts[r, wrong] = -1 if r % 2 else (drafts[r, wrong] + 1) % 9
    logits = torch.randn(40, depth, 9, generator=generator) if with_logits else None
    found = verify(rows.flatten(0, 1), sampling_of(0.0, 40), drafts, logits)
    for r in range(40):
        want = greedy(rows[r].tolist(), drafts[r].tolist())
        assert int(found.counts[r]) == len(want)
        assert found.ids[r].tolist() == want + [-1] * (depth + 1 - len(want))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_drafts_it_samples(temperature: float) -> None:
    logits = torch.randn(30, 9, generator=torch.Generator().manual_seed(1))
    sampling = sampling_of(temperature, 30)
    found = verify(logits, sampling)
    assert found.ids.shape == (30, 1)
    assert torch.equal(found.ids[:, 0], COMPOSED["sample"](logits, *sampling))
    assert found.counts.tolist() == [1] * 30
    if temperature == 0:
        assert torch.equal(found.ids[:, 0], logits.argmax(-1))


def test_a_request_with_no_draft_in_a_window_draws_what_it_would_draw_alone() -> None:
    rows = torch.randn(12, 9, generator=torch.Generator().manual_seed(2))
    sampling = sampling_of(1.1, 3)
    found = verify(rows, sampling, torch.full((3, 3), -1), torch.randn(3, 3, 9))
    assert found.counts.tolist() == [1, 1, 1]
    assert torch.equal(found.ids[:, :1], verify(rows[::4], sampling).ids)


def test_no_request_depends_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, drafts = torch.randn(24, 9, generator=generator), torch.randint(0, 9, (6, 3))
    logits = torch.randn(6, 3, 9, generator=generator)
    sampling = Sampling(
        torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0, 1.0]), torch.arange(6), torch.arange(6) * 10
    )
    together = verify(rows, sampling, drafts, logits)
    for r in range(6):
        one = Sampling(*(part[r : r + 1] for part in sampling))
        alone = verify(rows[4 * r : 4 * r + 4], one, drafts[r : r + 1], logits[r : r + 1])
        assert torch.equal(alone.ids[0], together.ids[r])
        assert alone.counts[0] == together.counts[r]


def test_drafter_and_verifier_together_keep_the_targets_law() -> None:
    """The drafter's own draws, judged with the same seeds: proposal and verdict are independent."""
    count = 60_000
    rig = Rig(draft_of(depth=2, layers=1, vocab_size=VOCAB), block_size=2, blocks=count + 1)
    request = rig.requests(0)[0]
    request.temperature, request.anchor = 1.0, 0
    plan, taps = rig.plan([request])
    page = torch.arange(1, count + 1).unsqueeze(1)
    wide = plan._replace(
        anchors=plan.anchors.repeat(count),
        slots=page * 2 + torch.arange(2),
        block_table=page.to(torch.int32),
        sampling=Sampling(torch.ones(count), torch.arange(count), torch.zeros(count).long()),
    )
    drafts = rig.call(rig.weights, wide, rig.caches, taps)
    chain = Chain(9)
    last = torch.cat([wide.anchors.unsqueeze(1), drafts.ids], dim=1)
    found = verify(chain.target[last].flatten(0, 1), wide.sampling, *drafts)
    out = found.ids.clone()
    fresh = chain.pick(chain.target[out[:, 0]])
    out[:, 1] = torch.where(found.counts > 1, out[:, 1], fresh)
    assert distance(out[:, :2], chain.law(2, 1.0)) < 0.01
    assert 0.1 < float((found.counts > 1).float().mean()) < 0.9


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("11 rows of logits for 3 requests with 3 drafts each; it must be 12", {"rows": 11}),
    ("12 rows of logits for 3 requests with 0 drafts each; it must be 3", {"ids": None}),
    (r"draft_ids has shape \[2, 3\]; for 3 requests", {"ids": torch.zeros(2, 3).long()}),
    (r"draft_logits has shape \[3, 2, 9\]", {"logits": torch.zeros(3, 2, 9)}),
    ("draft_logits were given without draft_ids", {"ids": None, "logits": torch.zeros(3, 3, 9)}),
]


@pytest.mark.parametrize(("message", "change"), WRONG)
def test_what_does_not_belong_together_is_refused(message: str, change: dict[str, Any]) -> None:
    given = {"rows": 12, "ids": torch.zeros(3, 3).long(), "logits": None} | change
    with pytest.raises(ValueError, match=message):
        verify(torch.zeros(given["rows"], 9), sampling_of(1.0, 3), given["ids"], given["logits"])
