"""The writer: valid files, bounded shards, and all of the folder or nothing."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from ml4core.models import checkpoint_writer
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.errors import CheckpointError
from ml4core.models.folder_lock import FolderLock
from ml4core.models.safetensors_file import DTYPES


def content_of(folder: Path) -> dict[str, bytes]:
    """Each file, and each folder, whatever is in it."""
    return {
        path.name: path.read_bytes() if path.is_file() else b"a folder"
        for path in sorted(folder.iterdir())
    }


def test_one_shard(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "new" / "folder") as writer:
        writer.add_json("params.json", {"dim": 8})
        writer.add("a", torch.arange(6).reshape(2, 3))
    folder = tmp_path / "new" / "folder"
    assert sorted(content_of(folder)) == ["consolidated.safetensors", "params.json"]
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.params == {"dim": 8}
    assert checkpoint.notes == []
    assert torch.equal(checkpoint.read("a"), torch.arange(6).reshape(2, 3))
    with safe_open(folder / "consolidated.safetensors", "pt") as library:
        assert library.metadata() == {"format": "pt"}


def test_several_shards(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight": torch.full((5, 5), float(n)) for n in range(7)}
    with CheckpointWriter(tmp_path, max_shard_bytes=250) as writer:
        writer.add_json("params.json", {})
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"consolidated-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    index = json.loads((tmp_path / "consolidated.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 700}
    assert index["weight_map"]["layers.6.weight"] == "consolidated-00004-of-00004.safetensors"
    loaded = {name: t for file in files for name, t in load_file(tmp_path / file).items()}
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert torch.equal(loaded[name], tensor)


def test_tensor_larger_than_a_shard(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, max_shard_bytes=10) as writer:
        for name, size in [("a", 4), ("b", 100), ("c", 4), ("d", 6)]:
            writer.add(name, torch.zeros(size, dtype=torch.uint8))
        writer.add_json("params.json", {})
    sizes = [
        sorted(load_file(path)) for path in sorted(tmp_path.glob("consolidated-*.safetensors"))
    ]
    assert sizes == [["a"], ["b"], ["c", "d"]]


tensors = st.tuples(
    st.sampled_from(sorted(set(DTYPES) - {"F8_E8M0"})), st.lists(st.integers(0, 5), max_size=3)
)


@settings(max_examples=60)
@given(
    st.dictionaries(st.text(min_size=1, max_size=9), tensors, min_size=1, max_size=6),
    st.integers(1, 300),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, tuple], most: int
) -> None:
    folder = tmp_path_factory.mktemp("round")
    written: dict[str, torch.Tensor] = {}
    with CheckpointWriter(folder, most) as writer:
        writer.add_json("params.json", {})
        for seed, (name, (dtype, shape)) in enumerate(content.items()):
            size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
            raw = (torch.arange(size) * 37 + seed).remainder(2 if dtype == "BOOL" else 251)
            written[name] = raw.to(torch.uint8).view(DTYPES[dtype]).reshape(shape)
            writer.add(name, written[name])
    checkpoint = Checkpoint.open(folder)
    library: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        library |= load_file(path)
    assert set(checkpoint.tensors) == set(library) == set(written)
    for name, tensor in written.items():
        info = checkpoint.tensors[name]
        assert info.start % info.torch_dtype.itemsize == 0
        for found in (checkpoint.read(name), library[name]):
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(
                found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            )


def test_any_strides(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    complex_base = torch.view_as_complex(base.reshape(4, 3, 2))
    given = {
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": base[:1].expand(3, 6),
        "offset": base[2:],
        "conjugate": complex_base.conj(),
        "parameter": torch.nn.Parameter(base),
    }
    with CheckpointWriter(tmp_path) as writer:
        writer.add_json("params.json", {})
        for name, tensor in given.items():
            writer.add(name, tensor)
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in given.items():
        assert torch.equal(checkpoint.read(name), tensor), name


def test_scale_exponents(tmp_path: Path) -> None:
    raw = torch.tensor([0, 127, 255], dtype=torch.uint8)
    with CheckpointWriter(tmp_path) as writer:
        writer.add_json("params.json", {})
        writer.add("named", raw, dtype="F8_E8M0")
        writer.add("typed", raw.view(torch.float8_e8m0fnu))
        writer.add("plain", raw)
    checkpoint = Checkpoint.open(tmp_path)
    dtypes = {name: info.dtype for name, info in checkpoint.tensors.items()}
    assert dtypes == {"named": "F8_E8M0", "typed": "F8_E8M0", "plain": "U8"}
    for name in dtypes:
        assert checkpoint.read(name).tolist() == [0, 127, 255]


def test_memory_is_one_tensor(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    tracemalloc.start()
    with CheckpointWriter(tmp_path, max_shard_bytes=64 << 20) as writer:
        for number in range(48):
            writer.add(f"t{number}", tensor)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "consolidated.safetensors").stat().st_size > 48 << 20
    assert peak < 20 << 20


# --- all or nothing


def test_no_final_name_before_close(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, max_shard_bytes=10)
    for number in range(4):
        writer.add(f"t{number}", torch.zeros(10, dtype=torch.uint8))
        writer.add_json(f"{number}.json", {})
    assert [path.name for path in tmp_path.iterdir()] == [".writing"]
    writer.abort()
    assert content_of(tmp_path) == {}


def test_error_inside_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "made"

    def fail() -> None:
        with CheckpointWriter(folder, max_shard_bytes=10) as writer:
            writer.add("a", torch.zeros(10))
            writer.add("b", torch.zeros(10))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not folder.exists()


def fill(writer: CheckpointWriter, value: float = 1.0) -> None:
    with writer:
        writer.add_json("params.json", {"value": value})
        for number in range(3):
            writer.add(f"t{number}", torch.full((4,), value))


@pytest.mark.parametrize("failing", range(5))
def test_rename_that_fails_leaves_nothing(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, count = Path.rename, 0

    def broken(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == failing + 1:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(CheckpointError, match="can't be written: No space left"):
        fill(CheckpointWriter(tmp_path, max_shard_bytes=16))
    assert count == failing + 1
    assert content_of(tmp_path) == {}


@pytest.mark.parametrize("failing", range(10))
def test_rename_that_fails_brings_the_old_files_back(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(CheckpointWriter(tmp_path, max_shard_bytes=16))
    before = content_of(tmp_path)
    assert len(before) == 5
    rename, count = Path.rename, 0

    def broken(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == failing + 1:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    writer = CheckpointWriter(tmp_path, max_shard_bytes=16, overwrite=True)
    with pytest.raises(CheckpointError, match="Input/output"):
        fill(writer, value=2.0)
    assert count > failing
    assert content_of(tmp_path) == before


def test_disk_full_during_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter(tmp_path)
    writer.add("a", torch.zeros(4))
    monkeypatch.setattr("ml4core.models.safetensors_writer.ShardWriter.add", full)
    with pytest.raises(CheckpointError, match="No space left"):
        writer.add("b", torch.zeros(4))
    assert content_of(tmp_path) == {}
    with pytest.raises(CheckpointError, match="writer is closed"):
        writer.add("c", torch.zeros(4))


def test_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"not empty: 'params\.json'.*overwrite=True"):
        CheckpointWriter(tmp_path)
    assert sorted(content_of(tmp_path)) == ["params.json"]


def test_overwrite_replaces_a_longer_set(tmp_path: Path) -> None:
    fill(CheckpointWriter(tmp_path, max_shard_bytes=16))
    (tmp_path / "tekken.json").write_text("{}")
    fill(CheckpointWriter(tmp_path, overwrite=True), value=2.0)
    assert sorted(content_of(tmp_path)) == [
        "consolidated.safetensors", "params.json", "tekken.json"
    ]  # fmt: skip
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.params == {"value": 2.0}
    assert checkpoint.read("t2").tolist() == [2.0] * 4


def test_what_a_killed_process_left_is_named_and_cleared(tmp_path: Path) -> None:
    fill(CheckpointWriter(tmp_path, max_shard_bytes=16))
    before = content_of(tmp_path)
    (tmp_path / ".writing" / "deep").mkdir(parents=True)
    (tmp_path / ".writing" / "deep" / "x").write_text("x")
    (tmp_path / ".writing" / "7-spool").write_text("x")
    (tmp_path / ".replaced-ab-consolidated.safetensors").write_text("x")
    left = content_of(tmp_path)
    with pytest.raises(CheckpointError) as error:
        CheckpointWriter(tmp_path)
    assert (
        "a process that was killed left '.replaced-ab-consolidated.safetensors', '.writing'"
        in str(error.value)
    )
    assert content_of(tmp_path) == left
    fill(CheckpointWriter(tmp_path, max_shard_bytes=16, overwrite=True))
    assert content_of(tmp_path) == before


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = CheckpointWriter(tmp_path / "m")
    first.add("a", torch.ones(4))
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="another process is writing it"):
            CheckpointWriter(tmp_path / "m", overwrite=overwrite)
    first.close()
    assert sorted(content_of(tmp_path / "m")) == ["consolidated.safetensors"]
    CheckpointWriter(tmp_path / "m", overwrite=True).abort()
    assert sorted(content_of(tmp_path / "m")) == ["consolidated.safetensors"]


def test_a_writer_that_finishes_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at an empty folder and the lock."""
    lock = checkpoint_writer.FolderLock

    def late(*args: Path) -> FolderLock:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_writer, "FolderLock", lock)
            fill(CheckpointWriter(tmp_path))
        return lock(*args)

    monkeypatch.setattr(checkpoint_writer, "FolderLock", late)
    with pytest.raises(CheckpointError, match=r"not empty: 'consolidated\.safetensors'"):
        CheckpointWriter(tmp_path)
    assert sorted(content_of(tmp_path)) == ["consolidated.safetensors", "params.json"]


def test_overwrite_stops_at_a_folder(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="a folder, which can't be replaced"):
        fill(CheckpointWriter(tmp_path, overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == ["consolidated.safetensors"]


def test_target_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(CheckpointError, match="file: can't be written: File exists"):
        CheckpointWriter(path)
    assert path.read_text() == "x"


def test_a_file_that_is_there_already_is_written_as_it_is(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    content = b'{ "a" : 1.0 }\n\xff'
    writer.add_file("tekken.json", content)
    for name in ("tekken.json", "../x.json", "x.txt", "consolidated.json"):
        with pytest.raises(CheckpointError):
            writer.add_file(name, b"")
    assert "tekken.json" not in content_of(tmp_path), "a final name before all is there"
    fill(writer)
    assert (tmp_path / "tekken.json").read_bytes() == content


def test_close_twice(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    fill(writer)
    before = content_of(tmp_path)
    writer.close()
    writer.abort()
    assert content_of(tmp_path) == before


def test_nothing_added(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor was added"):
        CheckpointWriter(tmp_path).close()


# --- what is refused, with the writer still usable


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (lambda w: w.add("a", torch.zeros(1)), "'a' added twice"),
        (lambda w: w.add("", torch.zeros(1)), "name '' can't be used"),
        (lambda w: w.add("__metadata__", torch.zeros(1)), "'__metadata__' can't be used"),
        (lambda w: w.add("\ud800", torch.zeros(1)), "no UTF-8 form"),
        (lambda w: w.add("x" * 70_000, torch.zeros(1)), "too long for a header"),
        (lambda w: w.add("m", torch.zeros(1, device="meta")), "meta can't be written"),
        (lambda w: w.add("s", torch.zeros(2, 2).to_sparse()), "torch.sparse_coo, torch.float32"),
        (lambda w: w.add("c", torch.zeros(1, dtype=torch.complex128)), "complex128 can't be"),
        (lambda w: w.add("d", torch.zeros([1] * 33)), "33 dimensions; at most 32"),
        (lambda w: w.add("t", torch.zeros(1), dtype="F64"), "float32 can't be stored as 'F64'"),
        (lambda w: w.add("t", torch.zeros(1), dtype="F128"), "can't be stored as 'F128'"),
        (lambda w: w.add_json("../p.json", {}), "plain name"),
        (lambda w: w.add_json("p.txt", {}), "plain name"),
        (lambda w: w.add_json("params.json", {}), "params.json is taken"),
        (lambda w: w.add_json("consolidated.safetensors.index.json", {}), "is taken"),
        (lambda w: w.add_json("p.json", {"a": float("nan")}), "can't be written as JSON"),
        (lambda w: w.add_json("p.json", {"a": object()}), "can't be written as JSON"),
    ],
)
def test_refused(add: Callable[[CheckpointWriter], None], says: str, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.add_json("params.json", {})
        writer.add("a", torch.ones(1))
        with pytest.raises(CheckpointError, match=says):
            add(writer)
        writer.add("b", torch.ones(2))
    assert sorted(Checkpoint.open(tmp_path).tensors) == ["a", "b"]


def test_refused_settings(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="max_shard_bytes is 0"):
        CheckpointWriter(tmp_path, 0)
    with pytest.raises(CheckpointError, match="metadata 'a': 1: both must be text"):
        CheckpointWriter(tmp_path, metadata={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="metadata takes more than"):
        CheckpointWriter(tmp_path, metadata={"a": "x" * (5 << 20)})
