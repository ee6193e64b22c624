"""What the target itself says: the text that a drafter has to foresee."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.train_tiny import state
from tools.train_tiny.data import TOOL_RESULTS_END, Corpus
from tools.train_tiny.generate import continued
from tools.train_tiny.model import TinyModel
from tools.train_tiny.retrieval import BEGIN, END, USER_END

SHARES: Mapping[str, float] = MappingProxyType(
    {
        "books": 0.12,
        "children": 0.18,
        "synth_stories": 0.08,
        "chat_tools": 0.22,
        "chat_basics": 0.15,
        "chat_story_chat": 0.10,
        "chat_tm4": 0.03,
        "chat_fairy": 0.03,
        "chat_gsm": 0.04,
        "chat_fmt": 0.04,
        "chat_pyfuncs": 0.01,
    }
)
"""Of the prompts, by part."""
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Each for an equal share of the sequences."""
LENGTH = 512
ROOM = 64
"""Tokens that are left for an answer, at least."""
TOGETHER = 2048
"""Sequences that are continued at a time."""


class Words(NamedTuple):
    ids: Tensor
    """int64 [S, T + 1]: prompts and what the target said then."""
    prompts: Tensor
    """int64 [S]: tokens of each prompt."""


def prompts(
    corpus: Corpus, count: int, length: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """ids [count, length], of which the first tokens are a prompt, and how many those are.

    Of chats: from a conversation's beginning up to where the assistant speaks. Of texts: a few
    words from anywhere.
    """
    shares = {name: share for name, share in SHARES.items() if name in corpus.parts}
    total = sum(shares.values())
    ids = np.zeros((count, length), dtype=np.int64)
    sizes = np.ones(count, dtype=np.int64)
    names = random.choice(list(shares), count, p=[share / total for share in shares.values()])
    room = min(ROOM, length // 4)
    for row, name in enumerate(names):
        if name.startswith("chat_"):
            for start in random.choice(corpus.chats[name], 20):
                piece = corpus.tokens[start : start + length]
                stop = np.flatnonzero(piece[1:] == BEGIN)
                piece = piece[: stop[0] + 1] if len(stop) else piece
                ends = np.flatnonzero((piece == USER_END) | (piece == TOOL_RESULTS_END)) + 1
                ends = ends[ends <= length - room]
                if len(ends):
                    sizes[row] = random.choice(ends)
                    break
            else:
                piece = np.array([BEGIN], dtype=np.uint16)
        else:
            part = corpus.part(name)
            start = random.integers(max(1, len(part) - length))
            sizes[row] = random.integers(min(16, length // 4), length // 3)
            piece = part[start : start + sizes[row]]
        ids[row, : sizes[row]] = piece[: sizes[row]]
    return ids, sizes


def own_words(
    model: TinyModel, corpus: Corpus, count: int, length: int, seed: int, dtype: torch.dtype
) -> Words:
    """`count` sequences of `length` + 1 tokens."""
    device = model.embedding.device
    random = np.random.default_rng(seed)
    noise = torch.Generator(device).manual_seed(seed)
    made, lengths = prompts(corpus, count, length + 1, random)
    # Those of like size together: a batch begins where its shortest prompt ends.
    order = np.argsort(lengths, kind="stable")
    ids = torch.from_numpy(made[order]).to(device)
    sizes = torch.from_numpy(lengths[order]).to(device)
    heats = torch.tensor(TEMPERATURES, device=device).repeat(count // len(TEMPERATURES) + 1)
    for i in range(0, count, TOGETHER):
        some = slice(i, i + TOGETHER)
        heat = heats[:count][some]
        ids[some] = continued(model, ids[some], sizes[some], dtype, heat, noise)
    return Words(ids, sizes)


def keep(path: Path, words: Words) -> None:
    state.save(path, {"ids": words.ids.to("cpu", torch.int16), "prompts": words.prompts.cpu()})


def kept(path: Path, device: torch.device) -> Words:
    content = state.load(path, device)
    return Words(content["ids"].long(), content["prompts"])


def spoken(words: Words) -> Tensor:
    """1 where the target of a position is the model's word, up to and with an end; fp32 [S, T]."""
    place = torch.arange(words.ids.shape[1], device=words.ids.device)
    said = place >= words.prompts.unsqueeze(-1)
    ended = ((words.ids == END) & said).int().cumsum(-1)
    return (said[:, 1:] & (ended[:, :-1] == 0)).float()
