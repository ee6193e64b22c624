"""`ml4 eval`: words and files; what is measured is tested where it is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ml4core.evaluation.run
from ml4core.engine.args import EngineArgs
from ml4core.evaluation.parts import DEFAULT_PARTS
from ml4core.evaluation.run import Options

FACTS = {
    "tools": [{"kind": "JSON", "valid": [True, True], "right": [True, False]}],
    "draft": None,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineArgs, Options]]:
    """What is to be measured; nothing is."""
    found: list[tuple[EngineArgs, Options]] = []

    def measure(args: EngineArgs, options: Options, tell: Any) -> Any:
        tell("tools", 0, 2)
        tell("tools", 2, 2)
        found.append((args, options))
        return FACTS

    monkeypatch.setattr(ml4core.evaluation.run, "measure", measure)
    return found


@pytest.mark.parametrize(
    ("words", "model", "parts"),
    [
        ([], "ml4-tiny", DEFAULT_PARTS),
        (["ppl"], "ml4-tiny", ("ppl",)),
        (["draft", "ppl"], "ml4-tiny", ("ppl", "draft")),
        (["./m"], "./m", DEFAULT_PARTS),
        (["./m", "tools", "retrieval"], "./m", ("retrieval", "tools")),
        (["./ppl", "ppl"], "./ppl", ("ppl",)),
    ],
)
def test_a_model_and_parts(
    ml4: Any, asked: Any, words: list[str], model: str, parts: tuple[str, ...]
) -> None:
    done = ml4("eval", *words)
    assert done.code == 0, done.err
    ((args, options),) = asked
    assert (args.model, options.parts) == (model, parts)
    assert done.err.splitlines() == ["measuring: tools", "draft: the checkpoint has no drafter"]
    assert "JSON  2        100%   50%" in done.out


def test_options(ml4: Any, asked: Any, tmp_path: Path) -> None:
    done = ml4(
        *("eval", "ppl", "--text", "t.txt", "--weights", "mxfp4-ceil", "--weights", "nvfp4"),
        *("--length", "300", "--limit", "2", "--kv-cache-dtype", "bfloat16"),
        *("--json", str(tmp_path / "f.json"), "--plot", str(tmp_path / "f.svg")),
    )
    assert done.code == 0, done.err
    ((args, options),) = asked
    weights = ("mxfp4-ceil", "nvfp4")
    assert options == Options(("ppl",), Path("t.txt"), weights, (300,), 2, full=False)
    assert args.kv_cache_dtype == "bfloat16"
    assert json.loads((tmp_path / "f.json").read_text("utf-8")) == FACTS
    assert (tmp_path / "f.svg").read_text("utf-8").startswith("<svg ")


def test_json_alone(ml4: Any, asked: Any) -> None:
    done = ml4("eval", "--json", "-")
    assert done.json == FACTS


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ppl", "mood"], "mood: no such part; works: ppl, retrieval, tools, draft, speed"),
        (["ppl", "./m"], "./m: no such part"),
        (["--weights", "int4"], "--weights int4: no such form; works: bf16, fp8_block"),
        (["--full", "--length", "512"], "--full: contradicts --length"),
        (["--json", "/no/such/f.json"], "its folder does not exist"),
        (["--plot", "/"], "--plot /: is a folder"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_words_that_are_wrong(ml4: Any, asked: Any, words: list[str], told: str) -> None:
    done = ml4("eval", *words)
    assert (done.code, done.out, asked) == (2, "", [])
    assert told in " ".join(done.err.split())
