"""`ml4 quantize`: words, exit codes, progress."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch

from ml4core.cli import main, output
from ml4core.formats import mxfp4
from ml4core.models.checkpoint_writer import CheckpointWriter
from ml4core.models.quantize_options import MXFP4Rule


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def ml4(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def run(*argv: str | Path) -> Done:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        return Done(code, *capsys.readouterr())

    return run


def test_every_scale_rule_has_a_word() -> None:
    assert sorted(get_args(MXFP4Rule)) == sorted(mxfp4.RULES)


def test_help(ml4: Any) -> None:
    done = ml4("quantize", "--help")
    assert (done.code, done.err) == (0, "")
    for word in ("--to", "--experts-only", "--all", "--mxfp4-rule", "TARGET.partial"):
        assert word in done.out
    assert "[required]" in done.out


def test_a_checkpoint_is_converted(ml4: Any, bf16: Path, tmp_path: Path) -> None:
    done = ml4("quantize", bf16, tmp_path / "t", "--to", "mxfp4", "--mxfp4-rule", "ceil")
    assert (done.code, done.out) == (0, "")
    assert f"wrote {tmp_path / 't'}: 1 files" in done.err
    assert "18 matrices bf16 -> mxfp4" in done.err
    assert "bf16 as they were" in done.err
    assert '"scale_calculation_mode": "ceil"' in (tmp_path / "t" / "params.json").read_text()
    done = ml4("inspect", tmp_path / "t", "--json")
    assert done.code == 0
    assert json.loads(done.out)["checkpoint"]["formats"]["mxfp4"]["matrices"] == 18


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "Missing option '--to'"),
        (["--to", "int4"], "'int4' is not one of"),
        (
            ["--to", "mxfp4", "--nvfp4-form", "modelopt"],
            "--nvfp4-form modelopt: for --to nvfp4 only",
        ),
        (["--to", "nvfp4", "--mxfp4-rule", "even"], "--mxfp4-rule even: for --to mxfp4 only"),
        (["--to", "fp8_block", "--rest", "bf16"], "--experts-only leaves a rest"),
        (["--to", "mxfp4", "--all", "--rest", "fp8_block"], "--experts-only leaves a rest"),
        (["--to", "mxfp4", "--max-shard-bytes", "0"], "'--max-shard-bytes'"),
    ],
)
def test_a_wrong_command_line(
    ml4: Any, bf16: Path, tmp_path: Path, words: list[str], text: str
) -> None:
    done = ml4("quantize", bf16, tmp_path / "t", *words)
    assert (done.code, done.out) == (2, "")
    assert text in done.err
    assert os.listdir(tmp_path) == []


def test_errors(ml4: Any, tmp_path: Path) -> None:
    done = ml4("quantize", tmp_path / "no", tmp_path / "t", "--to", "bf16")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert "no: no such folder" in done.err
    weight = torch.ones(4, 32)
    weight[2, 0] = float("nan")
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.add_json("params.json", {"dim": 32})
        writer.add("layers.1.experts.0.w1.weight", weight)
    done = ml4("quantize", tmp_path / "m", tmp_path / "t", "--to", "mxfp4")
    assert done.code == 1
    assert "layers.1.experts.0.w1.weight: 1 NaN values, the first in row 2" in done.err
    assert sorted(os.listdir(tmp_path)) == ["m"]


def test_progress(ml4: Any, bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    @contextmanager
    def bar(what: str) -> Iterator[Any]:
        assert "mxfp4" in what
        yield lambda *at: seen.append(at)

    monkeypatch.setattr(output, "progress_bar", bar)
    assert ml4("quantize", bf16, tmp_path / "t", "--to", "mxfp4").code == 0
    size = (bf16 / "consolidated.safetensors").stat().st_size
    assert {total for _, total in seen} == {seen[-1][0]}
    assert 0.9 * size < seen[-1][0] < size
    assert seen == sorted(seen)
