"""A run that is stopped anywhere leaves nothing under the final name, and the same call goes on."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.quantize import QuantizeOptions, quantize
from ml4core.models.safetensors_planned import PlannedShard
from ml4core.models.seeded import make_seeded
from ml4core.models.staged_folder import RECORD

OPTIONS = QuantizeOptions(to="nvfp4", rest="fp8_block", max_shard_bytes=60_000)
COMMAND = ["--to", "nvfp4", "--rest", "fp8_block", "--max-shard-bytes", "60000"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small as can be: it is converted again and again."""
    dims: dict[str, Any] = {
        "layers": 2,
        "hidden": 64,
        "heads": 2,
        "experts": 4,
        "expert_width": 64,
        "vocab": 320,
    }
    folder = make_seeded(tmp_path_factory.mktemp("stop") / "m", dense_width=64, **dims)
    (folder / "tekken.json").write_text('{"short": 1}')  # copied often; nothing here reads it
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    target = tmp_path_factory.mktemp("whole") / "m"
    quantize(source, target, OPTIONS)
    return {path.name: path.read_bytes() for path in sorted(target.iterdir())}


class Stop(BaseException):
    """No error that anything handles, like a signal's."""


class Counted:
    """Passes calls on, and stops at one of them: before it, or after."""

    def __init__(
        self, inner: Callable[..., Any], at: int, error: BaseException, after: bool
    ) -> None:
        self.inner, self.at, self.error, self.after = inner, at, error, after
        self.calls = 0

    def patched(self) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.at and not self.after:
                raise self.error
            result = self.inner(*args, **named)
            if self.calls == self.at:
                raise self.error
            return result

        return call


def check_stopped(target: Path) -> None:
    """Nothing that could be taken for a checkpoint."""
    assert not target.exists()
    partial = target.with_name(target.name + ".partial")
    if partial.exists():
        assert (partial / RECORD).stat().st_size < 10_000
        with pytest.raises(CheckpointError):
            Checkpoint.open(target)


PLACES = {
    "write": (PlannedShard, "write"),
    "fsync": (os, "fsync"),
    "replace": (Path, "replace"),
    "rename": (os, "rename"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["stop", "error"])
def test_stopped_at_every_call(
    source: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content_of: Any,
    place: str,
    kind: str,
    after: bool,
) -> None:
    owner, name = PLACES[place]
    inner = getattr(owner, name)
    count = Counted(inner, 0, Stop(), False)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, count.patched())
        quantize(source, tmp_path / "count", OPTIONS)
    assert count.calls > (0 if place == "rename" else 10)
    every = (place, kind, after) == ("write", "stop", False)
    step = 1 if every else max(count.calls // 6, 1)
    for at in [*range(1, count.calls, step), count.calls]:
        target = tmp_path / f"at{at}"
        error = Stop() if kind == "stop" else OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Counted(inner, at, error, after).patched())
            with pytest.raises(Stop if kind == "stop" else CheckpointError):
                quantize(source, target, OPTIONS)
        if not target.exists():
            check_stopped(target)
        else:  # published; at most the record is left over
            assert {*os.listdir(target)} - {RECORD} == {*whole}
            assert place in ("rename", "fsync")
        if (target / RECORD).exists() or not target.exists():
            quantize(source, target, OPTIONS)
        assert content_of(target) == whole
        assert not target.with_name(target.name + ".partial").exists()
        shutil.rmtree(target)


def test_finished_files_are_not_done_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Counted(PlannedShard.write, 40, Stop(), False)
    with monkeypatch.context() as patch:
        patch.setattr(PlannedShard, "write", count.patched())
        with pytest.raises(Stop):
            quantize(source, tmp_path / "t", OPTIONS)
    partial = tmp_path / "t.partial"
    done = {path: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert len(done) > 1
    seen: list[tuple[int, int]] = []
    report = quantize(source, tmp_path / "t", OPTIONS, lambda *at: seen.append(at))
    assert report.resumed == len(done)
    assert all((tmp_path / "t" / p.name).stat().st_mtime_ns == at for p, at in done.items())
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)
    assert seen[0][0] > 0
    assert seen[-1][0] == seen[-1][1] == report_total(source)


def report_total(source: Path) -> int:
    """Bytes of the source, experts twice: their largest value is looked for first."""
    infos = Checkpoint.open(source).tensors.values()
    return sum(info.nbytes * (2 if ".experts." in info.name else 1) for info in infos)


def test_a_cut_or_foreign_file_is_written_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    content_of: Any,
) -> None:  # fmt: skip
    count = Counted(PlannedShard.write, 40, Stop(), False)
    with monkeypatch.context() as patch:
        patch.setattr(PlannedShard, "write", count.patched())
        with pytest.raises(Stop):
            quantize(source, tmp_path / "t", OPTIONS)
    one, two = sorted((tmp_path / "t.partial").glob("*.safetensors"))[:2]
    one.write_bytes(one.read_bytes()[:-1])
    two.write_bytes(b"x" * two.stat().st_size)
    (tmp_path / "t.partial" / "consolidated-00009-of-00009.safetensors.writing").write_bytes(b"x")
    quantize(source, tmp_path / "t", OPTIONS)
    assert content_of(tmp_path / "t") == whole


@pytest.fixture
def stopped(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target whose run was stopped."""
    with monkeypatch.context() as patch:
        patch.setattr(
            PlannedShard, "write", Counted(PlannedShard.write, 40, Stop(), False).patched()
        )
        with pytest.raises(Stop):
            quantize(source, tmp_path / "t", OPTIONS)
    return tmp_path / "t"


def test_other_options_are_refused(source: Path, stopped: Path) -> None:
    before = sorted(os.listdir(stopped.with_name("t.partial")))
    with pytest.raises(CheckpointError) as error:
        quantize(source, stopped, QuantizeOptions(to="mxfp4", max_shard_bytes=60_000))
    text = str(error.value)
    assert "options to: was 'nvfp4', is 'mxfp4'" in text
    assert "options rest: was 'fp8_block', is 'keep'" in text
    assert "max_shard_bytes" not in text
    assert sorted(os.listdir(stopped.with_name("t.partial"))) == before


def test_another_source_is_refused(source: Path, stopped: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(source, tmp_path / "changed")
    (changed / "tekken.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"source tekken\.json: was '12 bytes"):
        quantize(changed, stopped, OPTIONS)


def test_two_runs_at_once(source: Path, tmp_path: Path) -> None:
    second: list[str] = []

    def at_step(done: int, total: int) -> None:
        if not second:
            with pytest.raises(CheckpointError) as error:
                quantize(source, tmp_path / "t", OPTIONS)
            second.append(str(error.value))

    quantize(source, tmp_path / "t", OPTIONS, at_step)
    assert "another process is writing it" in second[0]
    assert (tmp_path / "t" / "params.json").exists()


def test_a_folder_of_others_is_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "t.partial").mkdir()
    (tmp_path / "t.partial" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="not begun by this command"):
        quantize(source, tmp_path / "t", OPTIONS)
    assert (tmp_path / "t.partial" / "mine").read_text() == "x"


def test_a_target_that_is_taken(source: Path, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    quantize(source, tmp_path / "t", OPTIONS)
    with pytest.raises(CheckpointError, match="not empty"):
        quantize(source, tmp_path / "t", OPTIONS)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: can't be written to: Not a directory"):
        quantize(source, tmp_path / "file", OPTIONS)
    with pytest.raises(CheckpointError, match="not empty"):
        quantize(source, source, OPTIONS)


def test_too_little_room_is_said_before_a_byte_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    needed = sum(len(data) for name, data in whole.items() if name.endswith(".safetensors"))
    needed += len(whole["tekken.json"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(CheckpointError, match=f"{needed} bytes are needed, {needed - 1} are free"):
        quantize(source, tmp_path / "t", OPTIONS)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    quantize(source, tmp_path / "t", OPTIONS)


def test_a_disk_that_fills_up(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content_of: Any,
    whole: dict[str, bytes],
) -> None:  # fmt: skip
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(PlannedShard, "write", Counted(PlannedShard.write, 40, full, False).patched())
        with pytest.raises(CheckpointError) as error:
            quantize(source, tmp_path / "t", OPTIONS)
    assert "No space left on device" in str(error.value)
    assert "bytes are needed" in str(error.value)
    assert "are free" in str(error.value)
    assert not list((tmp_path / "t.partial").glob("*.writing"))  # its room is given back
    quantize(source, tmp_path / "t", OPTIONS)
    assert content_of(tmp_path / "t") == whole


def command(source: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "ml4core", "quantize", str(source), str(target), *COMMAND]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_limit_on_file_sizes(source: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    done = subprocess.run(
        command(source, tmp_path / "t"),
        preexec_fn=limit,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "begin anew with fewer bytes to a file" in done.stderr
    assert not (tmp_path / "t").exists()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("number", "seed"),
    [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGINT, 2), (signal.SIGTERM, 3)],
)
def test_a_signal(tmp_path: Path, content_of: Any, number: signal.Signals, seed: int) -> None:
    dims: dict[str, Any] = {
        "layers": 8,
        "hidden": 256,
        "heads": 2,
        "experts": 16,
        "expert_width": 128,
    }
    source = make_seeded(tmp_path / "source", vocab=320, **dims)
    options = QuantizeOptions(to="nvfp4", rest="fp8_block", max_shard_bytes=60_000)
    quantize(source, tmp_path / "whole", options)
    target, partial = tmp_path / "t", tmp_path / "t.partial"
    # A point in the work, not in time: the first files take as long as all imports.
    wanted = random.Random(seed).randint(1, 40)
    process = subprocess.Popen(
        command(source, target), env=environment(), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while len(list(partial.glob("*.safetensors"))) < wanted and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    words = process.communicate(timeout=120)[1]
    killed = number == signal.SIGKILL
    assert process.returncode == (-number if killed else 128 + number)
    check_stopped(target)
    if not killed:
        assert "t.partial holds what is done; the same command goes on" in words
        assert not list(partial.glob("*.writing"))
    assert quantize(source, target, options).resumed >= wanted
    assert content_of(target) == content_of(tmp_path / "whole")
