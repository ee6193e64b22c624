"""Reads a part of one matrix, with the scales that belong to it and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.compose.ops.weights import decode_weight
from ml4core.formats import check_scales, nvfp4
from ml4core.formats.blocks import block_count
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.matrix_formats import BLOCKS, Matrix
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.shards import ALL, Cut, Span
from ml4core.models.value_check import check_values

FORMAT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MatrixReader:
    """Reads from `checkpoint`; `seen(tensor)` is called after each tensor that was read from.

    `check`: whether values are looked at, and those that aren't finite are refused.
    """

    def __init__(
        self, checkpoint: Checkpoint, seen: Callable[[TensorInfo], None], check: bool = True
    ) -> None:
        self._checkpoint = checkpoint
        self._seen = seen
        self._check = check

    def plain(self, info: TensorInfo, rows: Span | None = None) -> Tensor:
        """A tensor of any shape, or rows of it."""
        if rows is None or rows == (0, info.shape[0]):
            tensor = self._checkpoint.read(info)
        else:
            tensor = self._checkpoint.read_rows(info, *rows)
        self._seen(info)
        return tensor

    def weight(self, matrix: Matrix, cut: Cut = ALL) -> Weight:
        """The rows and columns of `cut` in the matrix's own format.

        Raises ValueError unless `cut` begins with a block, CheckpointError for values that aren't
        finite, and for scales that are none: not finite, negative, or NaN bytes; it names tensor,
        row and block.
        """
        rows, columns = cut.box(matrix.shape)
        blocks = BLOCKS[matrix.format]
        if rows[0] % blocks.rows or columns[0] % blocks.columns or columns[1] % blocks.packed:
            raise ValueError(
                f"{matrix.data.name}: rows {rows} and columns {columns} do not fall on blocks of "
                f"{blocks.rows} x {blocks.columns} of {matrix.format}"
            )
        data = self._box(matrix.data, rows, _over(columns, blocks.packed))
        shape = (rows[1] - rows[0], columns[1] - columns[0])
        if self._check:
            e4m3 = matrix.format in ("fp8_block", "fp8_tensor")
            values = data.view(torch.float8_e4m3fn) if e4m3 else data
            check_values(matrix.data, values, rows[0])
        if matrix.format in FORMAT_DTYPES:
            parts = {"data": data.to(FORMAT_DTYPES[matrix.format])}
            return Weight(matrix.format, shape, parts)
        parts = {"data": data.view(torch.uint8)}
        assert matrix.scale is not None
        if matrix.format == "fp8_tensor":
            parts["scale"] = self.number(matrix.scale)
            return Weight(matrix.format, shape, parts)
        span = (_over(rows, blocks.rows), _over(columns, blocks.columns))
        scale = self._box(matrix.scale, *span)
        parts["scale"] = _checked(matrix, scale, span[0][0], span[1][0])
        if matrix.global_scale is not None:
            multiplier = self.number(matrix.global_scale, matrix.divides)
            parts["global_scale"] = multiplier.expand(shape[0]).clone()
        return Weight(matrix.format, shape, parts)

    def values(self, matrix: Matrix, dtype: torch.dtype, cut: Cut = ALL) -> Tensor:
        """The values of `cut`, which may fall anywhere: the blocks around it are read."""
        rows, columns = cut.box(matrix.shape)
        blocks = BLOCKS[matrix.format]
        wide = Cut(
            _around(rows, blocks.rows, matrix.shape[0]),
            _around(columns, blocks.columns, matrix.shape[1]),
        )
        assert wide.rows is not None
        assert wide.columns is not None
        decoded = decode_weight(self.weight(matrix, wide), dtype)
        top, left = rows[0] - wide.rows[0], columns[0] - wide.columns[0]
        bottom, right = top + rows[1] - rows[0], left + columns[1] - columns[0]
        return decoded[top:bottom, left:right]

    def number(self, info: TensorInfo, divides: bool = False) -> Tensor:
        """A scale of one number as an fp32 multiplier []. `divides`: it is stored as a divisor.

        Raises CheckpointError unless it is finite and not negative.
        """
        stored = self.plain(info).to(torch.float32).reshape(())
        number = nvfp4.reciprocal(stored) if divides else stored
        if not bool(number.isfinite()) or bool(number < 0):
            wanted = "a divisor is above 0" if divides else "a scale is finite and not negative"
            raise CheckpointError(
                f"{info.file}: {info.name}: {float(stored)}; {wanted}. Quantise the checkpoint "
                "again"
            )
        return number

    def _box(self, info: TensorInfo, rows: Span, columns: Span) -> Tensor:
        if rows == (0, info.shape[0]) and columns == (0, info.shape[1]):
            return self.plain(info)
        tensor = self._checkpoint.read_box(info, rows, columns)
        self._seen(info)
        return tensor


def _checked(matrix: Matrix, scale: Tensor, row: int, column: int) -> Tensor:
    """Block scales as a `Weight` holds them; `row` and `column` are those of the first."""
    info = matrix.scale
    assert info is not None
    if matrix.format == "fp8_block":
        scale = scale.to(torch.float32)
        wrong = ~(scale.isfinite() & (scale >= 0))
        if bool(wrong.any()):
            i, j = wrong.nonzero()[0].tolist()
            raise CheckpointError(
                f"{info.file}: {info.name}: the scale of block row {row + i}, block {column + j} "
                f"is {float(scale[i, j])}; scales are finite and not negative. Quantise the "
                "checkpoint again"
            )
        return scale
    code = scale.view(torch.uint8)
    try:
        format = "e4m3fn" if matrix.format == "nvfp4" else "e8m0"
        check_scales(code, format, info.name, first=(row, column))
    except ValueError as error:
        raise CheckpointError(f"{info.file}: {error}") from error
    return code


def _over(span: Span, unit: int) -> Span:
    """`span` counted in units, the last of which may be ragged."""
    return span[0] // unit, block_count(span[1], unit)


def _around(span: Span, unit: int, end: int) -> Span:
    return span[0] // unit * unit, min(block_count(span[1], unit) * unit, end)
