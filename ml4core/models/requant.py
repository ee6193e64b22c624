"""Routed experts in FP8 that become MXFP4 while a checkpoint is read.

Until its layer is read, a stack of experts is a shape: arrays on torch's ``meta`` device. A layer's
stacks are made when it is asked for, and filled expert by expert: a matrix is read as FP8, is worth
bfloat16, is stored as MXFP4, and is dropped. So memory peaks at the MXFP4 model, the matrix that is
read, and what a strip of its rows takes; never at a layer in FP8 and another one.

What is MXFP4 already, as in a checkpoint of Quark, stays as it is: converting twice is converting
once. Bytes are those of `ml4 quantize --to mxfp4`, whatever the order of tensors in files, and on
each rank those of its part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.formats import fp8_block, mxfp4, mxfp4_bf16, mxfp4_fp8
from ml4core.models.errors import CheckpointError
from ml4core.models.matrix_formats import BLOCKS, Matrix
from ml4core.models.shards import Cut

if TYPE_CHECKING:
    from ml4core.models.matrix_reader import MatrixReader
    from ml4core.models.tensors import TensorReport

SOURCES = frozenset({"fp8_block", "fp8_tensor"})
"""Formats that are converted."""

TARGET = "mxfp4"

_EXPERT = re.compile(r".*layers\.\d+\.experts\.\d+\.w[123]")
_STRIP_BYTES = 4 << 20  # of values as bfloat16, where a part doesn't begin with a block


@dataclass(frozen=True)
class Requant:
    """How experts are converted.

    Attributes:
        rule: of ``formats.mxfp4.RULES``; ``even`` is Quark's.
        device: where: matrices are brought there as FP8, and the stacks stay there.
    """

    rule: str = "even"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.rule not in mxfp4.RULES:
            known = ", ".join(mxfp4.RULES)
            raise ValueError(f"unknown MXFP4 scale rule {self.rule!r}; known: {known}")


def is_expert(stem: str) -> bool:
    """Whether the canonical name without suffix is of a routed expert's matrix."""
    return _EXPERT.fullmatch(stem) is not None


def expert_formats(report: TensorReport) -> frozenset[str]:
    """Formats of routed experts' matrices."""
    return frozenset(one.format for stem, one in report.matrices.items() if is_expert(stem))


def formats_after(report: TensorReport) -> frozenset[str]:
    """Formats of all matrices, once experts in FP8 are converted."""
    return frozenset(
        TARGET if matrix.format in SOURCES and is_expert(stem) else matrix.format
        for stem, matrix in report.matrices.items()
    )


def nbytes_after(report: TensorReport) -> int:
    """Bytes of the tensors that the decoder reads, once experts in FP8 are converted."""
    found = report.nbytes
    for stem, matrix in report.matrices.items():
        if matrix.format in SOURCES and is_expert(stem):
            rows, columns = matrix.shape
            found += rows * (columns // BLOCKS[TARGET].packed + columns // mxfp4.GROUP)
            found -= matrix.nbytes
    return found


def wants(matrices: Iterable[Iterable[Matrix]]) -> bool:
    """Whether a stack of experts is to be converted: all of it is FP8, or nothing. Raises
    CheckpointError for a stack of several formats with FP8 among them.
    """
    formats = {matrix.format: matrix for group in matrices for matrix in group}
    fp8 = formats.keys() & SOURCES
    if not fp8 or formats.keys() <= SOURCES:
        return bool(fp8)
    names = ", ".join(f"{one.data.name} ({name})" for name, one in sorted(formats.items()))
    file = next(iter(formats.values())).data.file
    raise CheckpointError(
        f"{file}: experts of one layer differ in format: {names}; only FP8 is converted at "
        "loading. ml4 quantize converts all"
    )


def planned_stack(shape: tuple[int, int, int]) -> Weight:
    """The stack [E, N, K] as shapes alone, on the ``meta`` device."""
    count, rows, columns = shape
    sizes = {"data": columns // BLOCKS[TARGET].packed, "scale": columns // mxfp4.GROUP}
    parts = {
        name: torch.empty(count, rows, width, dtype=torch.uint8, device="meta")
        for name, width in sizes.items()
    }
    return Weight(TARGET, shape, parts)


def converted_stack(
    read: MatrixReader, matrices: Sequence[Sequence[Matrix]], cut: Cut, requant: Requant
) -> Weight:
    """The stack [groups, sum of rows, K]: each group's matrices, or ``cut`` of each, one below the
    other, in MXFP4.

    Raises CheckpointError for a value that isn't finite, or that no bfloat16 holds, and for columns
    that are no whole groups.
    """
    boxes = [cut.box(matrix.shape) for matrix in matrices[0]]
    heights = [bottom - top for (top, bottom), _ in boxes]
    left, right = boxes[0][1]
    if left % mxfp4.GROUP or right % mxfp4.GROUP:
        raise CheckpointError(
            f"{matrices[0][0].data.name}: columns {left} to {right} are no whole groups of "
            f"{mxfp4.GROUP}, the unit of MXFP4"
        )
    plan = planned_stack((len(matrices), sum(heights), right - left))
    made = {
        name: torch.empty_like(part, device=requant.device) for name, part in plan.parts.items()
    }
    for index, group in enumerate(matrices):
        row = 0
        for matrix, height in zip(group, heights, strict=True):
            place = slice(row, row + height)
            out = made["data"][index, place], made["scale"][index, place]
            try:
                _convert(read, matrix, cut, requant, out)
            except ValueError as error:
                raise CheckpointError(f"{matrix.data.file}: {matrix.data.name}: {error}") from error
            row += height
    return Weight(TARGET, plan.shape, made)


def _convert(
    read: MatrixReader, matrix: Matrix, cut: Cut, requant: Requant, out: tuple[Tensor, Tensor]
) -> None:
    """One matrix; nothing of its source outlives the call."""
    (top, bottom), (left, right) = cut.box(matrix.shape)
    if top % fp8_block.BLOCK == 0 and left % fp8_block.BLOCK == 0:
        weight = read.weight(matrix, cut)
        code, scale = (weight.parts[name].to(requant.device) for name in ("data", "scale"))
        del weight
        if matrix.format == "fp8_tensor":  # the same value in every block
            scale = scale.expand(fp8_block.scale_shape(*code.shape))
        mxfp4_fp8.requantize(code, scale, requant.rule, out)
        return
    step = max(_STRIP_BYTES // (2 * max(right - left, 1)), 1)
    for start in range(top, bottom, step):
        stop = min(start + step, bottom)
        values = read.values(matrix, torch.bfloat16, Cut((start, stop), (left, right)))
        if not bool(values.isfinite().all()):
            raise ValueError("code times scale is beyond bfloat16's largest")
        found = mxfp4_bf16.quantize(values.to(requant.device), requant.rule)
        for target, part in zip(out, found, strict=True):
            target[start - top : stop - top] = part


@dataclass(frozen=True)
class Peak:
    """Bytes of weights that live at most while a model is loaded and kept.

    Attributes:
        kept: all weights of the model.
        layer: FP8 experts of one layer, values and scales.
        expert: one expert's matrices in bfloat16.
    """

    kept: int
    layer: int
    expert: int

    @property
    def nbytes(self) -> int:
        return self.kept + self.layer + self.expert


def peak(kept: int, report: TensorReport) -> Peak:
    """The bound for a model whose weights take ``kept`` bytes once loaded, on one rank."""
    layers: dict[str, int] = {}
    experts: dict[str, int] = {}
    for stem, matrix in report.matrices.items():
        if is_expert(stem) and matrix.format in SOURCES:
            expert = stem.rpartition(".")[0]
            layer = expert.rpartition(".")[0]
            layers[layer] = layers.get(layer, 0) + matrix.nbytes
            rows, columns = matrix.shape
            experts[expert] = experts.get(expert, 0) + 2 * rows * columns
    return Peak(kept, max(layers.values(), default=0), max(experts.values(), default=0))
