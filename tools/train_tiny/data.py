"""The corpus, and which windows of it a run sees, in which order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.train_tiny.retrieval import BEGIN, END, USER_END, Needles

Ids = NDArray[np.uint16]

TOOL_RESULTS, TOOL_RESULTS_END = 7, 8  # control ids

PASSES: Mapping[str, float] = MappingProxyType(
    {
        "books": 8,
        "books_more": 8,
        "children": 8,
        "synth_stories": 3,
        "cc_picturebooks": 6,
        "code_python": 3,
        "json": 3,
        "chat_tools": 2.5,
        "chat_basics": 4,
        "chat_story_chat": 3,
        "chat_tm4": 2,
        "chat_fairy": 5,
        "chat_gsm": 4,
        "chat_wordnet": 3,
        "chat_fmt": 3,
        "chat_pyfuncs": 5,
    }
)
"""How often the main phase goes over each part, in proportion."""

COOLDOWN: Mapping[str, float] = MappingProxyType(
    {
        "books": 0.16,
        "books_more": 0.14,
        "children": 0.12,
        "synth_stories": 0.07,
        "cc_picturebooks": 0.01,
        "code_python": 0.015,
        "json": 0.005,
        "chat_tools": 0.12,
        "chat_basics": 0.07,
        "chat_story_chat": 0.07,
        "chat_tm4": 0.02,
        "chat_fairy": 0.03,
        "chat_gsm": 0.04,
        "chat_wordnet": 0.01,
        "chat_fmt": 0.03,
        "chat_pyfuncs": 0.01,
        "retrieval": 0.12,
    }
)
"""Shares of windows at the end of the main phase; of chats, the loss is the assistant's words'."""

SELECTION: Mapping[str, float] = MappingProxyType({**COOLDOWN, "retrieval": 0.25})
"""As the cooldown's, by weight, with more of what needs a far key: for the indexers."""

MAIN_RETRIEVAL = 0.1
"""Share of made documents in the main phase."""
WHOLE = 0.5
"""Share of their windows that one document fills; the others hold several shorter ones."""
SHORTEST = 160
DOCUMENT_CHUNK = 500
"""Windows of documents that a process makes at a time."""
ANSWER = 5.0
"""Weight of a word that answers in a made document, by that of other text: there are few."""
NUMBERS, QUESTIONS = 16, 8
"""At most, of a made document."""


@dataclass(frozen=True)
class Corpus:
    """All parts behind one another, and where each lies."""

    tokens: Ids
    parts: Mapping[str, tuple[int, int]]

    @classmethod
    def load(
        cls, folder: Path, split: str = "train", parts: Collection[str] | None = None
    ) -> Corpus:
        """Those `parts` that there are; None: all."""
        files = sorted((folder / "bin").glob(f"*.{split}.bin"))
        files = [f for f in files if parts is None or f.name.split(".")[0] in parts]
        if not files:
            raise ValueError(f"{folder}: no bin/*.{split}.bin")
        arrays = {file.name.split(".")[0]: np.fromfile(file, dtype=np.uint16) for file in files}
        return cls.of(arrays)

    @classmethod
    def of(cls, arrays: Mapping[str, Ids]) -> Corpus:
        parts, end = {}, 0
        for name, array in arrays.items():
            parts[name] = (end, end + len(array))
            end += len(array)
        return cls(np.concatenate(list(arrays.values())), parts)

    def part(self, name: str) -> Ids:
        begin, end = self.parts[name]
        return self.tokens[begin:end]

    @cached_property
    def chats(self) -> Mapping[str, NDArray[np.int64]]:
        """Where the conversations of each part of chats begin."""
        return {
            name: begin + np.flatnonzero(self.tokens[begin:end] == BEGIN)
            for name, (begin, end) in self.parts.items()
            if name.startswith("chat_")
        }


def made_windows(
    corpus: Corpus, needles: Needles, windows: int, length: int, seed: int
) -> NDArray[np.uint16]:
    """[windows, length], full of made documents; what no document fits in is the beginning of a
    text.
    """
    random = np.random.default_rng(seed)
    sources = [corpus.part(name) for name in ("books", "children") if name in corpus.parts]
    sources = [source for source in sources if len(source) > 2 * length]
    most = min(NUMBERS, len(needles.entries))
    made = np.empty((windows, length), dtype=np.uint16)
    for row in made:
        source = sources[random.integers(len(sources))]
        begin = int(random.integers(len(source) - 2 * length))
        # Control tokens would end the made document.
        filler = source[begin : begin + 2 * length].astype(np.int64)
        filler = filler[filler > USER_END]
        whole = random.random() < WHOLE
        done = 0
        while done == 0 or length - done >= SHORTEST:
            room = min(length - done, len(filler))
            size = room
            if not whole and room > SHORTEST:
                # As many of twice a length as of the length itself.
                size = int(SHORTEST * (room / SHORTEST) ** random.random())
            count = int(random.integers(1, max(1, min(most, size // 80)) + 1))
            questions = int(random.integers(1, min(count, QUESTIONS) + 1))
            ids = needles.document(filler, size, random, count, questions).ids
            row[done : done + len(ids)] = ids
            done += len(ids)
            filler = np.roll(filler, -size)
        begin = int(random.integers(len(source) - length))
        row[done:] = source[begin : begin + length - done]
    return made


def write_documents(folder: Path, windows: int, length: int, seed: int, workers: int) -> Path:
    """Make the corpus' part `retrieval` with several processes; the same for any number of them."""
    chunks = [
        (folder, min(DOCUMENT_CHUNK, windows - i), length, seed * 1_000_003 + i)
        for i in range(0, windows, DOCUMENT_CHUNK)
    ]
    path = folder / "bin" / "retrieval.train.bin"
    temporary = path.with_suffix(".writing")
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        open(temporary, "wb") as file,
    ):
        for made in pool.map(_documents, chunks):
            file.write(made.tobytes())
    temporary.replace(path)
    return path


def _documents(chunk: tuple[Path, int, int, int]) -> NDArray[np.uint16]:
    folder, windows, length, seed = chunk
    corpus = Corpus.load(folder, parts=("books", "children"))
    return made_windows(corpus, Needles(folder), windows, length, seed)


def main_windows(corpus: Corpus, count: int, length: int, seed: int) -> NDArray[np.int64]:
    """Beginnings of `count` windows of `length` + 1 tokens, in the order of training.

    Each pass over a part cuts it at other places.
    """
    random = np.random.default_rng(seed)
    sizes = {
        name: passes * (end - begin)
        for name, passes in PASSES.items()
        if name in corpus.parts
        for begin, end in (corpus.parts[name],)
    }
    share = {name: size / sum(sizes.values()) for name, size in sizes.items()}
    if "retrieval" in corpus.parts:
        share = {name: (1 - MAIN_RETRIEVAL) * part for name, part in share.items()}
        share["retrieval"] = MAIN_RETRIEVAL
    chosen = [
        _tiles(corpus, name, round(part * count) + 1, length, random)
        for name, part in share.items()
    ]
    return random.permutation(np.concatenate(chosen))[:count]


def mixed_windows(
    corpus: Corpus, mix: Mapping[str, float], count: int, length: int, seed: int
) -> NDArray[np.int64]:
    """Beginnings of `count` windows in the shares of `mix`, in any order; those of chats begin with
    a conversation.
    """
    random = np.random.default_rng(seed)
    shares = {name: share for name, share in mix.items() if name in corpus.parts}
    total = sum(shares.values())
    counts = random.multinomial(count, [share / total for share in shares.values()])
    chosen = []
    for name, wanted in zip(shares, counts.tolist(), strict=True):
        starts = corpus.chats.get(name, np.empty(0, np.int64))
        starts = starts[: np.searchsorted(starts, len(corpus.tokens) - length - 1)]
        if len(starts):
            chosen.append(random.choice(starts, wanted))
        else:
            chosen.append(_tiles(corpus, name, wanted, length, random))
    return random.permutation(np.concatenate(chosen))


def _tiles(
    corpus: Corpus, name: str, count: int, length: int, random: np.random.Generator
) -> NDArray[np.int64]:
    begin, end = corpus.parts[name]
    # The last window of the corpus needs one token more, as a target.
    room = min(end, len(corpus.tokens) - 1) - begin
    if room < length:
        # A part shorter than a window is read on into the next.
        last = len(corpus.tokens) - length - 1
        return np.full(count, min(begin, last), dtype=np.int64)
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    made = 0
    while made < count:
        phase = 0 if name == "retrieval" else int(random.integers(min(length, room - length + 1)))
        starts = np.arange(phase, room - length + 1, length)
        found.append(begin + random.permutation(starts))
        made += len(starts)
    return np.concatenate(found)[:count]


class Batches:
    """Windows of a corpus on a device."""

    def __init__(self, corpus: Corpus, length: int, device: torch.device) -> None:
        self.length = length
        self.device = device
        # uint16 has few operations; ids fit int16, vocabularies up to 32,768.
        self.tokens = torch.from_numpy(corpus.tokens.astype(np.int16)).to(device)
        self.made = [corpus.parts[n] for n in corpus.parts if n == "retrieval"]
        self.chats = [corpus.parts[n] for n in corpus.parts if n.startswith("chat_")] + self.made

    def window(self, starts: NDArray[np.int64], assistant_only: bool) -> tuple[Tensor, ...]:
        """ids, targets [B, T] int64, and the weight of each target fp32."""
        begin = torch.from_numpy(starts).to(self.device).unsqueeze(-1)
        ids = self.tokens[begin + torch.arange(self.length + 1, device=self.device)].long()
        inputs, targets = ids[:, :-1], ids[:, 1:]
        weights = torch.ones(inputs.shape, device=self.device)
        answers = assistant_weights(inputs, targets)
        if assistant_only:
            weights = torch.where(_within(begin, self.chats), answers, weights)
        weights = torch.where(_within(begin, self.made) & (answers > 0), ANSWER, weights)
        return inputs.contiguous(), targets.contiguous(), weights


def _within(begin: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    """Whether each of `begin` lies in one of `parts`."""
    found = torch.zeros_like(begin, dtype=torch.bool)
    for first, end in parts:
        found |= (begin >= first) & (begin < end)
    return found


def assistant_weights(inputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the target is the assistant's, fp32 [B, T]: after [/INST] or [/TOOL_RESULTS], up to
    and with the end token.
    """
    on = (inputs == USER_END) | (inputs == TOOL_RESULTS_END)
    off = (inputs == END) | (inputs == TOOL_RESULTS) | (inputs == BEGIN)
    place = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    last = torch.where(on | off, place, -1).cummax(-1).values
    state = on.gather(-1, last.clamp(min=0)) & (last >= 0)
    return (state & (targets != TOOL_RESULTS)).float()
