"""The drafter against float64 loops: context rows, windows, the block, the sequential head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ml4core.api import DRAFT_SALT
from ml4core.compose.draft import draft_block
from ml4core.compose.ops import COMPOSED

from .rig import HIDDEN, LAYER, MOE, VOCAB, Rig, check, close, context_of, draft_of, model_of

WINDOW = 6
# Context lengths about the window, about a page of 4, none, and many windows.
LENGTHS = (0, 1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 3, 4, 8, 31)


@pytest.mark.parametrize("mode", ["row", "block"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_at_every_edge_of_the_window(depth: int, mode: str) -> None:
    rig = Rig(draft_of(depth=depth, window_mode=mode, window=WINDOW))
    requests = rig.requests(*LENGTHS)
    check(rig, requests, rig.run(requests))


@pytest.mark.parametrize("mode", ["row", "block"])
@pytest.mark.parametrize("window", [1, 2, 3, 4, None])
def test_windows_as_short_as_the_block(mode: str, window: int | None) -> None:
    rig = Rig(draft_of(layers=2, window=window, window_mode=mode))
    requests = rig.requests(0, 1, 2, 3, 5, 12)
    check(rig, requests, rig.run(requests))


def test_modes_differ_only_past_the_window() -> None:
    outputs = []
    for mode in ("row", "block"):
        rig = Rig(draft_of(window_mode=mode))
        outputs.append(rig.run(rig.requests(WINDOW - 3, WINDOW + 9)).logits)
    same, other = (outputs[0][r] - outputs[1][r] for r in (0, 1))
    assert same.abs().max() < 1e-5
    assert other.abs().max() > 1e-2


def test_later_rows_of_the_block_reach_earlier_ones() -> None:
    rig = Rig(draft_of())
    before = rig.run(rig.requests(5)).logits[0]
    rig.weights.top["mask_embeddings"][1] += 1.0  # of the last row
    after = rig.run(rig.requests(5)).logits[0]
    assert (before[0] - after[0]).abs().max() > 1e-2


VARIANTS: dict[str, dict[str, Any]] = {
    "own vector added": {"anchor_vector": "add"},
    "own vector alone": {"anchor_vector": "replace"},
    "more vectors than rows": {"depth": 2, "mask_rows": 4},
    "one layer": {"layers": 1},
    "head on the residual": {"normed_head_input": False},
    "q-LoRA": {"layer": replace(LAYER, q_lora_rank=9)},
    "experts": {"layer": replace(LAYER, dense_width=None, moe=MOE)},
    "no rope": {"layer": replace(LAYER, rope_dim=0, rope=None)},
    "rope by halves": {"layer": replace(LAYER, rope=replace(LAYER.rope, interleaved=False))},  # type: ignore[type-var]
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants(fields: dict[str, Any]) -> None:
    rig = Rig(draft_of(**fields))
    requests = rig.requests(0, 4, 13)
    check(rig, requests, rig.run(requests))


def test_variants_are_not_the_same() -> None:
    """Else the reference could follow a switch that changes nothing."""

    def logits(**fields: Any) -> torch.Tensor:
        rig = Rig(draft_of(**fields))
        return rig.run(rig.requests(13)).logits

    plain = logits()
    assert (plain - logits(normed_head_input=False)).abs().max() > 1e-2
    added, alone = logits(anchor_vector="add"), logits(anchor_vector="replace")
    assert (added - alone).abs().max() > 1e-2


def test_taps_are_joined_in_the_order_of_the_spec() -> None:
    rig = Rig(draft_of())
    requests = rig.requests(6)
    plan, taps = rig.plan(requests)
    right = rig.call(rig.weights, plan, rig.caches, taps).logits
    swapped = rig.call(rig.weights, plan, rig.caches, [taps[1], taps[0], taps[2]]).logits
    assert (right - swapped).abs().max() > 1e-2


def test_context_rows_and_nothing_else_are_written() -> None:
    rig = Rig(draft_of())
    requests = rig.requests(9, 3)
    before = rig.snapshot()
    output = rig.run(requests, draft=False, rejects=2)
    assert output.ids.shape == (0, 3)
    assert output.logits.shape == (0, 3, VOCAB)
    slots = set()
    for request in requests:
        for layer, rows in enumerate(rig.context(request)):
            for position, row in rows.items():
                slot = request.slot(position, rig.block_size)
                slots.add(slot)
                close(rig.stored_row(layer, slot), row)
    others = [s for s in range(rig.blocks * rig.block_size) if s not in slots]
    for old, cache in zip(before, rig.caches, strict=True):
        assert torch.equal(old.flatten(0, 1)[others], cache.parts[0].flatten(0, 1)[others])
        assert not torch.equal(old, cache.parts[0])


def test_context_stored_in_chunks_and_a_block_without_new_context() -> None:
    whole, parts = Rig(draft_of()), Rig(draft_of())
    wanted = whole.run(whole.requests(11)).logits
    request = parts.requests(11)[0]
    for length in (4, 5, 11):
        request.length = length
        parts.run([request], draft=False)
    plan, taps = parts.plan([request])
    assert plan.context_slots.shape == (0,)
    got = parts.call(parts.weights, plan, parts.caches, taps)
    close(got.logits, wanted)


@pytest.mark.parametrize("mode", ["row", "block"])
def test_many_steps_of_drafting_and_rejecting(mode: str) -> None:
    """Block rows are scratch: the next step's context replaces them, and rejects leave nothing."""
    rig = Rig(draft_of(window_mode=mode))
    requests = rig.requests(2, 7, 5, room=40)
    for step in range(6):
        check(rig, requests, rig.run(requests, rejects=0 if step == 0 else 2))
        for r, request in enumerate(requests):
            request.length += 1 + (step * 2 + r) % 4  # up to 3 accepted, and one token more
            request.anchor = (request.anchor * 5 + step) % VOCAB


def test_rejected_rows_leave_no_trace() -> None:
    results = []
    for junk in (0.0, 1e30, float("nan")):
        rig = Rig(draft_of())
        requests = rig.requests(6, 0, 9)
        for request in requests:
            for tap in request.taps:
                tap[request.length :] = junk
        output = rig.run(requests, rejects=3)
        results.append((output, rig.snapshot()))
    for output, caches in results[1:]:
        assert torch.equal(output.logits, results[0][0].logits)
        for cache, first in zip(caches, results[0][1], strict=True):
            assert torch.equal(cache, first)


@pytest.mark.parametrize("mode", ["row", "block"])
@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_what_no_row_sees_has_no_influence(value: float, mode: str) -> None:
    """Stale bytes below the window, behind the block and in page 0; freed pages read as page 0."""
    results = []
    for poison in (False, True):
        rig = Rig(draft_of(window_mode=mode))
        requests = rig.requests(0, 3, 30)
        rig.run(requests, draft=False)
        if poison:
            seen = {
                request.slot(position, rig.block_size)
                for request in requests
                for position in range(max(0, request.length - WINDOW), request.length)
            }
            for cache in rig.caches:
                flat = cache.parts[0].flatten(0, 1)
                flat[[s for s in range(flat.shape[0]) if s not in seen]] = value
            requests[2].pages[:6] = [0] * 6  # positions 0 to 23
        results.append(rig.run(requests))
    assert torch.equal(results[0].logits, results[1].logits)
    assert torch.equal(results[0].ids, results[1].ids)


def test_no_request_depends_on_its_batch() -> None:
    rig = Rig(draft_of())
    lengths = (4, 0, 17, 9)
    requests = rig.requests(*lengths)
    for request in requests:
        request.temperature = 0.8
    together = rig.run(requests)
    backwards = rig.run(requests[::-1])
    assert torch.equal(together.ids, backwards.ids.flip(0))
    close(backwards.logits.flip(0), together.logits, 2e-6)
    for r, request in enumerate(requests):
        request.stored = 0
        alone = rig.run([request])
        close(alone.logits[0], together.logits[r], 2e-6)
        assert torch.equal(alone.ids[0], together.ids[r])


def test_padding_leaves_no_trace() -> None:
    plain, padded = Rig(draft_of()), Rig(draft_of())
    for cache in padded.caches:
        cache.parts[0][0] = float("nan")  # the null page, which padded requests are given
    wanted = plain.run(plain.requests(5, 14))
    got = padded.run(padded.requests(5, 14), pad_rows=7, pad_requests=3, pages=12)
    close(got.logits[:2], wanted.logits, 2e-6)
    assert torch.equal(got.ids[:2], wanted.ids)
    assert torch.isfinite(got.logits).all()
    assert ((got.ids >= 0) & (got.ids < VOCAB)).all()
    for ours, theirs in zip(plain.snapshot(), padded.snapshot(), strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=2e-6, atol=2e-6)
        assert theirs[0].isnan().all(), "the null page was written"


def test_a_batch_of_padding_alone() -> None:
    rig = Rig(draft_of())
    before = rig.snapshot()
    output = rig.run([], pad_rows=4, pad_requests=2)
    assert torch.isfinite(output.logits).all()
    for old, new in zip(before, rig.snapshot(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("dtype", "layout", "bound"),
    [(torch.float32, "bf16", 0.03), (torch.bfloat16, "bf16", 0.08), (torch.bfloat16, "fp32", 0.08)],
)
def test_narrow_numbers_stay_near(dtype: torch.dtype, layout: str, bound: float) -> None:
    rig = Rig(draft_of(), dtype, layout)
    requests = rig.requests(0, 9, 21)
    output = rig.run(requests)
    assert output.logits.dtype == torch.float32
    check(rig, requests, output, bound)


def test_the_head_runs_in_float32_whatever_the_dtype() -> None:
    """A state that lost bits at each step would drift: here the input of the head is the same."""
    from ml4core.compose.draft import BlockDrafter

    rig = Rig(draft_of(), torch.bfloat16)
    drafter = BlockDrafter(context_of(rig.draft, torch.bfloat16))
    states = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    tokens = [[3, 30], [8, 1], [20, 20], [5, 36]]
    state = drafter.head_init(states.unsqueeze(1))
    assert state.dtype == torch.float32
    for step, previous in enumerate(tokens):
        share, state = drafter.head_step(rig.weights, torch.tensor(previous), states, state)
        assert share.dtype == state.dtype == torch.float32
        for r in range(2):
            want = _head(rig, states[r], [past[r] for past in tokens[: step + 1]])
            close(share[r], want, 1e-6)


def _head(rig: Rig, state_in: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """The head's share after `tokens`, from the definition, at one hidden state."""
    top, rank = rig.reference.top, rig.draft.markov_rank
    s = torch.zeros(rank, dtype=torch.float64)
    share = torch.zeros(0)
    for token in tokens:
        z = torch.cat([s, top["markov_w1"][token], state_in.double()])
        g, c, o = (top["markov_joint"] @ z + top["markov_joint_bias"]).split(rank)
        s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
        share = top["markov_w2"] @ torch.tanh(o)
    return share


def test_greedy_ties_go_to_the_lowest_id() -> None:
    rig = Rig(draft_of())
    for name in ("output", "markov_w2"):
        rig.weights.top[name].data.zero_()
    assert rig.run(rig.requests(3, 8)).ids.tolist() == [[0, 0, 0]] * 2


def test_draws_follow_the_logits_that_are_returned() -> None:
    """The joint law of two drafts, and B058: the verifier is given what the drafts came from."""
    vocab, count, temperature = 5, 20_000, 1.4
    draft = draft_of(depth=2, layers=1, vocab_size=vocab)
    rig = Rig(draft, block_size=2, blocks=count + 1)
    request = rig.requests(0)[0]
    requests = [
        replace(request, pages=[n + 1], seed=n, temperature=temperature, anchor=2)
        for n in range(count)
    ]
    ids, logits = rig.run(requests)
    odds = torch.softmax(logits.double() / temperature, -1)
    for first in range(vocab):  # all rows are alike but for the token before
        rows = odds[ids[:, 0] == first]
        assert (rows - rows[0]).abs().max() < 1e-5
    law = torch.zeros(vocab, vocab, dtype=torch.float64)
    for first in range(vocab):
        law[first] = odds[0, 0, first] * odds[ids[:, 0] == first][0, 1]
    seen = torch.bincount(ids[:, 0] * vocab + ids[:, 1], minlength=vocab**2) / count
    assert 0.5 * (seen - law.flatten()).abs().sum() < 0.02
    greedy = rig.run([replace(request, pages=[1], anchor=2)])
    assert greedy.ids[0, 0] == odds[0, 0].argmax()


def test_drafts_share_no_noise_with_the_target() -> None:
    rig = Rig(draft_of())
    requests = rig.requests(*range(12))
    for request in requests:
        request.temperature = 50.0  # nearly uniform: the noise decides
    ids, logits = rig.run(requests)
    temperature = torch.full((12,), 50.0)
    seeds = torch.tensor([request.seed for request in requests])
    positions = torch.tensor([request.length for request in requests])
    for i in range(3):
        own = COMPOSED["sample"](logits[:, i], temperature, seeds, positions + DRAFT_SALT * (i + 1))
        targets = COMPOSED["sample"](logits[:, i], temperature, seeds, positions + i)
        assert torch.equal(ids[:, i], own)
        assert (ids[:, i] == targets).sum() <= 4


def test_what_does_not_fit_is_refused() -> None:
    rig = Rig(draft_of())
    plan, taps = rig.plan(rig.requests(4))
    with pytest.raises(ValueError, match="2 draft caches for 3 draft layers"):
        rig.call(rig.weights, plan, rig.caches[:2], taps)
    with pytest.raises(ValueError, match=r"there must be 3, after the target's layers \(0, 3, 2\)"):
        rig.call(rig.weights, plan, rig.caches, taps[:2])
    with pytest.raises(ValueError, match="a row for each of context_slots"):
        rig.call(rig.weights, plan, rig.caches, [tap[1:] for tap in taps])
    with pytest.raises(ValueError, match=r"slots has shape \(1, 2\); it must be \(1, 3\)"):
        rig.call(rig.weights, plan._replace(slots=plan.slots[:, :2]), rig.caches, taps)
    with pytest.raises(ValueError, match=r"'small' has no drafter"):
        draft_block(context_of(None), {})
    assert model_of(None).draft is None
