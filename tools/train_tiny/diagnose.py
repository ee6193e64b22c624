"""Why a number is not found: where attention and the indexers look when an answer is told."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.train_tiny.data import Corpus
from tools.train_tiny.model import Step, TinyModel, sharers
from tools.train_tiny.retrieval import DIGITS, USER_END, Needles

Ids = NDArray[np.int64]


def told_at(ids: Ids, answer: slice) -> int:
    """Where the digits stand that `answer` repeats: their first place before it.

    Raises ValueError if they stand nowhere before it.
    """
    wanted = ids[answer]
    before = np.lib.stride_tricks.sliding_window_view(ids[: answer.start], len(wanted))
    found = np.flatnonzero((before == wanted).all(-1))
    if not len(found):
        raise ValueError(f"the number at {answer} is not told before")
    return int(found[0])


def documents(
    needles: Needles, corpus: Corpus, length: int, count: int, seed: int, numbers: int = 4
) -> list[tuple[Tensor, slice, int]]:
    """Made documents of one question each: ids [1, T], the answer's place, where it was told."""
    random = np.random.default_rng(seed)
    source = corpus.part("books").astype(np.int64)
    made = []
    for i in range(count):
        begin = int(random.integers(len(source) - 2 * length))
        filler = source[begin : begin + 2 * length]
        depth = (i + 0.5) / count
        document = needles.document(
            filler[filler > USER_END], length, random, numbers, 1, 0.95 * depth
        )
        (answer,) = document.answers
        told = told_at(document.ids, answer)
        made.append((torch.from_numpy(document.ids).unsqueeze(0), answer, told))
    return made


@torch.no_grad()
def diagnose(
    model: TinyModel,
    needles: Needles,
    corpus: Corpus,
    length: int,
    samples: int,
    dtype: torch.dtype,
    seed: int = 1,
) -> dict[str, Any]:
    """Means over `samples` documents, at the four queries that tell an answer's digits.

    `layer N`: the attention of the best head on the digit that is told next, and on all four
    digits; `owner N`: how often the digit told next is among the indexer's top-k, and how often all
    four are; `found`: numbers told without a fault, with full and with sparse attention.
    """
    device = model.embedding.device
    sums: dict[str, list[list[float]]] = defaultdict(list)
    spec = model.spec
    for ids, answer, told in documents(needles, corpus, length, samples, seed):
        ids = ids.to(device)
        queries = torch.arange(answer.start - 1, answer.start - 1 + DIGITS, device=device)
        digits = torch.arange(told, told + DIGITS, device=device)
        steps: list[Step] = []
        hidden = model(ids[:, :-1], dtype, steps=steps).hidden
        right = [_right(model, hidden, ids, answer)]
        if spec.index_owners:
            hidden = model(ids[:, :-1], dtype, sparse=True).hidden
            right.append(_right(model, hidden, ids, answer))
        sums["found"].append(right)
        at = model.places(ids.shape[1] - 1)
        here = type(at)(at.cos[queries], at.sin[queries], at.log_n[queries])
        for step in steps:
            attention = model.block(step.layer).attention
            q = attention.query(step.normed[:, queries], here)
            scores = torch.einsum("qnd,tnd->nqt", q[0], attention.keys(step.rows)[0]).float()
            hidden_keys = torch.arange(scores.shape[-1], device=device) > queries.unsqueeze(-1)
            odds = (scores * attention.scale).masked_fill(hidden_keys, float("-inf")).softmax(-1)
            on = odds[:, :, digits]  # [N, Q, digits]
            own = on.diagonal(dim1=1, dim2=2).mean(-1).max().item()
            sums[f"layer {step.layer}"].append([own, on.sum(-1).mean(-1).max().item()])
        for owner in spec.index_owners:
            indexer = model.indexer(owner)
            rows = queries.unsqueeze(0)
            scores = indexer.scores(*indexer.forward(steps[owner].normed, at, rows), rows)[0]
            place = (scores.unsqueeze(-2) > scores[:, digits].unsqueeze(-1)).sum(-1)  # [Q, digits]
            inside = (place < indexer.topk).float()
            sums[f"owner {owner} of {list(sharers(spec, owner))}"].append(
                [inside.diagonal().mean().item(), inside.mean().item()]
            )
    return {name: [round(v, 3) for v in np.mean(rows, 0).tolist()] for name, rows in sums.items()}


def _right(model: TinyModel, hidden: Tensor, ids: Tensor, answer: slice) -> float:
    logits = model.logits(hidden[:, answer.start - 1 : answer.stop - 1])
    return float((logits.argmax(-1) == ids[:, answer]).all())
