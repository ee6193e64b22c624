"""Stop strings, over tokens that divide the text anyhow."""

from __future__ import annotations

import random
from importlib import resources
from pathlib import Path

import pytest

from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.stops import StopChecker
from ml4core.serving.tokenizer import Tokenizer

from . import reference


class Pieces:
    """Token ``i`` reads as ``pieces[i]``."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._rest


def params(*stop: str, include: bool = False, min_tokens: int = 0) -> SamplingParams:
    return SamplingParams(
        stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )


def run(pieces: list[str], of: SamplingParams, step: int = 1) -> tuple[list[str], StopChecker]:
    """What each push gave, the rest last."""
    checker = StopChecker(of, Pieces(pieces))
    numbers = list(range(len(pieces)))
    given = [checker.push(*numbers[i : i + step]) for i in range(0, len(numbers), step)]
    return [*given, checker.finish()], checker


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(150))
def test_random_texts(seed: int, include: bool) -> None:
    rng = random.Random(seed)
    pieces = ["".join(rng.choices("ab", k=rng.randrange(4))) for _ in range(12)]
    stops = ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4))]
    of = params(*stops, include=include, min_tokens=rng.choice([0, 0, 3, 9]))
    want, ended = reference.cut_at_stop(pieces, stops, of.min_tokens, include)
    for step in (1, 4, 12):
        given, checker = run(pieces, of, step)
        assert "".join(given) == want
        assert checker.num_tokens == (12 if ended is None else ended)
        assert (checker.stop is None) == (ended is None)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    given, checker = run(["a", "na", "n", "x", "nan", "aX", "na"], params("nanaY", "X!"))
    assert given == ["a", "", "", "nanx", "", "nana", "X", "na"]
    assert checker.stop is None
    given, _ = run(["a", "na", "n", "x"], params("nanaY", include=True))
    assert given == ["a", "na", "n", "x", ""]


def test_the_step_that_holds_the_stop_is_cut() -> None:
    """B062: ids and text behind a stop in the middle of a step do not count."""
    pieces = ["one", " two", "!\n", "\nthree", " four"]
    for step in (1, 2, 3, 5):
        given, checker = run(pieces, params("\n\n"), step)
        assert "".join(given) == "one two!"
        assert checker.num_tokens == 4
        assert checker.stop == "\n\n"
    assert checker.push(0, 1) == ""
    assert checker.num_tokens == 4


def test_the_first_stop_to_be_complete_counts_then_the_longest() -> None:
    for stops in (("cd", "b"), ("b", "cd")):
        given, checker = run(["abcd"], params(*stops))
        assert ("".join(given), checker.stop) == ("a", "b")
    given, checker = run(["xab", "c"], params("c", "abc", "bc"))
    assert ("".join(given), checker.stop) == ("x", "abc")


def test_min_tokens_passes_over_stops_that_end_within() -> None:
    given, checker = run(["s", "s", "s", "s"], params("ss", min_tokens=2))
    assert ("".join(given), checker.num_tokens) == ("s", 3)
    given, checker = run(["stop", "sto", "p"], params("stop", min_tokens=1))
    assert ("".join(given), checker.num_tokens) == ("stop", 3)


def test_the_end_releases_what_was_held() -> None:
    checker = StopChecker(params("stop"), Pieces(["a st", "o"], rest="\ufffd"))
    assert checker.push(0, 1) == "a "
    assert checker.finish() == "sto\ufffd"


@pytest.mark.parametrize(("include", "want"), [(False, "a"), (True, "a<end>")])
def test_the_text_of_a_stop_token(include: bool, want: str) -> None:
    checker = StopChecker(params("x", include=include), Pieces(["a", "<end>"]))
    assert checker.push(0) + checker.finish(1) == want
    assert checker.num_tokens == 2


def test_without_text() -> None:
    checker = StopChecker(SamplingParams(detokenize=False), None)
    assert checker.push(1, 2, 3) + checker.finish() == ""
    assert checker.num_tokens == 3
    with pytest.raises(ValueError, match="decoder"):
        StopChecker(SamplingParams(), None)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = resources.files("ml4core") / "assets" / "ml4-tiny"
    return Tokenizer.load(Path(str(folder / "tekken.json")))


@pytest.mark.parametrize("stop", ["é", "né", "ñ🙂", "🙂z"])
def test_stops_of_characters_that_tokens_divide(tokenizer: Tokenizer, stop: str) -> None:
    text = "uné mañana ñ🙂z end"
    first = tokenizer.bos_id + 1
    byte_ids = {tokenizer.piece(i): i for i in range(first, tokenizer.vocab_size)}
    ids = [byte_ids[bytes([byte])] for byte in text.encode()]
    ended = len(text[: text.index(stop) + len(stop)].encode())
    for step in (1, 3, len(ids)):
        checker = StopChecker(params(stop), tokenizer.stream())
        given = [checker.push(*ids[i : i + step]) for i in range(0, len(ids), step)]
        assert "".join(given) == text[: text.index(stop)]
        assert checker.num_tokens == ended
        assert all("\ufffd" not in part for part in given)


def test_a_long_stop_is_searched_in_linear_time() -> None:
    length = 200_000
    checker = StopChecker(params("a" * length + "b"), Pieces(["a" * (2 * length), "b", "c"]))
    assert checker.push(0, 1) == "a" * length
    assert checker.num_tokens == 2
