"""Documents that ask for a number: where it stands, how long they are, and that they stay alike."""

from __future__ import annotations

import numpy as np
import pytest

from ml4core.evaluation.needles import Needles, cut, keys
from ml4core.evaluation.retrieval import make_case, tekken_of
from ml4core.evaluation.texts import shipped
from ml4core.serving.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def needles() -> Needles:
    from ml4core.models.embedded import embedded_folder
    from ml4core.serving.tokenizer import find_tokenizer

    return Needles(cut(tekken_of(Tokenizer.load(find_tokenizer(embedded_folder())))))


@pytest.fixture
def filler(tokenizer: Tokenizer) -> np.ndarray:
    return np.array(tokenizer.encode(shipped()["children"])[1:])


@pytest.mark.parametrize("length", [256, 1000, 5000])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_case_tells_the_number_once_and_asks_for_it(
    needles: Needles, tokenizer: Tokenizer, filler: np.ndarray, length: int, depth: float
) -> None:
    case = make_case(needles, tokenizer, filler, length, depth)
    text = tokenizer.decode(case.ids)
    assert length - 64 < len(case.ids) < length
    (key,) = [key for key in keys() if text.endswith(f"What is the {key}?")]
    told = f" The {key} is {case.number}."
    assert text.count(told) == 1
    place = text.index(told) / len(text)
    assert abs(place - depth) < 0.2
    assert sum(f" The {key} is " in text for key in keys()) == 4


def test_a_case_is_always_the_same(
    needles: Needles, tokenizer: Tokenizer, filler: np.ndarray
) -> None:
    one, again = (make_case(needles, tokenizer, filler, 700, 0.3) for _ in range(2))
    other = make_case(needles, tokenizer, filler, 700, 0.4)
    assert one == again
    assert one.number != other.number


def test_the_prompt_is_the_chat_template(
    needles: Needles, tokenizer: Tokenizer, filler: np.ndarray
) -> None:
    case = make_case(needles, tokenizer, filler, 300, 0.5)
    chat = tokenizer.encode_chat([{"role": "user", "content": "x"}])
    start = len(needles.prefix)
    assert case.ids[:start] == chat[:start]
    assert case.ids[-1] == chat[-1]
