"""`ml4 checkpoint make`: writes, keeps, replaces, and refuses what is half there."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ml4core.models.checkpoint import Checkpoint
from ml4core.models.safetensors_writer import ShardWriter
from ml4core.models.tensors import load_model_spec, validate


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same maker with fewer layers: seconds in place of a minute for the whole file."""
    import ml4core.models.seeded as seeded

    make = seeded.make_seeded

    def make_small(folder: Path, **settings: Any) -> Path:
        return make(folder, layers=4, hidden=128, heads=2, experts=4, dense_width=128, **settings)

    monkeypatch.setattr(seeded, "make_seeded", make_small)


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


def test_writes_a_complete_checkpoint(ml4: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    done = ml4("checkpoint", "make", str(folder))
    assert (done.code, done.out) == (0, "")
    opened = Checkpoint.open(folder)
    validate(opened, load_model_spec(opened))
    assert (folder / "tekken.json").is_file()


def test_same_seed_same_bytes(ml4: Any, tmp_path: Path) -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert ml4("checkpoint", "make", str(tmp_path / name), "--seed", seed).code == 0
    a, b, c = (digests(tmp_path / name) for name in "abc")
    assert a == b
    assert a["consolidated.safetensors"] != c["consolidated.safetensors"]


@pytest.mark.parametrize(
    ("format", "kinds"),
    [
        ("bf16", {"bf16"}),
        ("fp32", {"fp32"}),
        ("fp8_block", {"bf16", "fp8_block"}),
        ("fp8_tensor", {"bf16", "fp8_tensor"}),
        ("nvfp4_ct", {"bf16", "fp8_block", "nvfp4"}),
        ("nvfp4_modelopt", {"bf16", "fp8_block", "nvfp4"}),
        ("mxfp4", {"bf16", "fp8_block", "mxfp4"}),
    ],
)
def test_formats(ml4: Any, tmp_path: Path, format: str, kinds: set[str]) -> None:
    folder = tmp_path / "m"
    assert ml4("checkpoint", "make", str(folder), "--format", format).code == 0
    found = ml4("inspect", str(folder), "--json").json["checkpoint"]["formats"]
    assert set(found) == kinds


def test_what_is_there_is_kept_or_replaced_as_asked(ml4: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    make = ["checkpoint", "make", str(folder)]
    assert ml4(*make, "--if-missing").code == 0
    first = digests(folder)
    done = ml4(*make, "--seed", "1")
    assert (done.code, done.out) == (1, "")
    assert "--overwrite" in done.err
    assert "--if-missing" in done.err
    assert ml4(*make, "--seed", "1", "--if-missing").code == 0
    assert digests(folder) == first
    assert ml4(*make, "--seed", "1", "--if-missing", "--overwrite").code == 0
    assert digests(folder) == first
    assert ml4(*make, "--seed", "1", "--overwrite").code == 0
    assert digests(folder) != first


@pytest.mark.parametrize("lost", ["params.json", "consolidated.safetensors", "tekken.json"])
def test_if_missing_checks_that_all_is_there(ml4: Any, tmp_path: Path, lost: str) -> None:
    folder = tmp_path / "m"
    make = ["checkpoint", "make", str(folder)]
    assert ml4(*make).code == 0
    (folder / lost).unlink()
    done = ml4(*make, "--if-missing")
    assert (done.code, done.out) == (1, "")
    assert "--overwrite makes it anew" in done.err
    assert not (folder / lost).exists()
    assert ml4(*make, "--if-missing", "--overwrite").code == 0
    assert (folder / lost).exists()


def test_if_missing_finds_a_cut_file(ml4: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    assert ml4("checkpoint", "make", str(folder)).code == 0
    file = folder / "consolidated.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    done = ml4("checkpoint", "make", str(folder), "--if-missing")
    assert (done.code, done.out) == (1, "")
    assert "consolidated.safetensors" in done.err


def test_an_empty_folder_counts_as_missing(ml4: Any, tmp_path: Path) -> None:
    assert ml4("checkpoint", "make", str(tmp_path), "--if-missing").code == 0
    assert (tmp_path / "params.json").is_file()


@pytest.mark.parametrize(
    "words", [["--seed", "-1"], ["--seed", "x"], ["--format", "int4"], ["--layers", "3"]]
)
def test_usage_errors(ml4: Any, tmp_path: Path, words: list[str]) -> None:
    done = ml4("checkpoint", "make", str(tmp_path / "m"), *words)
    assert (done.code, done.out) == (2, "")
    assert words[0] in done.err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_gets_full_leaves_what_was_there(
    ml4: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    folder = tmp_path / "m"
    if there:
        assert ml4("checkpoint", "make", str(folder)).code == 0
    before = digests(folder) if there else {}

    def full(shard: ShardWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "finish", full)  # when all but the header is written
    done = ml4("checkpoint", "make", str(folder), "--seed", "1", "--overwrite")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: {folder}: can't be written: No space left on device\n"
    assert folder.exists() == there
    assert (digests(folder) if there else {}) == before


def test_a_file_in_the_way(ml4: Any, tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_text("x", "utf-8")
    done = ml4("checkpoint", "make", str(file))
    assert (done.code, done.out) == (1, "")
    assert str(file) in done.err
    assert "Traceback" not in done.err


def stopped_in_the_middle(folder: Path, number: signal.Signals, *words: str) -> tuple[int, str]:
    """Exit code and words of a process that was sent a signal while it wrote tensors."""
    command = [sys.executable, "-m", "ml4core", "checkpoint", "make", str(folder), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        spool = folder / ".writing" / "1-spool"
        deadline = time.monotonic() + 120
        while not (spool.exists() and spool.stat().st_size):
            assert process.poll() is None, "it was done before the signal"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(number)
        words_said = process.communicate(timeout=120)[1]
    return process.returncode, words_said


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("number", "there"),
    [
        (signal.SIGTERM, True),
        (signal.SIGHUP, True),
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        pytest.param(signal.SIGHUP, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_what_was_there(
    ml4: Any, tmp_path: Path, number: signal.Signals, there: bool
) -> None:
    folder = tmp_path / "m"
    if there:
        assert ml4("checkpoint", "make", str(folder)).code == 0
    before = digests(folder) if there else {}
    code, said = stopped_in_the_middle(folder, number, "--seed", "1", "--overwrite")
    assert code == 128 + number
    assert said == ("" if number == signal.SIGINT else f"ended by {number.name}\n")
    assert folder.exists() == there
    assert (digests(folder) if there else {}) == before


@pytest.mark.multiprocess
def test_what_a_killed_run_left_is_named_and_goes_with_the_next(ml4: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    code, _ = stopped_in_the_middle(folder, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert os.listdir(folder) == [".writing"]
    done = ml4("checkpoint", "make", str(folder))
    assert (done.code, done.out) == (1, "")
    assert "not empty: '.writing'; a process that was killed left '.writing'" in done.err
    assert "--overwrite replaces it" in done.err
    done = ml4("checkpoint", "make", str(folder), "--if-missing")
    assert (done.code, done.out) == (1, "")
    assert "--overwrite makes it anew" in done.err
    assert ml4("checkpoint", "make", str(folder), "--overwrite").code == 0
    assert sorted(digests(folder)) == ["consolidated.safetensors", "params.json", "tekken.json"]
