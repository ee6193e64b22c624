"""Converts one group of tensors into its place in a file, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ml4core.formats import fp8_block, mxfp4, mxfp4_bf16, nvfp4
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.matrix_formats import Matrix
from ml4core.models.quantize_options import QuantizeOptions
from ml4core.models.quantize_plan import Unit
from ml4core.models.quantize_source import stored_blocks, value_blocks
from ml4core.models.value_check import ValueCheck

Write = Callable[[str, int, Tensor], int]
"""Called with a tensor's name, the byte of it to begin at, and values; returns where they end."""


class Converter:
    """Converts units of one checkpoint; `step` is called after each block."""

    def __init__(
        self, checkpoint: Checkpoint, options: QuantizeOptions, step: Callable[[], None]
    ) -> None:
        self._checkpoint = checkpoint
        self._options = options
        self._step = step
        self._amax: dict[str, float] = {}  # by the name of a matrix's values

    def run(self, unit: Unit, write: Write) -> None:
        """Write all outputs of `unit`. Raises CheckpointError, OSError."""
        if unit.action == "copy":
            self._copy(unit, write)
        elif unit.action == "reform":
            self._reform(unit, write)
        else:
            self._convert(unit, write)

    def _copy(self, unit: Unit, write: Write) -> None:
        matrix = unit.group.matrix if isinstance(unit.group.matrix, Matrix) else None
        for info in unit.group.tensors:
            end = 0
            for block in stored_blocks(self._checkpoint, info, matrix):
                end = write(info.name, end, block)
                self._step()

    def _reform(self, unit: Unit, write: Write) -> None:
        """Codes and group scales are those of the other form; the rest is its reciprocal."""
        matrix = unit.group.matrix
        assert isinstance(matrix, Matrix)
        sources = (matrix.data, matrix.scale, matrix.global_scale, matrix.input_scale)
        for source, output in zip(filter(None, sources), unit.outputs, strict=True):
            end = 0
            for block in stored_blocks(self._checkpoint, source, matrix):
                whole = source in (matrix.global_scale, matrix.input_scale)
                stored = nvfp4.reciprocal(block) if whole else block
                end = write(output.name, end, stored)
                self._step()

    def _convert(self, unit: Unit, write: Write) -> None:
        matrix = unit.group.matrix
        assert isinstance(matrix, Matrix)
        whole = self._global_scale(unit) if unit.format == "nvfp4" else None
        ends = [0] * len(unit.outputs)
        rounded = ValueCheck(matrix.data, " once rounded to bf16")
        for start, values in value_blocks(self._checkpoint, matrix):
            parts = self._encode(values, unit.format, whole)
            if unit.format == "bf16" and values.dtype != torch.bfloat16:
                rounded.add(start, parts[0])
            for index, part in enumerate(parts):
                ends[index] = write(unit.outputs[index].name, ends[index], part)
            self._step()
        rounded.finish()
        if whole is not None:
            write(unit.outputs[-1].name, 0, whole)

    def _encode(
        self, values: Tensor, format: str | None, whole: Tensor | None
    ) -> tuple[Tensor, ...]:
        """What is stored of values [rows, K], in the order of a unit's outputs."""
        if format == "bf16":
            return (values.to(torch.bfloat16),)
        if format == "fp8_block":
            return fp8_block.quantize_weight(values)
        if format == "mxfp4":
            fast = values.dtype == torch.bfloat16
            return (mxfp4_bf16 if fast else mxfp4).quantize(values, self._options.mxfp4_rule)
        if self._options.nvfp4_form == "compressed-tensors":
            return nvfp4.quantize(values, divisor=whole)
        return nvfp4.quantize(values, multiplier=whole)

    def _global_scale(self, unit: Unit) -> Tensor:
        amax = torch.tensor(max(self._amax_of(matrix) for matrix in unit.fused))
        if self._options.nvfp4_form == "compressed-tensors":
            return nvfp4.global_divisor(amax)
        return nvfp4.global_multiplier(amax)

    def _amax_of(self, matrix: Matrix) -> float:
        known = self._amax.get(matrix.data.name)
        if known is None:
            known = 0.0
            for _, values in value_blocks(self._checkpoint, matrix):
                if values.numel():
                    known = max(known, float(values.abs().amax()))
                self._step()
            self._amax[matrix.data.name] = known
        return known
