"""A checkpoint's tensors as matrices to convert, and the values in them, a block of rows at a time.

Every value that is read is checked: a matrix with NaN or an infinity is refused, as no format here
but bf16 could keep it, and no model works with it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ml4core.formats import check_scales, fp8_block
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark_names import PREFIX, inner_name
from ml4core.models.matrix_formats import Fault, Matrix, classify
from ml4core.models.matrix_reader import MatrixReader
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.shards import Cut
from ml4core.models.tensor_names import OTHER_SUFFIXES, SCALE_SUFFIXES, canonical, part_of
from ml4core.models.value_check import ValueCheck, ValuesError

ROW_BLOCK = fp8_block.BLOCK
BLOCK_BYTES = 4 << 20
"""Of values as bf16 that are worked on at once; a wide matrix has at least `ROW_BLOCK` rows."""

PLAIN = frozenset({"bf16", "fp32"})
_SUFFIX = re.compile(rf"(.+)\.({'|'.join(('weight', *SCALE_SUFFIXES, *OTHER_SUFFIXES))})")
_EXPERT = re.compile(r"layers\.\d+\.experts\.(?:\d+\.)?w\d+")  # without a number: all in one tensor
_OTHER = re.compile(
    r"layers\.\d+\.(?:attention\.(?:wq|wq_a|wq_b|wkv_a_with_mqa|wkv_b|wo|indexer\.wq|indexer\.wk)"
    r"|(?:feed_forward|shared_experts)\.w[123])"
)
_DRAFTER = re.compile(r"fc|markov_head\.(?:joint_proj|w2)")
_SCALES = MappingProxyType({"nvfp4": "e4m3fn", "mxfp4": "e8m0"})


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that belong together.

    Attributes:
        base: their name without suffix.
        kind: `experts`; `decoder`, its other matrices that may be quantised; `output`, the lm head;
            `drafter`, its matrices that may be; or `other`.
        tensors: in the order of the source.
        matrix: what they make up; a Fault if that is no matrix, None if nothing like one.
    """

    base: str
    kind: str
    tensors: tuple[TensorInfo, ...]
    matrix: Matrix | Fault | None

    @property
    def quantised(self) -> bool:
        return isinstance(self.matrix, Matrix) and self.matrix.format not in PLAIN

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors)


def groups_of(checkpoint: Checkpoint) -> list[Group]:
    """All tensors, in the order of files and bytes; a group stands where its first tensor does."""
    found: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for info in sorted(checkpoint.tensors.values(), key=lambda info: (info.file.name, info.start)):
        split = _SUFFIX.fullmatch(info.name)
        found[split[1] if split else info.name][split[2] if split else ""] = info
    return [_group(base, parts) for base, parts in found.items()]


def _group(base: str, parts: Mapping[str, TensorInfo]) -> Group:
    tensors = tuple(parts.values())
    kind = _kind(base, parts)
    data = parts.get("weight", parts.get("weight_packed"))
    matrix: Matrix | Fault | None = None
    if data is not None and (len(data.shape) == 2 or kind != "other"):
        matrix = _not_flat(data) if len(data.shape) != 2 else classify(base, parts)
    elif kind != "other":
        matrix = _not_flat(tensors[0])
    return Group(base, kind, tensors, matrix)


def _kind(base: str, parts: Mapping[str, TensorInfo]) -> str:
    suffix = next(iter(parts))
    whole = f"{base}.{suffix}" if suffix else base
    if base.startswith(PREFIX):
        inner = inner_name(whole)
        known = (_EXPERT, _OTHER, _DRAFTER)
        matches = inner is not None and any(one.fullmatch(inner.stem) for one in known)
        return "drafter" if matches else "other"
    name = None if part_of(base) is not None else canonical(whole)
    if name is None:
        return "other"
    if _EXPERT.fullmatch(name.stem):
        return "experts"
    if name.stem == "output":
        return "output"
    return "decoder" if _OTHER.fullmatch(name.stem) else "other"


def _not_flat(info: TensorInfo) -> Fault:
    text = f"{info.name}: shape {list(info.shape)}; a tensor of one matrix is converted"
    return Fault("unsupported", text)


def row_blocks(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of row blocks, each but the last a multiple of `ROW_BLOCK` high."""
    step = max(BLOCK_BYTES // max(row_bytes, 1) // ROW_BLOCK, 1) * ROW_BLOCK
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def value_blocks(checkpoint: Checkpoint, matrix: Matrix) -> Iterator[tuple[int, Tensor]]:
    """First row, and values [rows, K], decoded: bf16 if the matrix is quantised, else its own.

    Raises CheckpointError for a scale that is no usable number, and ValuesError, after the last
    block, if any value isn't finite.
    """
    reader = MatrixReader(checkpoint, lambda tensor: None, check=False)  # all are counted here
    dtype = torch.float32 if matrix.format == "fp32" else torch.bfloat16
    check = ValueCheck(matrix.data)
    rows, columns = matrix.shape
    for start, stop in row_blocks(rows, 2 * columns):
        values = reader.values(matrix, dtype, Cut(rows=(start, stop)))
        check.add(start, values)
        yield start, values
    check.finish()


def stored_blocks(
    checkpoint: Checkpoint, info: TensorInfo, matrix: Matrix | None = None
) -> Iterator[Tensor]:
    """A tensor as it is stored, from its first row to the last. Raises as `value_blocks`.

    `matrix` is what it is a part of, if it is.
    """
    check = ValueCheck(info)
    if not info.shape:
        blocks = iter((checkpoint.read(info),))
    else:
        spans = row_blocks(info.shape[0], info.nbytes // max(info.shape[0], 1))
        blocks = (checkpoint.read_rows(info, *span) for span in spans)
    row = 0
    for block in blocks:
        if matrix is not None and info is matrix.scale and matrix.format in _SCALES:
            check_stored_scales(info, block, _SCALES[matrix.format], row)
        else:
            check.add(row, block)
        yield block
        row += block.shape[0] if block.dim() else 1
    check.finish()


def check_stored_scales(info: TensorInfo, scale: Tensor, format: str, row: int) -> None:
    """ValuesError for NaN among the scale bytes of rows from `row` on."""
    try:
        check_scales(scale, format, info.name, first=(row, 0))
    except ValueError as error:
        raise ValuesError(f"{info.file}: {error}") from None
