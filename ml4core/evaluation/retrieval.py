"""Whether a number told in a long prompt is found again, by length and by where it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ml4core.engine.args import EngineArgs
from ml4core.evaluation.needles import DIGITS, USER_END, Ids, Needles, cut
from ml4core.evaluation.opened import Tell, answers, opened
from ml4core.serving.tokenizer import Tokenizer

NUMBERS = 4
"""Told in each document; one is asked for."""
DEPTHS = 10
ANSWER = 32
"""Tokens of an answer at most."""


@dataclass(frozen=True)
class Finding:
    """Of one length.

    Attributes:
        depths: where the number stands, 0 the beginning and 1 the end.
        found: of each depth, whether the answer tells it.
    """

    length: int
    depths: tuple[float, ...]
    found: tuple[bool, ...]


@dataclass(frozen=True)
class Case:
    """``ids``: up to where the answer begins. ``number``: what it has to tell."""

    ids: list[int]
    number: str


def measure(
    args: EngineArgs,
    tokenizer: Tokenizer,
    texts: Mapping[str, str],
    lengths: Sequence[int],
    limit: int | None,
    tell: Tell,
) -> list[Finding]:
    """A document for each length and each of ten depths, or of ``limit``; texts stand around the
    numbers.
    """
    depths = tuple(np.linspace(0, 1, min(limit or DEPTHS, DEPTHS)).round(3).tolist())
    needles = Needles(cut(tekken_of(tokenizer)))
    filler = np.array([i for t in texts.values() for i in tokenizer.encode(t)[1:]], np.int64)
    findings = []
    total = len(lengths) * len(depths)
    for number, length in enumerate(lengths):
        done = number * len(depths)
        cases = [make_case(needles, tokenizer, filler, length, depth) for depth in depths]
        with opened(args, length + ANSWER) as llm:
            outputs = answers(
                llm,
                [case.ids for case in cases],
                ANSWER,
                lambda some, done=done: tell("retrieval", done + some, total),  # type: ignore[misc]
            )
        found = tuple(
            case.number in output.outputs[0].text
            for case, output in zip(cases, outputs, strict=True)
        )
        findings.append(Finding(length, depths, found))
    return findings


def make_case(
    needles: Needles, tokenizer: Tokenizer, filler: Ids, length: int, depth: float
) -> Case:
    """Always the same for one length and depth."""
    random = np.random.default_rng([length, round(depth * 1000)])
    start = int(random.integers(len(filler)))
    text = np.resize(np.roll(filler, -start), length)  # from the start again where it ends
    document = needles.document(text, length, random, NUMBERS, 1, depth)
    ids = document.ids.tolist()
    (place,) = document.answers
    number = tokenizer.decode(ids[place])
    assert len(number) == DIGITS
    begin = len(ids) - ids[::-1].index(USER_END)
    return Case(ids[:begin], number)


def tekken_of(tokenizer: Tokenizer) -> Any:
    """mistral-common's object, which cuts text without the id of the beginning."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    return Tekkenizer.from_file(tokenizer.path)
