"""Verification of drafts: greedy equality, and the law of the output against the target's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ml4core.compose.ops import COMPOSED, verify

from .support import INF, NAN, Check, Draw, corner_cases

verify_draft, sample = COMPOSED["verify_draft"], COMPOSED["sample"]

VOCAB = 5
DRAWS = 300_000


class Chain:
    """Laws of the next token given the last: target p, drafter q, as logits [vocab, vocab]."""

    def __init__(self, seed: int, sparse: bool = False) -> None:
        draw = Draw(seed)
        self.target, self.draft = draw.normal(VOCAB, VOCAB), draw.normal(VOCAB, VOCAB) * 2
        if sparse:  # each law lacks tokens that the other has
            self.target[:, 1] = -INF
            self.draft[:, 3] = -INF
        self.draw = draw

    def categorical(self, logits: Tensor) -> Tensor:
        return torch.multinomial(torch.softmax(logits, -1), 1, True, generator=self.draw._generator)

    def run(
        self, depth: int, temperature: float, certain: bool, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Emitted ids [count, depth + 1], completed by the target where a run ended early."""
        last = torch.zeros(count, dtype=torch.int64)
        rows, drafts = [self.target[last]], []
        draft_rows = []
        for _ in range(depth):
            draft_rows.append(self.draft[last])
            law = self.draft[last] / temperature
            last = law.argmax(-1) if certain else self.categorical(law).squeeze(-1)
            drafts.append(last)
            rows.append(self.target[last])
        ids, counts = verify_draft(
            torch.stack(rows, 1),
            torch.stack(drafts, 1),
            None if certain else torch.stack(draft_rows, 1),
            torch.full((count,), temperature),
            torch.arange(count),
            torch.full((count,), 100),
        )
        complete = ids.clone()
        for i in range(1, depth + 1):
            fresh = self.categorical(self.target[complete[:, i - 1].clamp(min=0)] / temperature)
            complete[:, i] = torch.where(i < counts, ids[:, i], fresh.squeeze(-1))
        return complete, ids, counts

    def law(self, length: int, temperature: float) -> Tensor:
        """The target's joint law of the first tokens, flat."""
        odds = torch.softmax(self.target.double() / temperature, -1)
        joint = odds[0]
        for _ in range(length - 1):
            joint = joint.unsqueeze(-1) * odds
        return joint.flatten()


def distance(ids: Tensor, law: Tensor) -> float:
    """Total variation between the seen and the true law of ids [n, length]."""
    flat = torch.zeros(ids.shape[0], dtype=torch.int64)
    for column in ids.unbind(1):
        flat = flat * VOCAB + column
    seen = torch.bincount(flat, minlength=law.numel()).double() / ids.shape[0]
    return 0.5 * (seen - law).abs().sum().item()


def check_law(depth: int, temperature: float, certain: bool, sparse: bool = False) -> None:
    chain = Chain(depth, sparse)
    complete, _, counts = chain.run(depth, temperature, certain, DRAWS)
    law = chain.law(2, temperature)
    for start in range(depth):
        pair = complete[:, start : start + 2]
        if start == 0:
            assert distance(pair, law) < 0.01
        else:  # the step from one token to the next, wherever the run ended
            odds = torch.softmax(chain.target.double() / temperature, -1)
            seen = torch.bincount(pair[:, 0], minlength=VOCAB).double() / DRAWS
            assert distance(pair, (seen.unsqueeze(-1) * odds).flatten()) < 0.01
    assert set(counts.tolist()) == set(range(1, depth + 2))


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_law_of_the_output_is_the_targets(depth: int, certain: bool) -> None:
    check_law(depth, 1.3, certain)


@pytest.mark.parametrize("certain", [True, False])
def test_supports_that_differ(certain: bool) -> None:
    check_law(3, 0.8, certain, sparse=True)


def test_acceptance_of_equal_laws_is_certain() -> None:
    chain = Chain(7)
    chain.draft = chain.target
    _, ids, counts = chain.run(3, 0.9, False, 20_000)
    assert (counts == 4).all()
    assert (ids >= 0).all()


def case(depth: int, rows: int = 6, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = Draw(seed)
    logits = draw.normal(rows, depth + 1, 11)
    drafts = logits[:, :-1].argmax(-1)
    return logits, drafts, draw.integers(0, 2**60, rows), draw.integers(0, 2**20, rows)


def greedy_reference(logits: Tensor, drafts: Tensor) -> tuple[list[list[int]], list[int]]:
    ids, counts = [], []
    for r in range(logits.shape[0]):
        out = []
        for i in range(logits.shape[1]):
            out.append(int(logits[r, i].argmax()))
            if i == drafts.shape[1] or out[-1] != int(drafts[r, i]):
                break
        counts.append(len(out))
        ids.append(out + [-1] * (logits.shape[1] - len(out)))
    return ids, counts


def check_greedy(depth: int, with_logits: bool = False) -> None:
    logits, drafts, seeds, positions = case(depth, 9)
    for r in range(9):  # row r has r % (depth + 1) right drafts
        if r % (depth + 1) < depth:
            drafts[r, r % (depth + 1)] = (drafts[r, r % (depth + 1)] + 1) % 11
    draft_logits = Draw(2).normal(9, depth, 11) if with_logits else None
    ids, counts = verify_draft(logits, drafts, draft_logits, torch.zeros(9), seeds, positions)
    want, want_counts = greedy_reference(logits, drafts)
    assert ids.tolist() == want
    assert counts.tolist() == want_counts
    assert ids.dtype == counts.dtype == torch.int64


def greedy_corner() -> None:
    for depth, with_logits in itertools.product((1, 2, 3), (False, True)):
        check_greedy(depth, with_logits)


def depths() -> None:
    for depth in (1, 2, 3):
        check_greedy(depth)
        logits, drafts, seeds, positions = case(depth)
        ids, counts = verify_draft(logits, drafts, None, torch.ones(6), seeds, positions)
        assert ids.shape == (6, depth + 1)
        for row, count in zip(ids.tolist(), counts.tolist(), strict=True):
            assert all(i >= 0 for i in row[:count])
            assert all(i == -1 for i in row[count:])


def test_without_drafts_it_is_sample() -> None:
    logits, _, seeds, positions = case(0)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0, 1.0])
    ids, counts = verify_draft(
        logits, torch.empty(6, 0, dtype=torch.int64), None, temperature, seeds, positions
    )
    assert torch.equal(ids[:, 0], sample(logits[:, 0], temperature, seeds, positions))
    assert counts.tolist() == [1] * 6


def all_accepted() -> None:
    """Certain of every token: all drafts stay, and the last is what ``sample`` draws there."""
    logits, drafts, seeds, positions = case(3)
    certain = torch.full((6, 3, 11), -INF).scatter(-1, drafts.unsqueeze(-1), 0.0)
    logits[:, :3] = certain
    temperature = torch.full((6,), 1.1)
    for draft_logits in (None, certain):
        ids, counts = verify_draft(logits, drafts, draft_logits, temperature, seeds, positions)
        assert counts.tolist() == [4] * 6
        assert torch.equal(ids[:, :3], drafts)
        assert torch.equal(ids[:, 3], sample(logits[:, 3], temperature, seeds, positions + 3))


def none_accepted() -> None:
    """The target can't give the draft: the first token comes from the rest of its law."""
    logits, drafts, seeds, positions = case(2)
    logits[:, 0] = logits[:, 0].scatter(-1, drafts[:, :1], -INF)
    for temperature in (0.0, 1.0):
        ids, counts = verify_draft(
            logits, drafts, None, torch.full((6,), temperature), seeds, positions
        )
        assert counts.tolist() == [1] * 6
        assert (ids[:, 0] != drafts[:, 0]).all()
        assert (ids[:, 1:] == -1).all()


def no_draft() -> None:
    """Draft -1 ends the run: the token is the target's own draw, not one of a residual."""
    logits, drafts, seeds, positions = case(3)
    for temperature in (torch.zeros(6), torch.ones(6)):
        ids, counts = verify_draft(
            logits, torch.full_like(drafts, -1), None, temperature, seeds, positions
        )
        assert counts.tolist() == [1] * 6
        assert torch.equal(ids[:, 0], sample(logits[:, 0], temperature, seeds, positions))
    logits[:, 0] = torch.full((6, 11), -INF).scatter(-1, drafts[:, :1], 0.0)
    drafts[:, 1] = -1
    ids, counts = verify_draft(logits, drafts, None, torch.ones(6), seeds, positions)
    assert counts.tolist() == [2] * 6
    assert torch.equal(ids[:, 1], sample(logits[:, 1], torch.ones(6), seeds, positions + 1))


def test_a_request_does_not_depend_on_its_batch() -> None:
    logits, drafts, seeds, positions = case(3, 40, 3)
    draft_logits = Draw(4).normal(40, 3, 11)
    temperature = Draw(5).uniform(40)
    temperature[::5] = 0
    ids, counts = verify_draft(logits, drafts, draft_logits, temperature, seeds, positions)
    some = slice(11, 19)
    got = verify_draft(
        logits[some],
        drafts[some],
        draft_logits[some],
        temperature[some],
        seeds[some],
        positions[some],
    )
    assert torch.equal(got[0], ids[some])
    assert torch.equal(got[1], counts[some])


def test_an_empty_residual_is_the_targets_own_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may reject a draft though the laws are equal: what was ruled out stays so."""
    logits, drafts, seeds, positions = case(2, 200)
    logits[:, :, 0] = -INF
    none = torch.zeros(200, dtype=torch.int64)
    monkeypatch.setattr(verify, "_accept", lambda *_: (none, torch.ones(200)))
    ids, counts = verify_draft(logits, drafts, logits[:, :-1], torch.ones(200), seeds, positions)
    assert counts.unique().tolist() == [1]
    assert torch.equal(ids[:, 0], sample(logits[:, 0], torch.ones(200), seeds, positions))
    assert (ids[:, 0] != 0).all()


def test_nan_and_drafts_out_of_range() -> None:
    logits, drafts, seeds, positions = case(2)
    logits[:, :, 3] = NAN
    drafts[:3, 0] = 3
    drafts[3:, 0] = 11
    for temperature in (0.0, 1.0):
        ids, counts = verify_draft(
            logits, drafts, None, torch.full((6,), temperature), seeds, positions
        )
        assert counts.tolist() == [1] * 6
        assert ((ids[:, 0] >= 0) & (ids[:, 0] < 11) & (ids[:, 0] != 3)).all()


CORNERS: dict[str, dict[str, Check]] = {
    "verify_draft": {
        "all accepted": all_accepted,
        "none accepted": none_accepted,
        "draft -1": no_draft,
        "depth 1, 2, 3": depths,
        "temperature 0": greedy_corner,
    }
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
