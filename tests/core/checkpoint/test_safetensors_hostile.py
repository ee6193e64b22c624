"""B082: files made to mislead a reader are refused at once, for a reason, in flat memory."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ml4core.models.errors import CheckpointError
from ml4core.models.safetensors_file import read_header

MIB = 1 << 20


def entry(begin: object, end: object, shape: object = None, dtype: object = "U8") -> dict:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def one(**changes: object) -> dict:
    return {"a": entry(0, 64) | changes}


FLAT = entry(0, 64)
TEXT = json.dumps(FLAT)
BOMB = b'{"a":{"shape":[' + b"[]," * (8 * MIB)

# id: (header, bytes of data, length prefix or None for the true one, what the message says)
HOSTILE: dict[str, tuple[object, int, int | None, str]] = {
    "prefix_2_63": (one(), 64, 2**63, "length 9223372036854775808 is above the format's limit"),
    "prefix_2_64": (one(), 64, 2**64 - 1, "length 18446744073709551615 is above"),
    "prefix_over_cap": (one(), 64, 100_000_001, "length 100000001 is above"),
    "prefix_over_file": (one(), 64, 5000, "length 5000, but only 126 bytes follow"),
    "prefix_zero": (one(), 64, 0, "length 0; the smallest"),
    "prefix_inside_header": (one(), 64, 40, "flat, closed object"),
    "not_utf8": (b'{"\xff\xfe": ' + TEXT.encode() + b"}", 64, None, "not UTF-8: byte 0xff"),
    "utf8_cut_off": (b"{}\xc3", 0, None, "not UTF-8: byte 0xc3 near byte 2"),
    "not_json": (b"<html>404</html>", 64, None, "not JSON at byte 0: it must begin with '{'"),
    "not_an_object": ([1, 2], 64, None, r"not an object; it must begin with '{', not with '\["),
    "text": ("safetensors", 64, None, "not an object.*safetensors"),
    "entry_not_an_object": ({"a": 5}, 64, None, "entry '\"a\"' holds '5.*not an object"),
    "entry_nested": ({"a": {"dtype": {}}}, 64, None, "flat, closed object at '\"a\": "),
    "unclosed": (b'{"a": ' + TEXT.encode(), 64, None, "due, found the end of the header"),
    "two_objects": (json.dumps(one()).encode() + b"{}", 64, None, "ends before '{}'"),
    "comma_at_end": (b'{"a": ' + TEXT.encode() + b",}", 64, None, "closed object at '}'"),
    "same_key": (f'{{"a": {TEXT}, "a": {TEXT}}}'.encode(), 64, None, "has the key 'a' twice"),
    "same_key_escaped": (
        f'{{"b": {TEXT}, "\\u0062": {TEXT}}}'.encode(), 64, None, "has the key 'b' twice"
    ),
    "same_field": (
        f'{{"a": {TEXT[:-1]}, "dtype": "I8"}}}}'.encode(), 64, None, "key 'dtype' appears twice"
    ),
    "metadata_twice": (b'{"__metadata__":{},"__metadata__":{}}', 0, None, "'__metadata__' twice"),
    "metadata_number": ({"__metadata__": {"n": 1}}, 0, None, "key 'n' holds 1; only text"),
    "half_surrogate": (f'{{"\\ud800": {TEXT}}}'.encode(), 64, None, "half of a surrogate pair"),
    "field_missing": ({"a": {"dtype": "U8", "shape": [64]}}, 64, None, "has the keys 'dtype', 's"),
    "field_unknown": (one(strides=[1]), 64, None, "'strides'; needs dtype, shape"),
    "dtype_unknown": (one(dtype="F128"), 64, None, "dtype 'F128' is unknown; known are BOOL"),
    "dtype_number": (one(dtype=8), 64, None, "dtype 8 is unknown"),
    "shape_negative": (one(shape=[-8, -8]), 64, None, r"\[-8, -8\] must hold whole numbers"),
    "shape_float": (one(shape=[64.0]), 64, None, r"\[64.0\] must hold whole numbers"),
    "shape_bool": (one(shape=[True, 64]), 64, None, r"\[True, 64\] must hold"),
    "shape_minus_zero": (b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', 0, None, "-0"),
    "shape_text": (one(shape="64"), 64, None, "shape '64' is not a list"),
    "shape_huge": (one(shape=[2**40, 2**40]), 64, None, r"more than 2\^63 bytes"),
    "shape_huge_but_empty": (one(shape=[0, 2**62, 2**62]), 64, None, r"0, 4\d+.*than 2\^63"),
    "shape_digits": (
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 9999 + b'],"data_offsets":[0,64]}}',
        64, None, "limit.*for integer string conversion",
    ),
    "dims_absurd": (one(shape=[1] * 5000), 64, None, "5000 dimensions; at most 32"),
    "offsets_float": (one(data_offsets=[0, 64.0]), 64, None, r"\[0, 64.0\] must be two whole"),
    "offsets_three": (one(data_offsets=[0, 8, 64]), 64, None, r"\[0, 8, 64\] must be two"),
    "offsets_negative": (one(data_offsets=[-64, 0]), 64, None, r"\[-64, 0\] must be two"),
    "offsets_infinite": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,Infinity]}}', 64, None, "constant Inf"
    ),
    "offsets_reversed": (one(data_offsets=[64, 0]), 64, None, r"\[64, 0\] are reversed"),
    "offsets_past_end": (one(data_offsets=[0, 65]), 64, None, "at 65, past the end of the 64"),
    "offsets_not_shape": (one(shape=[63]), 64, None, r"span 64 bytes.*shape \[63\] need 63"),
    "cut_off": (one(), 63, None, "end at 64, past the end of the 63 bytes"),
    "overlap": ({"a": entry(0, 64), "b": entry(0, 64)}, 64, None, "'a' and 'b' overlap at byte 0"),
    "overlap_partly": (
        {"a": entry(0, 64), "b": entry(32, 96)}, 96, None, "'a' and 'b' overlap at byte 32"
    ),
    "overlap_empty": ({"a": entry(0, 64), "z": entry(8, 8)}, 64, None, "and 'z' overlap at byte 8"),
    "hole": ({"a": entry(0, 64), "b": entry(80, 96)}, 96, None, "hole of 16 bytes.*before 'b'"),
    "hole_first": ({"a": entry(16, 64)}, 64, None, "hole of 16 bytes.*'a', at byte 0"),
    "trailing": (one(), 80, None, "16 trailing bytes"),
    "trailing_no_tensor": ({}, 5, None, "5 trailing bytes"),
    "bomb_wide": (BOMB, 0, None, "no whole entry in 65536 bytes"),
    "bomb_deep": (b'{"a":{"shape":' + b"[" * 30000 + b"]" * 30000 + b"}}", 0, None, "too deep"),
    "bomb_metadata": (
        b'{"__metadata__":{' + b'"k":"v",' * MIB + b"}}", 0, None, "in 4194304 bytes, the most"
    ),
    "endless_name": (b'{"' + b"x" * (16 * MIB), 0, None, "65536 bytes.*from byte 1"),
    "backslashes": (b'{"' + b"\\" * (16 * MIB + 1), 0, None, "65536 bytes.*from byte 1"),
    "quotes": (b'{"a":{' + b'"' * (16 * MIB), 0, None, "65536 bytes.*from byte 1"),
    "spaces": (b"{" + b" " * (16 * MIB), 0, None, f"at byte {16 * MIB + 1}.*end of the header"),
}  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path, craft: Callable[..., Path]) -> Callable[[str], Path]:
    def make(case: str) -> Path:
        header, size, length, _ = HOSTILE[case]
        return craft(tmp_path / f"{case}.safetensors", header, bytes(size), length)

    return make


@pytest.mark.parametrize("case", HOSTILE)
def test_refused_quickly_in_flat_memory(case: str, hostile: Callable[[str], Path]) -> None:
    path = hostile(case)
    tracemalloc.start()
    try:
        began = time.perf_counter()
        with pytest.raises(CheckpointError, match=HOSTILE[case][3]) as caught:
            read_header(path)
        seconds = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message) < 1000
    assert message.isprintable()
    assert seconds < 2
    assert peak < 32 * MIB


def test_every_case_has_its_own_reason(hostile: Callable[[str], Path]) -> None:
    messages: dict[str, str] = {}
    for case in HOSTILE:
        path = hostile(case)
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        text = str(caught.value).removeprefix(f"{path}: ")
        assert text not in messages.values(), case
        messages[case] = text
        path.unlink()


def test_the_process_stays_small(tmp_path: Path, hostile: Callable[[str], Path]) -> None:
    paths = [str(hostile(case)) for case in HOSTILE]
    program = """
import resource, sys
from ml4core.models.errors import CheckpointError
from ml4core.models.safetensors_file import read_header
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused = 0
for path in sys.argv[1:]:
    try:
        read_header(path)
    except CheckpointError:
        refused += 1
print(refused, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program, *paths],
        capture_output=True, text=True, timeout=120, check=False, cwd=root,
    )  # fmt: skip
    assert done.stderr == ""
    refused, grown = map(int, done.stdout.split())
    assert refused == len(HOSTILE)
    assert grown < 64 * 1024  # KiB


@pytest.mark.parametrize(("content", "says"), [(b"", "empty file"), (b"\x02\0\0", "3 bytes long")])
def test_shorter_than_a_prefix(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "consolidated.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        read_header(path)


def test_a_header_of_the_largest_size_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_000) + b'{"')
        file.truncate(8 + 100_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="no whole entry"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_header(path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_header(tmp_path)


def test_a_link_without_target(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: no such file (a link")):
        read_header(path)


def test_no_permission(
    tmp_path: Path, craft: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = craft(tmp_path / "a.safetensors", {})

    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(CheckpointError, match="permission denied"):
            read_header(path)


def test_an_unreadable_disk(
    tmp_path: Path, craft: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = craft(tmp_path / "a.safetensors", {})

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("ml4core.models.safetensors_header.HeaderText._fill", broken)
    with pytest.raises(CheckpointError, match="Input/output"):
        read_header(path)
