"""`ml4 inspect`: the published model, a small checkpoint, and broken ones."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from ml4core.cli.inspect import ranges

PUBLISHED = Path(str(resources.files("ml4core") / "assets" / "published" / "params.json"))


def test_the_published_model(ml4: Any) -> None:
    done = ml4("inspect", str(PUBLISHED))
    assert (done.code, done.err) == (0, "")
    lines = {" ".join(line.split()) for line in done.out.splitlines()}
    assert {
        "cache bytes a token, fp8_ds_mla 47,136",
        "cache bytes a token, e4m3 42,096",
        "cache bytes a token, bf16 78,384",
        "latent owners 63",
        "index owners 44",
        "layers 72 of hidden size 6,144",
    } <= lines
    assert any(line.startswith("39,43,47,51,55,59,63,67,71 9 nope+kv_consumer") for line in lines)
    assert any(line.startswith("A4/vocab_size ") for line in lines)
    assert "note: params.json alone was read" in done.out


def test_the_published_model_as_json(ml4: Any) -> None:
    facts = ml4("inspect", str(PUBLISHED), "--json").json
    assert facts["kv"] == {
        "latent_owners": 63,
        "index_owners": 44,
        "bytes_per_token": {"fp8_ds_mla": 47136, "e4m3": 42096, "bf16": 78384},
    }
    assert len(facts["layers"]) == 72
    assert facts["assumptions"]
    assert "checkpoint" not in facts


def test_a_checkpoint(ml4: Any, checkpoint: Path) -> None:
    done = ml4("inspect", str(checkpoint))
    assert (done.code, done.err) == (0, "")
    facts = ml4("inspect", str(checkpoint), "--json").json
    stored = facts["checkpoint"]
    assert f"{stored['bytes']:,}" in done.out
    assert "bf16 matrices" in done.out
    assert stored["bytes"] <= sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    columns = [line.split() for line in done.out.splitlines() if "kv_owner" in line]
    assert sum(int(line[1]) for line in columns) == len(facts["layers"])


def test_a_folder_with_params_alone(ml4: Any, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "params.json", tmp_path)
    done = ml4("inspect", str(tmp_path))
    assert done.code == 0
    assert "TENSORS" not in done.out


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: (folder / "params.json").unlink(), "no params.json"),
        (lambda folder: (folder / "params.json").write_text("{"), "params.json: not JSON"),
        (lambda folder: (folder / "params.json").write_text("{}"), "dim"),
        (lambda folder: shutil.rmtree(folder), "no such folder"),
        (
            lambda folder: (folder / "consolidated.safetensors").write_bytes(b"\0" * 4),
            "consolidated.safetensors",
        ),
        (
            lambda folder: _edit(folder, lambda params: params.update(n_layers=5)),
            "layers.4.",
        ),
    ],
)
def test_problems_end_with_1_and_no_traceback(
    ml4: Any, checkpoint: Path, tmp_path: Path, change: Any, told: str, as_json: list[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    change(folder)
    done = ml4("inspect", str(folder), *as_json)
    assert (done.code, done.out) == (1, "")
    assert told in done.err
    assert "Traceback" not in done.err


def _edit(folder: Path, change: Any) -> None:
    params = json.loads((folder / "params.json").read_text("utf-8"))
    change(params)
    indexer = params["indexer"]
    indexer["topk_pattern"] = indexer["topk_pattern"] + "S"
    (folder / "params.json").write_text(json.dumps(params), "utf-8")


def test_text_out_of_a_file_can_not_steer_the_terminal(
    ml4: Any, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a\x1b[2J\rb"
    shutil.copytree(checkpoint, folder)
    done = ml4("inspect", str(folder))
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\\x1b[2J" in done.out


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([7, 0, 1, 2, 4, 6]) == "0-2,4,6-7"
