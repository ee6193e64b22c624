"""What is measured of a model, and what it says itself."""

from __future__ import annotations

import math

import pytest
import torch

from tools.train_tiny.draft import Drafter
from tools.train_tiny.evaluate import acceptance, prompts, retrieval, valid_loss
from tools.train_tiny.generate import continued
from tools.train_tiny.model import TinyModel
from tools.train_tiny.own_words import Words, own_words, spoken

LENGTH = 48


def test_losses_are_measured(shape, corpus, needles):
    torch.manual_seed(0)
    model = TinyModel(shape.model).requires_grad_(False)
    loss = valid_loss(model, corpus, "books", LENGTH, torch.float32, limit=3)
    assert loss == pytest.approx(math.log(256), abs=0.3)
    found = retrieval(model, corpus, needles, 200, 3, torch.float32, sparse=True, samples=3)
    assert found == 0.0, "an untrained model knows no number"


def test_a_model_that_copies_finds_every_number(shape, corpus, needles, monkeypatch):
    model = TinyModel(shape.model).requires_grad_(False)
    documents: list[torch.Tensor] = []

    def forward(ids, dtype, sparse):
        documents.append(ids)
        return type("Output", (), {"hidden": ids.roll(-1, 1)})

    def logits(next_ids):
        return torch.nn.functional.one_hot(next_ids, 256).float()

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(model, "logits", logits)
    assert retrieval(model, corpus, needles, 200, 9, torch.float32, samples=5) == 1.0
    assert sum(map(len, documents)) == 5


def test_cached_continuations_equal_those_of_whole_sequences(shape, scramble):
    torch.manual_seed(0)
    model = TinyModel(shape.model).requires_grad_(False)
    scramble(model, 1)
    ids = torch.randint(0, 256, (3, 40))
    sizes = torch.tensor([5, 9, 30])
    whole = continued(model, ids, sizes, torch.float32)
    said = model.logits(model(whole).hidden)[:, :-1].argmax(-1)
    for row, size in enumerate(sizes.tolist()):
        assert torch.equal(whole[row, :size], ids[row, :size])
        assert torch.equal(whole[row, size:], said[row, size - 1 :])


def test_hot_continuations_are_drawn_as_the_logits_say(shape):
    torch.manual_seed(0)
    model = TinyModel(shape.model).requires_grad_(False)
    with torch.no_grad():
        model.output.mul_(30)
    count = 4000
    ids = torch.full((count, 3), 70)
    heat = torch.full((count,), 0.7)
    noise = torch.Generator().manual_seed(0)
    whole = continued(model, ids, torch.full((count,), 2), torch.float32, heat, noise)
    odds = (model.logits(model(ids[:1, :2]).hidden)[0, -1] / 0.7).softmax(-1)
    seen = torch.bincount(whole[:, 2], minlength=256) / count
    assert odds.max() > 0.02
    assert 0.5 * (odds - seen).abs().sum() < 0.5 * (256 / count) ** 0.5


def test_own_words_count_up_to_their_end(shape, corpus):
    model = TinyModel(shape.model).requires_grad_(False)
    words = own_words(model, corpus, 10, LENGTH, 3, torch.float32)
    again = own_words(model, corpus, 10, LENGTH, 3, torch.float32)
    assert torch.equal(words.ids, again.ids)
    assert words.ids.shape == (10, LENGTH + 1)
    chat = [1, 3, 70, 2, 4, 80, 81, 2, 5, 2]
    ids = torch.tensor([chat, list(range(70, 80))])
    counted = spoken(Words(ids, torch.tensor([5, 8])))
    assert ids[0, 1:][counted[0] > 0].tolist() == [80, 81, 2]
    assert ids[1, 1:][counted[1] > 0].tolist() == [78, 79]


def test_prompts_end_where_the_model_begins(corpus):
    ids, sizes = prompts(corpus, "chat_basics", 5, 30, room=10)
    assert ids.shape == (5, int(sizes.max()) + 10)
    assert (ids.gather(1, sizes.unsqueeze(-1) - 1) == 4).all()


def test_accepted_drafts_are_counted_up_to_the_end(shape, corpus):
    torch.manual_seed(0)
    model = TinyModel(shape.model).requires_grad_(False)
    drafter = Drafter(shape.draft).requires_grad_(False)
    sizes = torch.full((2,), 8)
    whole = continued(model, torch.full((2, 28), 70), sizes, torch.float32)
    length, shares = acceptance(model, drafter, Words(whole, sizes), torch.float32)
    assert length == pytest.approx(1 + sum(shares))
    assert sorted(shares, reverse=True) == shares


def test_a_drafter_that_is_always_right_is_accepted_whole(shape, monkeypatch):
    model = TinyModel(shape.model).requires_grad_(False)
    drafter = Drafter(shape.draft).requires_grad_(False)
    ids = torch.arange(100, 130).repeat(2, 1)
    ids[1, 17] = 2

    def logits(blocks, output, previous, first):
        following = first.unsqueeze(-1) + torch.arange(1, 4)
        return torch.nn.functional.one_hot(following, 256).float()

    monkeypatch.setattr(drafter, "logits", logits)
    words = Words(ids, torch.tensor([8, 8]))
    # Steps of 4 as far as a block has room; then of 4, 4, and 1, the end that was not drafted.
    assert acceptance(model, drafter, words, torch.float32)[0] == pytest.approx(29 / 8)
    wrong = Words(ids.flip(1), torch.tensor([8, 8]))
    assert acceptance(model, drafter, wrong, torch.float32)[0] == 1.0
