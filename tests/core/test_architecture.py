"""Two rules that no import tells: modules stay short, and core code names no vendor."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MAX_LINES = 400

# Files and folders under ml4core/ whose code must read the same whatever the accelerator is.
NEUTRAL = ("api", "compose", "engine", "models", "registry")

VENDOR_NAME = re.compile(
    r"(?:^|_)(?P<name>"
    r"cuda|nvidia|cublas|cutlass|nccl|triton|flash_?mla|flash_?infer|deep_?gemm|hopper|blackwell|sm_?\d{2,3}"
    r"|rocm|amd|hip|rccl|aiter|flydsl|gfx_?\d+|mi_?3\d\d"
    r"|tpu|xla|jax|pallas|libtpu"
    r")\d*(?=_|$)"
)

# (file under ml4core/, name) -> why it has to be there. An entry that nothing needs fails the test.
ALLOWED: dict[tuple[str, str], str] = {}


def python_files(*folders: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not {"build", ".venv"}.intersection(path.relative_to(ROOT).parts)
    )


def vendor_names(text: str) -> list[str]:
    """Return the vendors that an identifier or a text names, each once, in lower case.

    Whole words are compared, since `output` holds the letters of a vendor and is none. A change of
    case may divide words (`outputTPU`) or not (`ROCm`), so both readings are tried.
    """
    divided = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    readings = [re.sub(r"[^a-z0-9]+", "_", reading.lower()) for reading in (text, divided)]
    names = [match["name"] for reading in readings for match in VENDOR_NAME.finditer(reading)]
    return list(dict.fromkeys(name.replace("_", "") for name in names))


def code_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yield identifiers and strings; no comment, and no string that stands alone: docstrings."""
    layout = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    code = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (tokenize.COMMENT, tokenize.NL)
    ]
    for i, token in enumerate(tokens):
        starts = i == 0 or tokens[i - 1].type in layout
        ends = tokens[min(i + 1, len(tokens) - 1)].type in (tokenize.NEWLINE, tokenize.ENDMARKER)
        if token.type in code and not (token.type == tokenize.STRING and starts and ends):
            yield token


def vendor_mentions(source: str) -> list[tuple[int, str]]:
    """Return (line, vendor name) for every mention in code."""
    return [
        (token.start[0], name)
        for token in code_tokens(source)
        for name in vendor_names(token.string)
    ]


def test_modules_are_short() -> None:
    files = python_files("ml4core", "backends", "conformance")
    assert files
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in files}
    long = [
        f"{path.relative_to(ROOT)}: {length} lines"
        for path, length in lengths.items()
        if length > MAX_LINES
    ]
    assert not long, f"a module holds at most {MAX_LINES} lines; split " + "; ".join(long)


def test_core_names_no_vendor() -> None:
    core = ROOT / "ml4core"
    files = [path for path in python_files("ml4core") if path.relative_to(core).parts[0] in NEUTRAL]
    assert files
    found: set[tuple[str, str]] = set()
    faults = []
    for path in files:
        file = path.relative_to(core).as_posix()
        mentions = vendor_mentions(path.read_text("utf-8"))
        mentions += [(0, name) for name in vendor_names(file.removesuffix(".py"))]
        for line, name in mentions:
            found.add((file, name))
            if (file, name) not in ALLOWED:
                faults.append(f"ml4core/{file}:{line} names {name}")
    assert not faults, "core code names a vendor:\n" + "\n".join(faults)
    assert not ALLOWED.keys() - found, f"no longer needed in ALLOWED: {ALLOWED.keys() - found}"


def test_vendor_names_are_found_in_code_only() -> None:
    sample = '''\
"""Runs on CUDA."""
import torch  # not a triton kernel

class OutputBuffer:
    """The tpu has its own."""

    def copy_to(self, output_tpu: bool) -> str:
        "An aiter docstring."
        if output_tpu and torch.cuda.is_available():
            return f"{self} on ROCm:0"
        return "chip, outputs, damding, example" + "built for SM90"

    useFlashMLA = 1
'''
    assert vendor_mentions(sample) == [
        (7, "tpu"),
        (9, "tpu"),
        (9, "cuda"),
        (10, "rocm"),
        (11, "sm90"),
        (13, "flashmla"),
    ]
