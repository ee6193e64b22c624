"""Masks of steps: bit for bit on the device, behind each draft, with any other processing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ml4core.compose.ops import COMPOSED
from ml4core.engine.emission import take
from ml4core.engine.grammar_masks import Constraint, constrain, unpack
from ml4core.engine.grammars import GrammarState, Masks, Matcher
from ml4core.engine.request import Request
from ml4core.engine.sampler import Sampler, SamplerRow
from ml4core.engine.sampler_io import SampledToken
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.structured_outputs import StructuredOutputsParams as Form
from ml4core.serving.grammars import LLGrammars
from ml4core.serving.tokenizer import Tokenizer

FORM = Form(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def row(
    grammar: GrammarState | None,
    output: Sequence[int] = (),
    drafts: Sequence[int] = (),
    **kw: float,
) -> SamplerRow:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": None} | kw))  # type: ignore[arg-type]
    return SamplerRow(params, [1], list(output), 5, len(output), frozenset({2}), drafts, grammar)


def bits(masks: Masks) -> NDArray[np.uint8]:
    return np.unpackbits(masks.view(np.uint8), bitorder="little", axis=-1)


def allowed_after(grammars: LLGrammars, ids: Sequence[int]) -> set[int]:
    state = GrammarState(grammars, FORM)
    found = constrain([row(state, ids)])
    assert found is not None
    return set(np.flatnonzero(bits(found.masks)[0]).tolist())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("vocab", [70, 96, 101])
def test_bits_become_infinities(vocab: int) -> None:
    """Of a vocabulary that ends within a word, with one and beyond the tokenizer's."""
    generator = np.random.default_rng(0)
    masks = generator.integers(-(2**31), 2**31, (2, 3), dtype=np.int64).astype(np.int32)
    logits = normal(4, vocab)
    given = logits.clone()
    out = Constraint([1, 3], masks)(logits)
    wanted = np.zeros((2, vocab), bool)
    wanted[:, : min(vocab, 96)] = bits(masks)[:, :vocab] != 0
    assert torch.equal(logits, given), "what comes in is left as it is"
    assert torch.equal(out[[0, 2]], logits[[0, 2]])
    held = out[[1, 3]]
    assert torch.equal(held.isfinite(), torch.from_numpy(wanted))
    assert torch.equal(held[held.isfinite()], logits[[1, 3]][held.isfinite()])
    both = Constraint([0, 1], masks)(logits[:2])
    assert torch.equal(both.isfinite(), torch.from_numpy(wanted))


def test_bits_are_unpacked_alike_everywhere() -> None:
    """On a device by arithmetic, on a cpu by numpy."""
    masks = np.random.default_rng(1).integers(-(2**31), 2**31, (5, 7), dtype=np.int64)
    found = unpack(torch.from_numpy(masks.astype(np.int32)))
    assert found.dtype == torch.bool
    assert np.array_equal(found.numpy(), bits(masks.astype(np.int32)) != 0)


def test_rows_without_a_grammar_cost_nothing() -> None:
    assert constrain([row(None), row(None)]) is None


def test_a_window_follows_its_drafts_and_goes_back(
    grammars: LLGrammars, tokenizer: Tokenizer
) -> None:
    drafts = tokenizer.encode('{"a":')[1:]
    state = GrammarState(grammars, FORM)
    width = len(drafts) + 1
    first = constrain([row(None), row(state, drafts=drafts)], width)
    assert first is not None
    assert first.rows == list(range(width, 2 * width))
    for i in range(width):
        found = set(np.flatnonzero(bits(first.masks)[i]).tolist())
        assert found == allowed_after(grammars, drafts[:i])
    again = constrain([row(state)])  # as though no draft had been accepted
    assert again is not None
    assert np.array_equal(again.masks[0], first.masks[0])
    one = constrain([row(state, drafts[:1], drafts[1:])], width)
    assert one is not None
    assert np.array_equal(one.masks[:2], first.masks[1:3])


def test_behind_a_wrong_draft_nothing_is_asked(grammars: LLGrammars, tokenizer: Tokenizer) -> None:
    good = tokenizer.encode('{"a":')[1:]
    wrong = tokenizer.encode("x")[1]
    found = constrain([row(GrammarState(grammars, FORM), drafts=[good[0], wrong, good[1]])], 4)
    assert found is not None
    assert wrong not in np.flatnonzero(bits(found.masks)[1])
    assert (found.masks[2:] == -1).all()
    logits = found(normal(4, tokenizer.vocab_size))
    assert logits.isfinite().any(-1).all(), "no row without a token, whose law would be NaN"


def test_a_draft_that_the_tokenizer_lacks_may_not_come(
    grammars: LLGrammars, tokenizer: Tokenizer
) -> None:
    """A model's table may be longer, and its drafter draw any of it."""
    good, beyond = tokenizer.encode('{"a":')[1:2], tokenizer.vocab_size + 3
    for drafts in ([beyond, *good], [*good, beyond]):
        state = GrammarState(grammars, FORM)
        found = constrain([row(state, drafts=drafts)], 3)
        assert found is not None
        assert state.error == ""
        at = drafts.index(beyond)
        for i in range(at + 1):
            allowed = set(np.flatnonzero(bits(found.masks)[i]).tolist())
            assert allowed == allowed_after(grammars, drafts[:i])
        assert not found(normal(3, beyond + 5))[at, tokenizer.vocab_size :].isfinite().any()


def test_the_sampler_draws_what_may_come(grammars: LLGrammars, tokenizer: Tokenizer) -> None:
    sampler = Sampler(COMPOSED, tokenizer.vocab_size)
    made: list[int] = []
    heat = {"temperature": 1.0, "top_k": 50, "frequency_penalty": 1.0, "min_p": 0.01}
    states = [GrammarState(grammars, FORM) for _ in range(2)]
    outputs: list[list[int]] = [[], []]
    for step in range(12):
        rows = [row(states[0], outputs[0]), row(None, made), row(states[1], outputs[1], **heat)]
        logits = torch.randn(
            3, tokenizer.vocab_size, generator=torch.Generator().manual_seed(100 + step)
        )
        drawn = [token.token_id for token in sampler(logits, rows)]
        may = allowed_after(grammars, outputs[0])
        best = max(may, key=lambda i: float(logits[0, i]))
        assert drawn[0] == best
        assert drawn[1] == int(logits[1].argmax())
        assert drawn[2] in allowed_after(grammars, outputs[1])
        made.append(drawn[1])
        if tokenizer.eos_id in (drawn[0], drawn[2]):
            break
        outputs[0].append(drawn[0])
        outputs[1].append(drawn[2])


def test_no_end_before_min_tokens_unless_there_is_nothing_else(
    grammars: LLGrammars, tokenizer: Tokenizer
) -> None:
    form = Form(regex="ab*")
    found = constrain([row(GrammarState(grammars, form), tokenizer.encode("a")[1:], min_tokens=5)])
    assert found is not None
    assert 2 not in np.flatnonzero(bits(found.masks)[0])
    done = GrammarState(grammars, Form(choice=("a",)))
    found = constrain([row(done, tokenizer.encode("a")[1:], min_tokens=5)])
    assert found is not None
    assert np.flatnonzero(bits(found.masks)[0]).tolist() == [2]


class _Broken:
    """A matcher that fails, and the compiler it is of."""

    words, eos_id, error = 4, 2, "too hard"

    def accept(self, token_ids: Sequence[int]) -> None: ...

    def check(self, form: Form) -> None: ...

    def matcher(self, form: Form) -> Matcher:
        return self

    def fill(self, work: Sequence[tuple[Matcher, int, Sequence[int]]], masks: Masks) -> None:
        assert not work


def test_a_grammar_that_fails_ends_its_answer_alone() -> None:
    state = GrammarState(_Broken(), FORM)
    found = constrain([row(state)])
    assert found is not None
    assert np.flatnonzero(bits(found.masks)[0]).tolist() == [2]
    params = SamplingParams(max_tokens=9, structured_outputs=FORM)
    request = Request("r", [1], params, 10, stop_ids=frozenset({2}), grammar=state)
    assert take(request, [SampledToken(2, None)])[1] == "error"


def test_the_end_of_a_form_ends_the_answer_before_min_tokens(grammars: LLGrammars) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=5, structured_outputs=FORM)
    state = GrammarState(grammars, FORM)
    request = Request("r", [1], params, 10, stop_ids=frozenset({2}), grammar=state)
    assert take(request, [SampledToken(2, None), SampledToken(7, None)])[1] == "stop"
    assert request.output_ids == [2]


def test_drafts_are_mended_where_the_grammar_leaves_no_other(
    tokenizer: Tokenizer, grammars: LLGrammars
) -> None:
    matcher = grammars.matcher(Form(regex="(abcdefgh|xyz) [0-9]+"))
    one, other = tokenizer.encode("abcdefgh 5")[1:], tokenizer.encode("xyz")[1:]
    assert matcher.mended(other[:1]) == other[:1], "it may come"
    assert matcher.mended([8000]) == [8000], "several may come"
    beyond = tokenizer.vocab_size + 7
    matcher.accept(one[:1])
    for wrong in (8000, beyond, -1):
        found = matcher.mended([wrong, wrong, wrong])
        assert len(found) == 3
        rest = tokenizer.decode(one[:1]) + tokenizer.decode(found[:1])
        assert "abcdefgh ".startswith(rest)
    assert matcher.mended([]) == []
    matcher.accept(one[1:])
    assert not matcher.error, "it stays where it was"
