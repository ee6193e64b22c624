"""What a small model's figures are, part by part; and refusals before anything is measured."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.evaluation import drafting, perplexity, speed
from ml4core.evaluation.parts import WEIGHTS
from ml4core.evaluation.run import Options, measure
from ml4core.models.quantize_options import DEFAULT_PARTS
from ml4core.models.seeded import make_seeded
from ml4core.serving.outputs import Logprob
from ml4core.serving.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("probed_once")

Told = list[tuple[str, int, int]]
SMALL: dict[str, Any] = {
    "layers": 4,
    "hidden": 128,
    "heads": 2,
    "experts": 4,
    "dense_width": 128,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> EngineArgs:
    """Seeded weights: nothing is foretold, so a token costs at least ln 8192."""
    folder = make_seeded(tmp_path_factory.mktemp("small") / "m", **SMALL)
    return EngineArgs(str(folder), backend="cpu", max_model_len=256)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Once there was a duck who lived by the river. " * 30, "utf-8")
    return path


def test_perplexity_by_layout_and_form(small: EngineArgs, text: Path) -> None:
    told: Told = []
    options = Options(parts=("ppl",), text=text, weights=("nvfp4", "mxfp4-floor"), limit=1)
    facts = measure(small, options, lambda *step: told.append(step))
    rows = [(row["weights"], row["kv"]) for row in facts["ppl"]]
    stored = perplexity.STORED
    layouts = [(stored, "fp32"), (stored, "bf16"), (stored, "fp8_ds_mla")]
    assert rows == [*layouts, ("nvfp4", "fp32"), ("mxfp4-floor", "fp32")]
    assert told == [("perplexity", done, 5) for done in range(6)]
    for row in facts["ppl"]:
        assert row["tokens"] == 254  # 256 less the id of the beginning and the token that is made
        assert math.log(8192) < row["nats"] < 40
        assert row["ppl"] == pytest.approx(math.exp(row["nats"]))
    sizes = {row["weights"]: row["weight_bytes"] for row in facts["ppl"]}
    assert sizes["nvfp4"] < sizes[stored]
    forms = {row["weights"]: row["formats"] for row in facts["ppl"]}
    assert "mxfp4" in forms["mxfp4-floor"]
    kv_bytes = [row["kv_bytes"] for row in facts["ppl"][:3]]
    assert kv_bytes == sorted(kv_bytes, reverse=True)


def test_every_form_is_a_conversion() -> None:
    found = [perplexity.options_of(form) for form in WEIGHTS]
    assert {options.to for options in found} == DEFAULT_PARTS.keys()
    rules = {options.mxfp4_rule for options in found if options.to == "mxfp4"}
    assert rules == {"even", "floor", "roundup", "ceil"}


def test_nats_are_those_of_all_tokens_but_the_first() -> None:
    entries = [None, *({i: Logprob(-0.5 * i, 1, "")} for i in (3, 4))]
    output = SimpleNamespace(prompt_token_ids=[1, 3, 4], prompt_logprobs=entries)
    asked: list[Any] = []

    def generate(prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
        asked.append((prompts, params.prompt_logprobs))
        return [output]

    llm: Any = SimpleNamespace(generate=generate, args=SimpleNamespace(max_num_seqs=2))
    assert perplexity._nats(llm, [1, 3, 4]) == pytest.approx(3.5)
    assert asked == [([{"prompt_token_ids": [1, 3, 4]}], 0)]


def test_retrieval_of_seeded_weights_finds_nothing(small: EngineArgs, text: Path) -> None:
    told: Told = []
    options = Options(parts=("retrieval",), text=text, lengths=(200,), limit=3)
    facts = measure(small, options, lambda *step: told.append(step))
    (found,) = facts["retrieval"]
    assert found["depths"] == (0.0, 0.5, 1.0)
    assert found["found"] == (False, False, False)
    assert told[-1] == ("retrieval", 3, 3)


def test_no_drafter_is_no_figure_unless_it_alone_is_asked_for(small: EngineArgs) -> None:
    from ml4core.models.errors import CheckpointError

    facts = measure(small, Options(parts=("retrieval", "draft"), lengths=(128,), limit=1), _silent)
    assert facts["draft"] is None
    with pytest.raises(CheckpointError, match="--speculative-config"):
        measure(small, Options(parts=("draft",)), _silent)


def test_speed_is_of_the_same_tokens_with_drafts_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prompts(tokenizer: Tokenizer, texts: Any) -> dict[str, list[list[int]]]:
        return {"chat": [tokenizer.encode_chat([{"role": "user", "content": "What is 2 + 3?"}])]}

    monkeypatch.setattr(drafting, "prompts", prompts)
    monkeypatch.setattr(drafting, "TOKENS", 9)
    facts = measure(EngineArgs("ml4-tiny"), Options(parts=("speed",)), _silent)
    (one,) = facts["speed"]
    assert one["alike"]
    assert 1 < one["length"] <= 4
    assert 0 < one["tokens"] <= 9
    assert one["ratio"]["repeats"] == speed.TURNS
    for name in ("plain", "drafted", "ratio", "cpu_ratio"):
        assert 0 < one[name]["low"] <= one[name]["median"] <= one[name]["high"]


@pytest.mark.parametrize("length", [100, 225])
def test_a_length_that_the_model_can_not_have(small: EngineArgs, length: int) -> None:
    with pytest.raises(RequestError, match="128 to 224"):
        measure(small, Options(parts=("retrieval",), lengths=(length,)), _silent)


def _silent(what: str, done: int, total: int) -> None:
    pass
