"""What a model has learned: loss by part, retrieval by depth, accepted drafts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tools.train_tiny.data import Batches, Corpus
from tools.train_tiny.draft import Drafter
from tools.train_tiny.layers import rows_of
from tools.train_tiny.model import TinyModel, token_loss
from tools.train_tiny.own_words import Words, spoken
from tools.train_tiny.retrieval import DIGITS, USER_END, Needles

DEPTHS = 10
TOKENS_TOGETHER = 16_384
"""Of the documents that are read at a time."""


@torch.no_grad()
def valid_loss(
    model: TinyModel,
    corpus: Corpus,
    part: str,
    length: int,
    dtype: torch.dtype,
    *,
    sparse: bool = False,
    batch: int = 16,
    limit: int | None = None,
) -> float:
    """Nats a token over windows of `length` that do not overlap; of chats, the assistant's words.

    `limit`: windows at most.
    """
    device = model.embedding.device
    batches = Batches(corpus, length, device)
    begin, end = corpus.parts[part]
    starts = np.arange(begin, max(begin + 1, min(end, len(corpus.tokens) - 1) - length + 1), length)
    starts = starts[starts + length < len(corpus.tokens)][:limit]
    total = count = 0.0
    for i in range(0, len(starts), batch):
        ids, targets, weights = batches.window(starts[i : i + batch], part.startswith("chat_"))
        out = model(ids, dtype, sparse=sparse)
        some, number = token_loss(out.hidden, model.output, targets, weights)
        total, count = total + some.item(), count + number.item()
    return round(total / max(1.0, count), 4)


@torch.no_grad()
def retrieval(
    model: TinyModel,
    corpus: Corpus,
    needles: Needles,
    length: int,
    depth: int,
    dtype: torch.dtype,
    *,
    sparse: bool = False,
    samples: int = 20,
    seed: int = 1,
    numbers: int = 4,
) -> float:
    """The share of documents, with the number at one of DEPTHS depths, that it is told of without
    a fault.
    """
    random = np.random.default_rng((seed, depth))
    device = model.embedding.device
    source = corpus.part("books").astype(np.int64)
    documents = []
    for _ in range(samples):
        begin = int(random.integers(len(source) - 2 * length))
        filler = source[begin : begin + 2 * length]
        filler = filler[filler > USER_END]
        place = depth / (DEPTHS - 1)
        documents.append(needles.document(filler, length, random, numbers, 1, place))
    right = 0
    together = max(1, TOKENS_TOGETHER // length)
    for i in range(0, samples, together):
        some = documents[i : i + together]
        # Causal: what fills up the shorter ones stands behind all that counts.
        ids = pad_sequence([torch.from_numpy(d.ids) for d in some], batch_first=True).to(device)
        hidden = model(ids[:, :-1], dtype, sparse=sparse).hidden
        starts = torch.tensor([d.answers[0].start for d in some], device=device)
        digits = starts.unsqueeze(-1) + torch.arange(DIGITS, device=device)
        # The state before a digit tells it.
        told = model.logits(rows_of(hidden, digits - 1)).argmax(-1)
        right += int((told == ids.gather(1, digits)).all(-1).sum().item())
    return right / samples


def prompts(
    corpus: Corpus, part: str, count: int, length: int, opening: int = 48, room: int = 96
) -> tuple[Tensor, Tensor]:
    """ids [n, length + room] that begin with the first words of `count` texts of a part, and how
    many words those are, [n].

    Of chats: up to where the assistant begins, if that is within `length`.
    """
    tokens = corpus.part(part).astype(np.int64)
    rows: list[np.ndarray] = []
    for start in np.flatnonzero(tokens == 1):
        piece = tokens[start : start + length]
        if part.startswith("chat_"):
            ends = np.flatnonzero(piece == USER_END)
            if not len(ends):
                continue
            piece = piece[: ends[0] + 1]
        else:
            piece = piece[:opening]
        rows.append(piece)
        if len(rows) == count:
            break
    sizes = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(sizes.max()) + room, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
    return ids, sizes


@torch.no_grad()
def acceptance(
    model: TinyModel, drafter: Drafter, words: Words, dtype: torch.dtype
) -> tuple[float, list[float]]:
    """Mean tokens a step, the target's own included, on its greedy `words`; and how often each
    position of a block was accepted. Nothing counts after an end token.
    """
    depth = drafter.spec.depth
    ids = words.ids
    taps = model(ids, dtype, taps=drafter.spec.taps).taps
    last = ids.shape[1] - depth
    anchors = torch.arange(int(words.prompts.min()), last, device=ids.device)
    anchors = anchors.expand(ids.shape[0], -1)
    blocks = drafter.blocks(model.embedding, taps, ids, anchors)
    logits = drafter.logits(blocks, model.output, None, ids.gather(1, anchors))
    offsets = torch.arange(1, depth + 1, device=ids.device)
    text = ids[:, (anchors[0].unsqueeze(-1) + offsets)]
    matches = (logits.argmax(-1) == text).long().cumprod(-1).sum(-1)
    steps = emitted = 0
    by_position = [0] * depth
    said = spoken(words).sum(-1).long().tolist()
    for row, prompt, count in zip(matches.tolist(), words.prompts.tolist(), said, strict=True):
        place = prompt
        end = min(prompt + count - 1, last)  # the last word has none behind it to be drafted
        while place < end:
            right = min(row[place - int(anchors[0, 0])], end - place)
            steps += 1
            emitted += right + 1
            for i in range(right):
                by_position[i] += 1
            place += right + 1
    return emitted / max(1, steps), [n / max(1, steps) for n in by_position]
