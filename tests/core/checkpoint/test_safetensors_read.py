"""Reads of tensors and rows: equal to the safetensors library, bounded, honest about changes."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ml4core.models.errors import CheckpointError
from ml4core.models.safetensors_file import (
    DTYPES,
    TensorInfo,
    read_box,
    read_header,
    read_rows,
    read_tensor,
)
from ml4core.models.safetensors_header import CHUNK_BYTES

# What the library's torch part can save; F8_E8M0 is read as bytes and has its own test.
SAVED = sorted(set(DTYPES) - {"F8_E8M0"})


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


@pytest.mark.parametrize("name", SAVED)
def test_equals_the_library(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    saved = {
        "matrix": random_tensor(DTYPES[name], 5, 3),
        "scalar": random_tensor(DTYPES[name]),
        "empty": random_tensor(DTYPES[name], 0, 3),
        "odd": random_tensor(torch.uint8, 3),
    }
    save_file(saved, path, {"format": "pt", "ü": "\n"})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "ü": "\n"}
    assert header["matrix"].dtype == name
    with safe_open(path, "pt") as library:
        assert set(header) == set(library.keys())
        for key, info in header.items():
            tensor = read_tensor(info)
            assert same_bytes(tensor, library.get_tensor(key))
            assert same_bytes(tensor, saved[key])
            assert tensor.is_contiguous()
        for start, stop in [(0, 5), (1, 3), (4, 5), (2, 2), (5, 5)]:
            rows = read_rows(header["matrix"], start, stop)
            assert same_bytes(rows, library.get_slice("matrix")[start:stop])
        for rows, columns in [
            ((0, 5), (0, 3)),
            ((1, 4), (1, 3)),
            ((4, 5), (0, 1)),
            ((2, 2), (1, 2)),
        ]:
            box = read_box(header["matrix"], rows, columns)
            assert same_bytes(box, library.get_slice("matrix")[slice(*rows), slice(*columns)])
            assert box.is_contiguous()
    assert read_rows(header["empty"], 0, 0).shape == (0, 3)
    assert read_box(header["empty"], (0, 0), (1, 2)).shape == (0, 1)


def test_scale_exponents_are_read_as_bytes(tmp_path: Path, craft: Callable[..., Path]) -> None:
    entry = {"dtype": "F8_E8M0", "shape": [2, 2], "data_offsets": [0, 4]}
    info = read_header(craft(tmp_path / "a", {"s": entry}, b"\x00\x7f\x80\xff"))["s"]
    assert info.dtype == "F8_E8M0"
    expected = torch.tensor([[0, 127], [128, 255]], dtype=torch.uint8)
    assert same_bytes(read_tensor(info), expected)
    assert same_bytes(read_rows(info, 1, 2), expected[1:])


def test_order_is_that_of_the_bytes(tmp_path: Path, craft: Callable[..., Path]) -> None:
    header = {
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    }
    path = craft(tmp_path / "a", header, b"01234")
    assert list(read_header(path)) == ["a", "b"]
    assert read_tensor(read_header(path)["b"]).tolist() == [ord("3"), ord("4")]


def test_values_at_uneven_bytes(tmp_path: Path, craft: Callable[..., Path]) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    path = craft(tmp_path / "a", header, b"\0\0\0" + struct.pack("<ff", 1.5, -2.0))
    assert read_tensor(read_header(path)["b"]).tolist() == [1.5, -2.0]


def test_result_is_owned(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4)}, path)
    info = read_header(path)["a"]
    tensor = read_tensor(info)
    content = path.read_bytes()
    path.unlink()
    assert tensor.add_(1).tolist() == [2.0] * 4
    path.write_bytes(content)
    assert read_tensor(info).tolist() == [1.0] * 4


def test_default_device_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(4), "b": torch.ones(0)}, path)
    with torch.device("meta"):
        header = read_header(path)
        tensors = [read_tensor(header["a"]), read_tensor(header["b"])]
    assert [tensor.device.type for tensor in tensors] == ["cpu", "cpu"]
    assert tensors[0].tolist() == [0, 1, 2, 3]


def test_rows_of_a_tensor_larger_than_memory(tmp_path: Path, craft: Callable[..., Path]) -> None:
    rows, row_bytes = 1 << 20, 1 << 20  # 1 TiB, of which the file system holds a few blocks
    header = {"w": {"dtype": "BF16", "shape": [rows, row_bytes // 2], "data_offsets": [0, 1 << 40]}}
    path = craft(tmp_path / "w.safetensors", header)
    begin = path.stat().st_size
    with path.open("r+b") as file:
        try:
            file.truncate(begin + rows * row_bytes)
        except OSError:
            pytest.skip("the file system holds no file of 1 TiB with holes")
        file.seek(begin + (rows - 1) * row_bytes)
        file.write(struct.pack("<H", 0x3F80))
    info = read_header(path)["w"]
    tracemalloc.start()
    last = read_rows(info, rows - 2, rows)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert last.shape == (2, row_bytes // 2)
    assert last.count_nonzero() == 1
    assert last[1, 0] == 1


@pytest.mark.parametrize("rows", [(-1, 2), (0, 6), (3, 2), (6, 6)])
def test_rows_that_are_not_there(rows: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(5, 2)}, path)
    with pytest.raises(CheckpointError, match=r"tensor 'a' has rows 0 to 5, not \["):
        read_rows(read_header(path)["a"], *rows)


@pytest.mark.parametrize("columns", [(-1, 1), (0, 4), (2, 1), (4, 4)])
def test_columns_that_are_not_there(columns: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(5, 3), "v": torch.ones(5)}, path)
    header = read_header(path)
    with pytest.raises(CheckpointError, match=r"tensor 'a' has 5 rows and 3 columns, not \[0, 5\)"):
        read_box(header["a"], (0, 5), columns)
    with pytest.raises(CheckpointError, match=r"tensor 'v' \[5\] is no matrix"):
        read_box(header["v"], (0, 5), (0, 1))


def test_columns_read_no_more_than_their_bytes(tmp_path: Path) -> None:
    """What a box gives comes from its own bytes: junk around it does not show."""
    path = tmp_path / "a.safetensors"
    tensor = torch.full((64, 4096), float("nan"))
    tensor[8:24, 1000:1100] = torch.arange(1600.0).view(16, 100)
    save_file({"a": tensor}, path)
    box = read_box(read_header(path)["a"], (8, 24), (1000, 1100))
    assert torch.equal(box, torch.arange(1600.0).view(16, 100))
    assert box.untyped_storage().nbytes() == box.nbytes


def test_rows_of_a_scalar(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.tensor(1.0)}, path)
    with pytest.raises(CheckpointError, match="'a' is a scalar"):
        read_rows(read_header(path)["a"], 0, 1)


@pytest.mark.parametrize("size", [0, 60, 10_000])
def test_file_of_another_size_than_before(size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(5)}, path)
    info = read_header(path)["a"]
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(CheckpointError, match=f"is {size} bytes long, was"):
        read_tensor(info)
    matrix = TensorInfo("a", "F32", (10, 100), path, info.start, info.nbytes, info.file_size)
    with pytest.raises(CheckpointError, match=f"is {size} bytes long, was"):
        read_box(matrix, (0, 1), (0, 1))


def test_file_cut_off_during_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    info = read_header(path)["a"]
    make = torch.empty

    def cut(*args: object, **kwargs: object) -> torch.Tensor:
        with path.open("r+b") as file:
            file.truncate(info.start + 400)
        return make(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", cut)
    with pytest.raises(CheckpointError, match=f"ends at byte {info.start + 400}; tensor 'a'"):
        read_tensor(info)


def test_file_shorter_than_a_hand_made_info(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(10))
    assert read_tensor(TensorInfo("a", "U8", (10,), path, 0, 10)).shape == (10,)
    with pytest.raises(CheckpointError, match="ends at byte 10"):
        read_tensor(TensorInfo("a", "U8", (11,), path, 0, 11))


def test_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2)}, path)
    info = read_header(path)["a"]
    path.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        read_tensor(info)


def test_a_truth_value_of_two(tmp_path: Path, craft: Callable[..., Path]) -> None:
    entry = {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}
    info = read_header(craft(tmp_path / "a", {"m": entry}, b"\0\1\2"))["m"]
    assert read_rows(info, 0, 2).tolist() == [False, True]
    with pytest.raises(CheckpointError, match="'m' of dtype BOOL holds byte 2"):
        read_tensor(info)


def test_an_empty_file_of_tensors(tmp_path: Path, craft: Callable[..., Path]) -> None:
    path = craft(tmp_path / "a", b"{ }\n  ")
    assert read_header(path) == {}
    assert read_header(path).metadata == {}


def test_many_tensors_across_the_windows_of_a_header(
    tmp_path: Path, craft: Callable[..., Path]
) -> None:
    count = 30_000  # over 2 MiB of header
    header = {
        f"layers.{i}.experts.\u00e9.weight": {
            "dtype": "U8", "shape": [1, 2], "data_offsets": [2 * i, 2 * i + 2]
        }
        for i in range(count)
    }  # fmt: skip
    header["__metadata__"] = {"long": "x" * (3 << 20)}
    found = read_header(craft(tmp_path / "a", header, bytes(2 * count)))
    assert len(found) == count
    assert len(found.metadata["long"]) == 3 << 20
    assert found[f"layers.{count - 1}.experts.\u00e9.weight"].shape == (1, 2)


@pytest.mark.parametrize("before", range(1, 16))
def test_metadata_across_a_window_of_the_header(
    before: int, tmp_path: Path, craft: Callable[..., Path]
) -> None:
    long = "x" * (100 << 10)  # more than a tensor's entry may take
    spaces = b" " * (CHUNK_BYTES - 1 - before)
    header = b"{" + spaces + b'"__metadata__": {"long": "' + long.encode() + b'"}}'
    assert read_header(craft(tmp_path / "a", header)).metadata == {"long": long}
