"""Reads a checkpoint's tensors as weights: single matrices, and matrices stacked into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.formats import fp8_block, fp8_tensor
from ml4core.formats.blocks import block_count
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.matrix_formats import BLOCKS, Matrix
from ml4core.models.matrix_reader import FORMAT_DTYPES, MatrixReader
from ml4core.models.requant import Requant, converted_stack, wants
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.shards import ALL, Cut, Span
from ml4core.models.tensors import TensorReport
from ml4core.models.value_check import check_values

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes to read) after each tensor."""


class WeightReader:
    """Reads what `report` names.

    `dtype` is the dtype that quantised values get wherever they can't stay quantised; `requant`
    how routed experts in FP8 are converted, None if they stay.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        report: TensorReport,
        dtype: torch.dtype,
        progress: Progress | None = None,
        requant: Requant | None = None,
    ) -> None:
        self._report = report
        self._requant = requant
        self._read = MatrixReader(checkpoint, self._seen)
        self._dense_format = "bf16" if dtype == torch.bfloat16 else "fp32"
        self._progress = progress
        self._total = report.nbytes
        self._done = 0

    def vector(
        self, name: str, dtype: torch.dtype | None = None, rows: Span | None = None
    ) -> Tensor:
        """The tensor of a canonical name, in `dtype` or the checkpoint's own.

        Raises CheckpointError for values that aren't finite.
        """
        info = self._report.vectors[name]
        tensor = self._read.plain(info, rows)
        check_values(info, tensor, rows[0] if rows else 0)
        return tensor if dtype is None else tensor.to(dtype)

    def place(self, name: str) -> str:
        """The file, if it is known, and the name of a tensor, for messages."""
        info = self._report.vectors.get(name)
        return name if info is None else f"{info.file}: {name}"

    def shape(self, stem: str) -> tuple[int, int]:
        """Rows and columns of a whole matrix."""
        return self._report.matrices[stem].shape

    def matrix(self, stem: str, cut: Cut = ALL) -> Weight:
        """A matrix, or a part of it, in the format that it lies in."""
        return self._read.weight(self._report.matrices[stem], cut)

    def dense(self, stem: str, format: str | None = None, cut: Cut = ALL) -> Tensor:
        """A matrix's values: as they are, or decoded; in the dtype of `format`, if given."""
        matrix = self._report.matrices[stem]
        own = matrix.format if matrix.format in FORMAT_DTYPES else self._dense_format
        return self._read.values(matrix, FORMAT_DTYPES[format or own], cut)

    def stacked(self, stems: Sequence[str], cut: Cut = ALL) -> Weight:
        """Matrices of equal width, or the same part of each, one below the other: [rows, K]."""
        weight = self.stacks([stems], cut)
        shape = weight.shape[1:]
        return Weight(weight.format, shape, {name: part[0] for name, part in weight.parts.items()})

    def stacks(self, groups: Sequence[Sequence[str]], cut: Cut = ALL) -> Weight:
        """As `stacked` for each group, all of one shape: [groups, sum of rows, K].

        The stack keeps a quantised format that all matrices have, if each but a group's last is a
        whole number of blocks high; else all are decoded. FP8 of one scale a matrix: the largest of
        a group serves it, the others are rounded anew. Memory: the result and one group.
        """
        matrices = [[self._report.matrices[stem] for stem in group] for group in groups]
        boxes = [cut.box(matrix.shape) for matrix in matrices[0]]
        heights = [bottom - top for (top, bottom), _ in boxes]
        left, right = boxes[0][1]
        shape = (len(groups), sum(heights), right - left)
        format = self._common_format(matrices, heights)
        if format == "fp8_tensor":
            return self._fp8_tensors(matrices, shape, cut)
        if format not in FORMAT_DTYPES:
            return self._quantised(matrices, shape, format, cut)
        data = torch.empty(shape, dtype=FORMAT_DTYPES[format], device="cpu")
        for index, group in enumerate(groups):
            row = 0
            for stem, rows in zip(group, heights, strict=True):
                data[index, row : row + rows] = self.dense(stem, format, cut)
                row += rows
        return Weight(format, shape, {"data": data})

    def experts(self, groups: Sequence[Sequence[str]], cut: Cut = ALL) -> Weight:
        """As `stacks`, of routed experts: FP8 ones are converted where that is wanted."""
        if self._requant is not None:
            matrices = [[self._report.matrices[stem] for stem in group] for group in groups]
            if wants(matrices):
                return converted_stack(self._read, matrices, cut, self._requant)
        return self.stacks(groups, cut)

    def input_scales(self, groups: Sequence[Sequence[str]]) -> Tensor | None:
        """Fixed activation scales fp32 [groups], multipliers: the largest of each group, whose
        matrices have one input. None where the report has none of the first.
        """
        scales = self._report.input_scales
        if not groups or groups[0][0] not in scales:
            return None
        found = [
            torch.stack([self._read.number(scales[stem], self._divides(stem)) for stem in group])
            for group in groups
        ]
        return torch.stack([group.amax() for group in found])

    def passed_over(self, stems: Sequence[str]) -> None:
        """Count matrices as done that other ranks read."""
        for stem in stems:
            self._done += self._report.matrices[stem].nbytes

    def _divides(self, stem: str) -> bool:
        return self._report.matrices[stem].input_divides

    def _common_format(self, matrices: Sequence[Sequence[Matrix]], heights: Sequence[int]) -> str:
        formats = {matrix.format for group in matrices for matrix in group}
        format = next(iter(formats))
        unit = BLOCKS[format].rows
        if len(formats) == 1 and all(rows % unit == 0 for rows in heights[:-1]):
            return format
        plain = {name if name in FORMAT_DTYPES else self._dense_format for name in formats}
        return "bf16" if plain == {"bf16"} else "fp32"

    def _quantised(
        self,
        matrices: Sequence[Sequence[Matrix]],
        shape: tuple[int, int, int],
        format: str,
        cut: Cut,
    ) -> Weight:
        parts = _empty(format, shape)
        for index, group in enumerate(matrices):
            row = 0
            for matrix in group:
                weight = self._read.weight(matrix, cut)
                for name, part in weight.parts.items():
                    start = row // BLOCKS[format].rows if name == "scale" else row
                    parts[name][index, start : start + len(part)] = part
                row += weight.shape[0]
        return Weight(format, shape, parts)

    def _fp8_tensors(
        self, matrices: Sequence[Sequence[Matrix]], shape: tuple[int, int, int], cut: Cut
    ) -> Weight:
        data = torch.empty(shape, dtype=torch.uint8, device="cpu")
        scale = torch.empty(shape[0], dtype=torch.float32, device="cpu")
        for index, group in enumerate(matrices):
            weights = [self._read.weight(matrix, cut) for matrix in group]
            scales = torch.stack([weight.parts["scale"] for weight in weights])
            if bool((scales == scales[0]).all()):  # nothing to round
                data[index] = torch.cat([weight.data for weight in weights])
                scale[index] = scales[0]
                continue
            data[index], scale[index] = fp8_tensor.fuse(
                [(weight.data, weight.parts["scale"]) for weight in weights]
            )
        return Weight("fp8_tensor", shape, {"data": data, "scale": scale})

    def _seen(self, info: TensorInfo) -> None:
        self._done += info.nbytes  # what was passed over in it counts as done
        if self._progress is not None:
            self._progress(self._done, self._total)


def _empty(format: str, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """The parts of a quantised stack, see `Weight`; not filled."""
    count, rows, columns = shape
    blocks = BLOCKS[format]
    parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    if format == "fp8_block":
        grid = (count, *fp8_block.scale_shape(rows, columns))
        parts = {"data": (shape, torch.uint8), "scale": (grid, torch.float32)}
    else:
        scales = (count, rows, block_count(columns, blocks.columns))
        packed = (count, rows, columns // blocks.packed)
        parts = {"data": (packed, torch.uint8), "scale": (scales, torch.uint8)}
    if format == "nvfp4":
        parts = {**parts, "global_scale": ((count, rows), torch.float32)}
    return {
        name: torch.empty(size, dtype=dtype, device="cpu") for name, (size, dtype) in parts.items()
    }
