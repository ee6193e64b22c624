"""Folders: what belongs together, what is missing, what contradicts. B080 is the missing shard."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError

Folder = Callable[..., Path]


def shards(kind: str = "consolidated", count: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    """`count` files of two tensors each."""
    return {
        f"{kind}-{n:05d}-of-{count:05d}.safetensors": {
            f"layers.{n}.wo.weight": torch.full((4, 2), float(n)),
            f"layers.{n}.norm.weight": torch.arange(8).bfloat16(),
        }
        for n in range(1, count + 1)
    }


@pytest.mark.parametrize("kind", ["consolidated", "model"])
@pytest.mark.parametrize("index", [False, True])
def test_opens(kind: str, index: bool, tmp_path: Path, folder: Folder) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, shards(kind), index=index))
    assert set(checkpoint.tensors) == {
        name for tensors in shards(kind).values() for name in tensors
    }
    assert checkpoint.params == {"dim": 8}
    assert checkpoint.hf_config is None
    assert checkpoint.notes == []
    assert checkpoint.nbytes == 3 * (4 * 2 * 4 + 8 * 2)
    assert (
        checkpoint.tensors["layers.2.wo.weight"].file.name == f"{kind}-00002-of-00003.safetensors"
    )
    assert torch.equal(checkpoint.read("layers.2.wo.weight"), torch.full((4, 2), 2.0))


@pytest.mark.parametrize("name", ["consolidated.safetensors", "model.safetensors"])
def test_one_file(name: str, tmp_path: Path, folder: Folder) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, {name: {"a": torch.ones(2)}}))
    assert list(checkpoint.tensors) == ["a"]


def test_the_path_may_be_text(tmp_path: Path, folder: Folder) -> None:
    assert Checkpoint.open(str(folder(tmp_path, shards()))).path == tmp_path


def test_bytes_read_are_counted(tmp_path: Path, folder: Folder) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, shards()))
    assert checkpoint.bytes_read == 0
    rows = checkpoint.read_rows("layers.1.wo.weight", 1, 3)
    assert torch.equal(rows, torch.full((2, 2), 1.0))
    assert checkpoint.bytes_read == 2 * 2 * 4
    checkpoint.read("layers.1.norm.weight")
    assert checkpoint.bytes_read == 2 * 2 * 4 + 8 * 2


def test_bytes_read_by_threads(tmp_path: Path, folder: Folder) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, shards()))

    def work() -> None:
        for _ in range(200):
            checkpoint.read("layers.3.wo.weight")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert checkpoint.bytes_read == 4 * 200 * 32


def test_unknown_tensor(tmp_path: Path, folder: Folder) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, shards()))
    with pytest.raises(CheckpointError, match="no tensor 'x' among the 6"):
        checkpoint.read("x")
    with pytest.raises(CheckpointError, match="no tensor 'x' among the 6"):
        checkpoint.read_rows("x", 0, 1)


# --- B080: a file is missing, or empty


def test_shard_missing_with_index(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards(), index=True)
    (tmp_path / "consolidated-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"1 of the files.*index\.json names.*consolidated-00002-of-00003\.safetensors "
        r"\(2 tensors\)",
    ):
        Checkpoint.open(tmp_path)


def test_shard_missing_without_index(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards())
    (tmp_path / "consolidated-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of 3 files are missing: consolidated-00002-of-00003\.safetensors"
    ):
        Checkpoint.open(tmp_path)


def test_last_shards_missing_without_index(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards(count=12))
    for number in range(2, 13):
        (tmp_path / f"consolidated-{number:05d}-of-00012.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"11 of 12 .*-00002-of-.*-00009-of-.* and 3 more"):
        Checkpoint.open(tmp_path)


def test_all_shards_missing_with_index(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards("model"), index=True)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"3 of the files that model.safetensors.index.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("index", [False, True])
def test_empty_shard(index: bool, tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards(), index=index)
    (tmp_path / "consolidated-00002-of-00003.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"consolidated-00002-of-00003.*: empty file"):
        Checkpoint.open(tmp_path)


def test_shard_is_a_dangling_link(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards(), index=True)
    path = tmp_path / "consolidated-00002-of-00003.safetensors"
    path.unlink()
    path.symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match=r"00002.*no such file.*link whose target is gone"):
        Checkpoint.open(tmp_path)


def test_tensor_missing_from_its_shard(tmp_path: Path, folder: Folder) -> None:
    index = {name: file for file, tensors in shards().items() for name in tensors}
    index["layers.2.wo.scale"] = "consolidated-00002-of-00003.safetensors"
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.\w+ lacks 'layers\.2\.wo\.scale'"):
        Checkpoint.open(folder(tmp_path, shards(), index=index))


def test_tensor_in_another_shard(tmp_path: Path, folder: Folder) -> None:
    index = {name: file for file, tensors in shards().items() for name in tensors}
    index["layers.2.wo.weight"] = "consolidated-00003-of-00003.safetensors"
    with pytest.raises(
        CheckpointError, match=r"'layers.2.wo.weight' in .*-00003-of-.*, but it is in .*-00002-of"
    ):
        Checkpoint.open(folder(tmp_path, shards(), index=index))


def test_tensor_that_the_index_lacks(tmp_path: Path, folder: Folder) -> None:
    index = {name: file for file, tensors in shards().items() for name in tensors}
    del index["layers.2.wo.weight"]
    with pytest.raises(CheckpointError, match=r"does not name 1 of .*'layers\.2\.wo\.weight'"):
        Checkpoint.open(folder(tmp_path, shards(), index=index))


@pytest.mark.parametrize("index", [False, True])
def test_tensor_in_two_shards(index: bool, tmp_path: Path, folder: Folder) -> None:
    content = shards()
    content["consolidated-00003-of-00003.safetensors"]["layers.1.wo.weight"] = torch.ones(1)
    with pytest.raises(
        CheckpointError, match=r"'layers.1.wo.weight' is in both .*-00001-of-\S+ and .*-00003-of-"
    ):
        Checkpoint.open(folder(tmp_path, content, index=index))


# --- which files belong to it


def test_both_kinds(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards("model"), index=True)
    folder(tmp_path, {"consolidated.safetensors": {"a": torch.ones(1)}})
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint.tensors) == ["a"]
    assert checkpoint.notes == [
        "model*.safetensors (3 files) left unread: consolidated*.safetensors is preferred"
    ]


def test_index_of_the_kind_that_is_not_here(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards(), index=True)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    folder(tmp_path, {"model.safetensors": {"a": torch.ones(1)}})
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint.tensors) == ["a"]
    assert "consolidated.safetensors.index.json left unread" in checkpoint.notes[0]


def test_shard_that_the_index_does_not_name(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards(), index=True)
    folder(tmp_path, {"consolidated-extra.safetensors": {"a": torch.ones(1)}})
    checkpoint = Checkpoint.open(tmp_path)
    assert "a" not in checkpoint.tensors
    (note,) = checkpoint.notes
    assert "consolidated-extra.safetensors left unread" in note


def test_parts_of_two_checkpoints(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards(count=2))
    folder(tmp_path, shards(count=3))
    with pytest.raises(CheckpointError, match="numbered of 2 and of 3: parts of two"):
        Checkpoint.open(tmp_path)


def test_number_above_the_total(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, {"model-00004-of-00003.safetensors": {"a": torch.ones(1)}})
    with pytest.raises(CheckpointError, match="model-\\* has number 4 of only 3"):
        Checkpoint.open(tmp_path)


def test_numbers_from_zero(tmp_path: Path, folder: Folder) -> None:
    content = {f"model-0000{n}-of-00002.safetensors": {f"t{n}": torch.ones(1)} for n in range(2)}
    assert len(Checkpoint.open(folder(tmp_path, content)).tensors) == 2


def test_a_total_without_end(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, {"model-000000001-of-999999999.safetensors": {"a": torch.ones(1)}})
    with pytest.raises(CheckpointError, match=r"999999998 of 999999999 .* and 999999990 more"):
        Checkpoint.open(tmp_path)


def test_no_tensor_file(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no consolidated\*.*'consolidated.00.pth'"):
        Checkpoint.open(tmp_path)


# --- the index


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("", "empty file"),
        ("[1]", r"holds \[1\]; it must hold a JSON object"),
        ("{}", "weight_map is None"),
        ('{"weight_map": {}}', r"weight_map is \{\}"),
        ('{"weight_map": ["a"]}', r"weight_map is \['a'\]"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "key 'a' appears twice"),
        ('{"weight_map": {"a": 1}}', "'a' is placed in 1; it must be the name"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "placed in '../secret.safetensors'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "placed in '/etc/passwd'"),
        ('{"weight_map": {"a": "params.json"}}', "placed in 'params.json'"),
        ('{"weight_map": {"a": "model.safetensors"', "not JSON: Expecting"),
        ('{"weight_map": ' + "[" * 100_000, "nested too deep"),
    ],
)
def test_index_that_is_wrong(index: str, says: str, tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, {"model.safetensors": {"a": torch.ones(1)}})
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(CheckpointError, match=says) as caught:
        Checkpoint.open(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")


# --- params.json and config.json


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file; it must hold a JSON object"),
        (b" \n", "empty file"),
        (b"[]", r"holds \[\]; it must hold"),
        (b"{", "not JSON: Expecting property name"),
        (b'{"a": 1} x', "not JSON: Extra data"),
        (b'{"a": "\xff"}', "not UTF-8: byte 0xff at 7"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON: .*"),
        (b'{"a": {"b": 1, "b": 2}}', "key 'b' appears twice"),
        (b'{"a": NaN}', "constant NaN; numbers must be finite"),
        (b'{"a": -Infinity}', "constant -Infinity"),
        (b'{"a": 1e999}', "'1e999' overflows"),
        (b'{"a": ' + b"1" * 5000 + b"}", "limit"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b"{" + b" " * (5 << 20) + b"}", "larger than 4194304 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["params.json", "config.json"])
def test_params_are_read_strictly(
    name: str, content: bytes, says: str, tmp_path: Path, folder: Folder
) -> None:
    folder(tmp_path, {"consolidated.safetensors": {"a": torch.ones(1)}})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        Checkpoint.open(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert len(str(caught.value)) < 1000


def test_params_missing(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards())
    (tmp_path / "params.json").unlink()
    with pytest.raises(CheckpointError, match=r"no params\.json.*\(Mistral format\) or config"):
        Checkpoint.open(tmp_path)


def test_config_alone(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards("model"))
    (tmp_path / "params.json").rename(tmp_path / "config.json")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.params is None
    assert checkpoint.hf_config == {"dim": 8}


def test_params_and_config(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards("model"))
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "eps": 1e-5, "n": -0}')
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.params == {"dim": 8}
    assert checkpoint.hf_config == {"hidden_size": 8, "eps": 1e-5, "n": 0}


# --- no folder, or no tensors wanted


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        Checkpoint.open(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["params.json", "consolidated.safetensors"])
def test_file_in_place_of_a_folder(name: str, tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, {"consolidated.safetensors": {"a": torch.ones(1)}})
    with pytest.raises(CheckpointError, match="a file, not a folder; give the checkpoint's folder"):
        Checkpoint.open(tmp_path / name)


def test_folder_without_permission(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path, shards())

    def denied(_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", denied)
        with pytest.raises(CheckpointError, match="permission denied"):
            Checkpoint.open(tmp_path)


def test_folder_of_params_only(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"dim": 8}')
    with pytest.raises(CheckpointError, match=r"found 'params.json'"):
        Checkpoint.open(tmp_path)
    checkpoint = Checkpoint.open(tmp_path, require_tensors=False)
    assert checkpoint.params == {"dim": 8}
    assert dict(checkpoint.tensors) == {}
    assert checkpoint.notes == ["no tensor file is here"]


@pytest.mark.parametrize("name", ["params.json", "config.json", "mine.json"])
def test_path_of_params(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"dim": 8}')
    checkpoint = Checkpoint.open(path, require_tensors=False)
    content = (checkpoint.params, checkpoint.hf_config)
    assert content == ((None, {"dim": 8}) if name == "config.json" else ({"dim": 8}, None))
    assert "no tensor was looked for" in checkpoint.notes[0]


def test_tensors_not_required_but_here(tmp_path: Path, folder: Folder) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path, shards()), require_tensors=False)
    assert len(checkpoint.tensors) == 6


def test_tensors_not_required_and_a_part_missing(tmp_path: Path, folder: Folder) -> None:
    folder(tmp_path, shards(), index=True)
    (tmp_path / "consolidated-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        Checkpoint.open(tmp_path, require_tensors=False)


def test_tensors_not_required_and_only_their_index(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    index = {"weight_map": {"a": "consolidated.safetensors"}}
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint.open(tmp_path, require_tensors=False)
    assert checkpoint.notes[0] == "consolidated.safetensors.index.json is here, its files are not"
