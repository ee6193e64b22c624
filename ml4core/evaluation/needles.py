"""Made documents that ask for a number told before: sentences, and where they go.

The sentences are cut into tokens once (`cut`, which needs a tokenizer); documents are put together
from them by `Needles`, which needs none, so that training can make them anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

FILE = "needles.json"
DIGITS = 4
HOLE = "0000"
"""Stands for the number when a sentence is cut into tokens; each digit is a token of its own."""

SENTENCE = " The {key} is {value}."
QUESTION = "\n\nWhat is the {key}?"
ANSWER = "The {key} is {value}."

_NAMES = """
    Alice Anna Arthur Ben Bob Carol Charles Clara Daisy Daniel David Edith Eliza Emma Eva Felix
    Frank George Grace Hannah Harry Helen Henry Hugo Ida Jack James Jane John Joseph Julia Karen
    Kate Laura Leo Lily Lucy Maria Mark Martha Mary Max Mina Nina Noah Oliver Oscar Paul Peter
    Philip Rachel Ralph Robert Rosa Ruth Sam Sara Simon Susan Thomas Tom Victor Walter William
"""
_COLOURS = "red blue green yellow white black brown golden silver purple"
_THINGS = "box door chest gate bag drawer cabin locker safe trunk"

BEGIN, END = 1, 2  # control ids, as in every tokenizer of the family
USER_END = 4
USER = 3


def keys() -> list[str]:
    """What numbers are told of."""
    return [f"secret number of {name}" for name in _NAMES.split()] + [
        f"code for the {colour} {thing}" for colour in _COLOURS.split() for thing in _THINGS.split()
    ]


def write_needles(tokenizer: Path, out: Path) -> None:
    """Cut all sentences into tokens with a tekken file. Needs mistral-common."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    out.write_text(json.dumps(cut(Tekkenizer.from_file(tokenizer))))


def cut(tekken: Any) -> dict[str, Any]:
    """What `Needles` is made of: all sentences as token ids of a Tekkenizer.

    Raises ValueError for a tokenizer to which a number of four digits is not four tokens.
    """

    def ids(text: str) -> list[int]:
        found: list[int] = tekken.encode(text, bos=False, eos=False)
        return found

    digits = [ids(str(d))[-1] for d in range(10)]
    ends = [i for i in range(tekken.n_words) if _ends_sentence(tekken, i)]
    entries = []
    for key in keys():
        entry = {
            "sentence": ids(SENTENCE.format(key=key, value=HOLE)),
            "question": ids(QUESTION.format(key=key)),
            "answer": ids(ANSWER.format(key=key, value=HOLE)),
        }
        for part in ("sentence", "answer"):
            if entry[part].count(digits[0]) != DIGITS:
                raise ValueError(f"{part} of {key!r}: the number is not {DIGITS} tokens")
        entries.append(entry)
    settings = ids('{"reasoning_effort": "none"}')  # what every chat begins with
    begin, end = (tekken.get_special_token(f"[{slash}MODEL_SETTINGS]") for slash in ("", "/"))
    return {
        "digits": digits,
        "ends": ends,
        "chat_prefix": [BEGIN, begin, *settings, end, USER],
        "needles": entries,
    }


def _ends_sentence(tekken: Any, token: int) -> bool:
    try:
        text: str = tekken.decode([token])
    except ValueError:  # a control token
        return False
    return text in (".", "!", "?")


@dataclass(frozen=True)
class Document:
    """A document, and where in it the digits of each answer stand."""

    ids: Ids
    answers: list[slice]


class Needles:
    """Makes documents. `source`: a folder with `needles.json`, or what `cut` gave."""

    def __init__(self, source: Path | Mapping[str, Any]) -> None:
        content = json.loads((source / FILE).read_text()) if isinstance(source, Path) else source
        self.digits = np.array(content["digits"])
        self.ends = np.array(content["ends"])
        self.prefix: list[int] = content["chat_prefix"]
        self.entries: list[dict[str, list[int]]] = content["needles"]

    def document(
        self,
        filler: Ids,
        length: int,
        random: np.random.Generator,
        count: int,
        questions: int,
        depth: float | None = None,
    ) -> Document:
        """A chat of at most `length` tokens: filler with `count` numbers in it, then questions.

        `depth`, 0 to 1: where the number of the first question stands; None: anywhere.
        """
        chosen = random.choice(len(self.entries), count, replace=False)
        numbers = random.integers(0, 10, (count, DIGITS))
        tails = [self._tail(self.entries[i], n) for i, n in zip(chosen, numbers, strict=True)]
        tails = tails[:questions]
        told = [
            self._fill(self.entries[i]["sentence"], n) for i, n in zip(chosen, numbers, strict=True)
        ]
        room = length - len(self.prefix) - sum(map(len, told)) - sum(len(t) + 2 for t in tails)
        if room < 0 or len(filler) < room:
            raise ValueError(f"{len(filler)} tokens of filler; a document needs {room}")
        filler = filler[:room]
        stops = np.flatnonzero(np.isin(filler, self.ends)) + 1
        places = random.random(count)
        if depth is not None:
            places[0] = depth
        at = [self._near(stops, int(place * room)) for place in places]
        parts: list[Any] = [self.prefix]
        done = 0
        for i in sorted(range(count), key=at.__getitem__):
            parts += [filler[done : at[i]], told[i]]
            done = at[i]
        parts.append(filler[done:])
        size = sum(map(len, parts))
        answers = []
        for number, tail in enumerate(tails):
            if number:
                parts.append([USER])
                size += 1
            parts.append(tail)
            answers.append(slice(size + len(tail) - 2 - DIGITS, size + len(tail) - 2))
            size += len(tail)
        return Document(np.concatenate([np.asarray(part, np.int64) for part in parts]), answers)

    def _tail(self, entry: dict[str, list[int]], number: Ids) -> list[int]:
        """The question and its answer, which ends in digits, a full stop and the end token."""
        return [*entry["question"], USER_END, *self._fill(entry["answer"], number), END]

    def _fill(self, ids: list[int], number: Ids) -> list[int]:
        """`ids` with the digits of `number` in place of zeros."""
        digits = iter(self.digits[number].tolist())
        zero = int(self.digits[0])
        return [next(digits) if i == zero else i for i in ids]

    def _near(self, stops: Ids, place: int) -> int:
        """The end of a sentence at or before `place`; 0 if there is none."""
        i = int(np.searchsorted(stops, place, side="right"))
        return int(stops[i - 1]) if i else 0
