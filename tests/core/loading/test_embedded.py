"""The shipped checkpoint: whole, small enough, found by its name, and refused once damaged."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest

from ml4core.models import embedded
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark import with_drafter
from ml4core.models.dspark_weights import validate_draft
from ml4core.models.embedded import EMBEDDED, SUMS_FILE, check_sums, embedded_folder
from ml4core.models.errors import CheckpointError
from ml4core.models.hub import is_local, resolve_model
from ml4core.models.quantize import QuantizeOptions, quantize
from ml4core.models.tensors import load_model_spec, validate
from ml4core.serving.tokenizer import Tokenizer, find_tokenizer

MOST_BYTES = 32 * 10**6
LISTED = ("consolidated.safetensors", "params.json", "tekken.json")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that takes the shipped one's place, its tensors a few bytes."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, content in zip(LISTED, (b"tensors", b"{}", b"ids"), strict=True):
        folder.joinpath(name).write_bytes(content)
    folder.joinpath(SUMS_FILE).write_text(embedded.sums_text(folder, list(LISTED)), "utf-8")
    monkeypatch.setattr(embedded, "embedded_folder", lambda: folder)
    return folder


def test_its_files_are_those_of_the_list() -> None:
    folder = embedded_folder()
    check_sums(folder)
    lines = (folder / SUMS_FILE).read_text("utf-8").splitlines()
    assert tuple(line.split("  ")[1] for line in lines) == LISTED
    assert (folder / LISTED[0]).stat().st_size <= MOST_BYTES


def test_it_is_a_whole_checkpoint_with_a_drafter_and_a_tokenizer() -> None:
    folder = embedded_folder()
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    assert spec.name == EMBEDDED
    report = validate(checkpoint, spec)
    assert "fp8_block" in report.formats
    draft = with_drafter(checkpoint, spec).draft
    assert draft is not None
    assert draft.depth == 3
    assert "fp8_block" in validate_draft(checkpoint, draft).formats
    tokenizer = Tokenizer.load(find_tokenizer(folder))
    assert (tokenizer.version, tokenizer.vocab_size) == ("v15", spec.vocab_size)


def test_its_tokenizer_is_the_only_copy() -> None:
    assets = Path(str(resources.files("ml4core"))) / "assets"
    assert [path.parent.name for path in assets.rglob("*tekken*")] == [EMBEDDED]


def test_its_name_is_no_download_and_wins_over_a_folder(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / EMBEDDED).mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_local(EMBEDDED)
    assert resolve_model(EMBEDDED) == copy
    assert resolve_model(f"./{EMBEDDED}") == Path(EMBEDDED)
    assert embedded.local_checkpoint(Path("elsewhere")) == Path("elsewhere")
    with pytest.raises(CheckpointError, match="no revision 'v2'"):
        resolve_model(EMBEDDED, "v2")


@pytest.mark.parametrize("name", LISTED)
def test_a_damaged_file_is_named_with_both_sums(copy: Path, name: str) -> None:
    wanted = dict(
        reversed(line.split("  ")) for line in (copy / SUMS_FILE).read_text("utf-8").splitlines()
    )[name]
    path = copy / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError) as raised:
        resolve_model(EMBEDDED)
    text = str(raised.value)
    assert text.startswith(f"{path}: damaged: its SHA-256 is ")
    assert f"{SUMS_FILE} says {wanted}" in text
    assert "pip install --force-reinstall" in text
    assert "git checkout -- ml4core/assets/ml4-tiny" in text


@pytest.mark.parametrize("name", [SUMS_FILE, *LISTED])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match="can't be read: No such file"):
        resolve_model(EMBEDDED)


@pytest.mark.parametrize("line", ["nonsense", f"{'0' * 64}  ../other", f"{'0' * 64} one-space"])
def test_a_list_of_another_form_is_refused(copy: Path, line: str) -> None:
    (copy / SUMS_FILE).write_text(line + "\n", "utf-8")
    with pytest.raises(CheckpointError, match="a line is"):
        resolve_model(EMBEDDED)


def test_a_converted_copy_leaves_the_list_behind(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(embedded_folder(), source)
    report = quantize(source, tmp_path / "bf16", QuantizeOptions("bf16"))
    assert SUMS_FILE in " ".join(report.notes)
    assert not (tmp_path / "bf16" / SUMS_FILE).exists()
    params = json.loads((tmp_path / "bf16" / "params.json").read_text("utf-8"))
    stated = json.loads((source / "params.json").read_text("utf-8"))
    assert stated.pop("quantization")
    assert params == stated
