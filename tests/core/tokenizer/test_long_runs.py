"""B093: runs of one character take time in proportion to their length, and come back as they were.

Time that grows with the square would not end within the limit.
"""

from __future__ import annotations

import pytest

from ml4core.serving.tokenizer import Tokenizer

RUN = 200_000


@pytest.mark.timeout(120)
@pytest.mark.parametrize("unit", ["A", " ", "\n", "e\u0301", "\U0001fae0", "a1", "\u05d0"])
def test_a_long_run_comes_back(tokenizer: Tokenizer, unit: str) -> None:
    text = unit * RUN
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # A run of half the length has the same ids, twice.
    half = tokenizer.encode(unit * (RUN // 2))
    assert abs(len(ids) - 2 * len(half)) <= 2


def test_runs_between_words(tokenizer: Tokenizer) -> None:
    accents = "\u0301" * 999
    text = f"before {'A' * 9_400} between{' ' * 9_400}after{accents}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
