"""Whatever a header holds, a reader gets tensors or a CheckpointError, and never trusts more
than the safetensors library does."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from ml4core.models.errors import CheckpointError
from ml4core.models.safetensors_file import DTYPES, Header, read_header, read_tensor

BOTH = settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])

names = st.text(max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict, int]:
    """A valid header, and the bytes of its data."""
    header: dict[str, object] = {}
    end = 0
    for name in draw(st.lists(names, unique=True, max_size=5)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPES))), draw(shapes)
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(), st.text(), max_size=3))
    return header, end


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
    st.sampled_from(["U8", "F32", "BF16", "F4"]),
    st.lists(st.integers(-1, 70), max_size=4),
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> tuple[dict, int]:
    """A valid header with some fields replaced, removed or added."""
    header, size = draw(headers())
    for name in draw(st.lists(st.sampled_from(sorted(header)), max_size=2)) if header else []:
        entry = header[name]
        if not isinstance(entry, dict) or draw(st.integers(0, 9)) == 0:
            header[name] = draw(leaves)
            continue
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
        if draw(st.integers(0, 4)) == 0:
            entry.pop(key, None)
        else:
            entry[key] = draw(leaves)
    return header, max(0, size + draw(st.sampled_from([0, 0, 0, -1, 1, 16])))


def bytes_of(header: object, size: int) -> bytes:
    text = json.dumps(header).encode()
    # 0 and 1 only: bytes that every dtype, BOOL too, can hold.
    data = bytes(i % 2 for i in range(size))
    return struct.pack("<Q", len(text)) + text + data


def check(path: Path, content: bytes) -> bool:
    """Read as a file; True if it was accepted, and then all of it holds."""
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError as error:
        message = str(error)
    else:
        compare(content, header)
        return True
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    assert len(message) < 2000
    return False


def compare(content: bytes, header: Header) -> None:
    library = dict(deserialize(content))
    assert set(library) == set(header)
    for name, info in header.items():
        assert list(info.shape) == library[name]["shape"]
        assert info.dtype == library[name]["dtype"]
        raw = content[info.start : info.start + info.nbytes]
        assert raw == bytes(library[name]["data"])
        try:
            tensor = read_tensor(info)
        except CheckpointError:
            assert info.dtype == "BOOL"
            assert max(raw) > 1
            continue
        assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == raw


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "a.safetensors"


@BOTH
@given(headers())
def test_valid_headers_are_accepted(path: Path, valid: tuple[dict, int]) -> None:
    assert check(path, bytes_of(*valid))


@BOTH
@given(mutated())
def test_changed_fields(path: Path, changed: tuple[dict, int]) -> None:
    check(path, bytes_of(*changed))


@BOTH
@given(headers(), st.data())
def test_changed_bytes(path: Path, valid: tuple[dict, int], data: st.DataObject) -> None:
    content = bytearray(bytes_of(*valid))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        match data.draw(st.sampled_from(["change", "cut", "insert", "repeat"])):
            case "change":
                content[at : at + 1] = data.draw(st.sampled_from([b'"', b"{", b"}", b"[", b",",
                    b":", b"0", b"9", b"-", b"e", b".", b"\\", b" ", b"\0", b"\xff"]))  # fmt: skip
            case "cut":
                del content[at:]
            case "insert":
                content[at:at] = data.draw(st.binary(max_size=4))
            case "repeat":
                content[at:at] = content[at : at + data.draw(st.integers(1, 80))]
    check(path, bytes(content))


@BOTH
@given(headers(), st.text(alphabet='{}[]",:\\u0d8eE+-.1 tfn\n', max_size=60), st.integers(0, 200))
def test_changed_text(path: Path, valid: tuple[dict, int], text: str, at: int) -> None:
    header, size = valid
    old = json.dumps(header)
    new = (old[:at] + text + old[at:]).encode()
    check(path, struct.pack("<Q", len(new)) + new + bytes(size))


@BOTH
@given(st.binary(max_size=200))
def test_any_bytes(path: Path, content: bytes) -> None:
    check(path, content)
    check(path, struct.pack("<Q", len(content)) + content)
