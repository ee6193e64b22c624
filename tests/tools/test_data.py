"""Windows, masks and made documents."""

from __future__ import annotations

import numpy as np
import torch

from tools.train_tiny.data import (
    ANSWER,
    COOLDOWN,
    Batches,
    Corpus,
    assistant_weights,
    made_windows,
    main_windows,
    mixed_windows,
    write_documents,
)

LENGTH = 48


def test_each_pass_covers_a_part_once(corpus):
    begin, end = corpus.parts["books"]
    count = 2 * (end - begin) // LENGTH
    starts = np.sort(main_windows(corpus, 4 * count, LENGTH, seed=3))
    books = starts[(starts >= begin) & (starts < end)]
    seen = np.zeros(end - begin, dtype=int)
    for start in books:
        seen[start - begin : start - begin + LENGTH] += 1
    assert seen[LENGTH:-LENGTH].min() >= 1
    assert seen.max() - seen[LENGTH:-LENGTH].min() <= 2, "passes are even"
    assert starts.max() + LENGTH < len(corpus.tokens)


def test_windows_of_chats_begin_with_a_conversation(corpus):
    starts = mixed_windows(corpus, COOLDOWN, 64, LENGTH, seed=1)
    chats = starts[starts >= corpus.parts["chat_basics"][0]]
    assert len(chats) > 5
    assert (corpus.tokens[chats] == 1).all()
    batches = Batches(corpus, LENGTH, torch.device("cpu"))
    _, targets, weights = batches.window(chats[:3], assistant_only=True)
    assert ((weights > 0) == assistant_weights(*batches.window(chats[:3], False)[:2]).bool()).all()
    first = targets[0][weights[0] > 0]
    assert first[:31].tolist() == corpus.tokens[chats[0] + 12 : chats[0] + 43].tolist()
    assert first[30] == 2


def test_the_assistant_speaks_after_results_too():
    ids = torch.tensor([[1, 3, 70, 4, 71, 2, 7, 72, 8, 7, 73, 8, 74, 2, 3, 75, 4, 76]])
    weights = assistant_weights(ids[:, :-1], ids[:, 1:])
    assert ids[:, 1:][weights > 0].tolist() == [71, 2, 74, 2, 76]


def test_a_made_document_tells_what_it_asks_for(needles):
    random = np.random.default_rng(0)
    filler = np.where(np.arange(300) % 10 == 9, 91, 100)
    for depth in (0.0, 0.5, 1.0):
        made = needles.document(filler, 200, random, 4, 2, depth)
        ids = made.ids.tolist()
        assert 190 <= len(ids) <= 200
        assert ids[-1] == 2
        for place in made.answers:
            key, number = ids[place.start - 1], ids[place]
            told = next(i for i in range(len(ids)) if ids[i : i + 2] == [key, 90])
            assert ids[told + 2 : told + 6] == number
            assert ids[told - 1] in (91, 3), "told after a sentence"
        first = ids.index(90, ids.index(ids[made.answers[0].start - 1]))
        assert abs(first / 160 - depth) < 0.3


def test_windows_are_full_of_made_documents(corpus, needles):
    made = made_windows(corpus, needles, 30, 700, seed=1)
    assert (made[:, :4] == [1, 36, 37, 3]).all()
    documents = (made == 36).sum(1)
    assert set(documents) > {1, 2}, "some windows hold one document, some several"
    batches = Batches(Corpus.of({"retrieval": made.reshape(-1)}), 699, torch.device("cpu"))
    _, targets, weights = batches.window(np.arange(20) * 700, assistant_only=True)
    assert set(weights.unique().tolist()) == {0.0, ANSWER}
    _, _, everywhere = batches.window(np.arange(20) * 700, assistant_only=False)
    assert torch.equal(everywhere > 1, weights > 0)
    assert everywhere.min() == 1
    told = (targets >= 10) & (targets < 20) & (weights > 0)
    assert told.sum() >= 4 * 20
    assert ((weights > 0).sum(1) < 350).all(), "the text between counts nothing"


def test_the_part_of_made_documents_is_the_same_whoever_makes_it(corpus, needles, tmp_path):
    (tmp_path / "bin").mkdir()
    corpus.part("books").tofile(tmp_path / "bin" / "books.train.bin")
    path = write_documents(tmp_path, 4, 300, seed=1, workers=1)
    alone = Corpus.load(tmp_path, parts=("books",))
    expected = made_windows(alone, needles, 4, 300, seed=1_000_003)
    assert np.array_equal(np.fromfile(path, np.uint16).reshape(4, 300), expected)
    assert set(Corpus.load(tmp_path).parts) == {"books", "retrieval"}
