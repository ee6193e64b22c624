"""Reads a checkpoint's tensors as weights: single matrices, and matrices stacked into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.formats import fp8_block
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.matrix_formats import Matrix
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.tensors import TensorReport

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes to read) after each tensor."""

FORMAT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class WeightReader:
    """Reads what `report` names.

    `dtype` is the dtype that FP8 values get wherever they can't stay FP8.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        report: TensorReport,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._report = report
        self._dense_format = "bf16" if dtype == torch.bfloat16 else "fp32"
        self._progress = progress
        self._total = report.nbytes
        self._done = 0

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of a canonical name, in `dtype` or the checkpoint's own."""
        tensor = self._read(self._report.vectors[name])
        return tensor if dtype is None else tensor.to(dtype)

    def matrix(self, stem: str, rows: int | None = None) -> Weight:
        """A matrix in the format that it lies in; only its first `rows`, if given."""
        matrix = self._report.matrices[stem]
        shape = (matrix.data.shape[0] if rows is None else rows, matrix.data.shape[1])
        if matrix.format == "fp8_block":
            data, scale = self._fp8(matrix, shape[0])
            return Weight("fp8_block", shape, {"data": data, "scale": scale})
        values = self._read(matrix.data, shape[0]).to(FORMAT_DTYPES[matrix.format])
        return Weight(matrix.format, shape, {"data": values})

    def dense(self, stem: str, format: str | None = None) -> Tensor:
        """A matrix's values: as they are, or FP8 decoded; in the dtype of `format`, if given."""
        matrix = self._report.matrices[stem]
        if matrix.format != "fp8_block":
            return self._read(matrix.data).to(FORMAT_DTYPES[format or matrix.format])
        data, scale = self._fp8(matrix, matrix.data.shape[0])
        dtype = FORMAT_DTYPES[format or self._dense_format]
        return fp8_block.dequantize_weight(data, scale, dtype=dtype)

    def stacked(self, stems: Sequence[str]) -> Weight:
        """Matrices of equal width, one below the other: [sum of rows, K]."""
        weight = self.stacks([stems])
        shape = weight.shape[1:]
        return Weight(weight.format, shape, {name: part[0] for name, part in weight.parts.items()})

    def stacks(self, groups: Sequence[Sequence[str]]) -> Weight:
        """As `stacked` for each group, all of one shape: [groups, sum of rows, K].

        FP8 stays FP8 if all matrices are, and each but a group's last is a whole number of blocks
        high. Memory: the result and one matrix.
        """
        matrices = [[self._report.matrices[stem] for stem in group] for group in groups]
        heights = [matrix.data.shape[0] for matrix in matrices[0]]
        shape = (len(groups), sum(heights), matrices[0][0].data.shape[1])
        format = self._common_format(
            {matrix.format for group in matrices for matrix in group},
            aligned=all(rows % fp8_block.BLOCK == 0 for rows in heights[:-1]),
        )
        if format == "fp8_block":
            return self._fp8_stacks(matrices, shape)
        data = torch.empty(shape, dtype=FORMAT_DTYPES[format], device="cpu")
        for index, group in enumerate(groups):
            row = 0
            for stem, rows in zip(group, heights, strict=True):
                data[index, row : row + rows] = self.dense(stem, format)
                row += rows
        return Weight(format, shape, {"data": data})

    def _common_format(self, formats: set[str], aligned: bool) -> str:
        if formats == {"fp8_block"} and aligned:
            return "fp8_block"
        plain = {format if format != "fp8_block" else self._dense_format for format in formats}
        return "bf16" if plain == {"bf16"} else "fp32"

    def _fp8_stacks(self, matrices: Sequence[Sequence[Matrix]], shape: tuple[int, ...]) -> Weight:
        data = torch.empty(shape, dtype=torch.uint8, device="cpu")
        blocks = fp8_block.scale_shape(shape[1], shape[2])
        scale = torch.empty((shape[0], *blocks), dtype=torch.float32, device="cpu")
        for index, group in enumerate(matrices):
            row = block = 0
            for matrix in group:
                rows = matrix.data.shape[0]
                values, scales = self._fp8(matrix, rows)
                data[index, row : row + rows] = values
                scale[index, block : block + scales.shape[0]] = scales
                row, block = row + rows, block + scales.shape[0]
        return Weight("fp8_block", shape, {"data": data, "scale": scale})

    def _fp8(self, matrix: Matrix, rows: int) -> tuple[Tensor, Tensor]:
        """Bytes uint8 [rows, K] and scales fp32 [ceil(rows/128), ceil(K/128)]."""
        assert matrix.scale is not None
        data = self._read(matrix.data, rows).view(torch.uint8)
        blocks = fp8_block.scale_shape(rows, matrix.data.shape[1])[0]
        scale = self._read(matrix.scale, blocks).to(torch.float32)
        wrong = ~(scale.isfinite() & (scale >= 0))
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise CheckpointError(
                f"{matrix.scale.file}: {matrix.scale.name}: the scale of block row {row}, block "
                f"{column} is {float(scale[row, column])}; scales are finite and not negative. "
                "Quantise the checkpoint again"
            )
        return data, scale

    def _read(self, info: TensorInfo, rows: int | None = None) -> Tensor:
        if rows is None or rows == info.shape[0]:
            tensor = self._checkpoint.read(info.name)
        else:
            tensor = self._checkpoint.read_rows(info.name, 0, rows)
        self._done += info.nbytes  # rows that were passed over count as done
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor
