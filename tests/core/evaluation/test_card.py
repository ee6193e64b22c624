"""The shipped figures are of the shipped file: a few of them, measured again."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from statistics import mean, stdev
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.evaluation import perplexity, retrieval, tool_calls
from ml4core.evaluation.texts import WINDOW, shipped
from ml4core.models.embedded import embedded_folder
from ml4core.serving.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("probed_once")

RULES = ("mxfp4", "mxfp4-floor", "mxfp4-roundup", "mxfp4-ceil")
ARGS = EngineArgs("ml4-tiny", backend="cpu")


@pytest.fixture(scope="module")
def figures() -> Any:
    return json.loads((embedded_folder() / "figures.json").read_text("utf-8"))


def silent(what: str, done: int, total: int) -> None:
    pass


def test_they_are_of_the_shipped_file(figures: Any) -> None:
    assert figures["bytes"] == (embedded_folder() / "consolidated.safetensors").stat().st_size


def test_perplexity(figures: Any) -> None:
    texts = {"children": shipped()["children"]}
    (score,) = perplexity.measure(ARGS, texts, (), ("auto",), WINDOW, 1, silent)
    (known,) = (
        row
        for row in figures["shipped"]["ppl"]
        if (row["text"], row["weights"], row["kv"]) == ("children", perplexity.STORED, "fp32")
    )
    assert score.by_window[0] == pytest.approx(known["by_window"][0], abs=2e-3)
    assert score.weight_bytes == known["weight_bytes"]


def test_tool_calls(figures: Any, tokenizer: Tokenizer) -> None:
    for rate in tool_calls.measure(ARGS, tokenizer, 2, silent):
        (known,) = (row for row in figures["shipped"]["tools"] if row["kind"] == rate.kind)
        assert (list(rate.valid), list(rate.right)) == (known["valid"][:2], known["right"][:2])


def test_retrieval(figures: Any, tokenizer: Tokenizer) -> None:
    (found,) = retrieval.measure(ARGS, tokenizer, shipped(), (512,), 1, silent)
    (known,) = (row for row in figures["shipped"]["retrieval"] if row["length"] == 512)
    assert known["depths"][0] == found.depths[0] == 0
    assert known["found"][0] == found.found[0]


def test_formats_cost_no_more_than_they_may(figures: Any) -> None:
    """Of perplexity, against BF16, on the mean over windows, as far as so few of them can tell."""
    rows = figures["formats"]["ppl"]
    windows: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        windows[row["weights"]] += row["by_window"]
    base = windows.pop(perplexity.STORED)
    assert len(base) >= 4
    limits = {"fp8_block": 0.005, "nvfp4": 0.04} | dict.fromkeys(RULES, 0.06)
    assert windows.keys() == limits.keys()
    for form, most in limits.items():
        costs = [one - other for one, other in zip(windows[form], base, strict=True)]
        error = stdev(costs) / math.sqrt(len(costs))
        assert mean(costs) < most + 2 * error, form
        assert mean(costs) < 1.5 * most, form
