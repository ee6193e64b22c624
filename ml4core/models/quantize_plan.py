"""What becomes of each tensor of a checkpoint, and which file it goes to; from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ml4core.formats import fp8_block, mxfp4, nvfp4
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.checkpoint_files import shard_name
from ml4core.models.errors import CheckpointError
from ml4core.models.matrix_formats import BLOCKS, Fault, Matrix
from ml4core.models.quantize_options import QuantizeOptions
from ml4core.models.quantize_source import Group, groups_of
from ml4core.models.safetensors_file import MAX_HEADER_BYTES, TensorInfo
from ml4core.models.safetensors_planned import PlannedShard, planned
from ml4core.models.safetensors_writer import entry_bytes

METADATA = {"format": "pt"}
MAX_LISTED = 24
Action = Literal["copy", "convert", "reform"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A group and what becomes of it.

    Attributes:
        action: `copy`; `convert`, decode and encode; `reform`, NVFP4 codes under new names.
        format: that of the result, None for what is no matrix.
        outputs: the tensors of the result, without their places.
        fused: for NVFP4, groups that share the global scale: their kernels keep one for all.
    """

    group: Group
    action: Action
    format: str | None
    outputs: tuple[TensorInfo, ...]
    fused: tuple[Matrix, ...] = ()

    @property
    def cost(self) -> int:
        """Bytes to read: of a matrix twice, where a largest value must be found first."""
        return self.group.nbytes * (2 if self.fused else 1)


@dataclass(frozen=True)
class Plan:
    """All units, and the files: name -> (layout, its units)."""

    units: Sequence[Unit]
    shards: Mapping[str, tuple[PlannedShard, tuple[Unit, ...]]]

    @property
    def cost(self) -> int:
        return sum(unit.cost for unit in self.units)


def make_plan(
    checkpoint: Checkpoint, options: QuantizeOptions, source_rule: str | None, kind: str
) -> Plan:
    """Decide about every tensor. `source_rule` is the rule of the source's MXFP4, if it is known.

    `kind` begins the names of the files. Raises one CheckpointError that lists every matrix that
    can't be converted.
    """
    groups = groups_of(checkpoint)
    matrices = {group.base: group.matrix for group in groups}
    problems: list[str] = []
    units: list[Unit] = []
    for group in groups:
        format = _wanted(group, options)
        problem = _problem(group, format)
        if problem is not None:
            problems.append(problem)
        elif format is None:
            units.append(_copied(group))
        else:
            units.append(_unit(group, format, options, source_rule, matrices))
    if problems:
        raise CheckpointError(_listing(checkpoint, options, problems))
    return Plan(tuple(units), _into_shards(units, options.max_shard_bytes, kind))


def _wanted(group: Group, options: QuantizeOptions) -> str | None:
    """The format that a group shall have; None: it stays as it is."""
    chosen = options.to if group.kind == "experts" or options.chosen == "all" else options.rest
    if chosen == "keep":
        return None
    if group.kind not in options.kinds:
        return "bf16" if chosen == "bf16" and group.quantised else None
    return chosen


def _problem(group: Group, format: str | None) -> str | None:
    if format is None:
        return None
    if not isinstance(group.matrix, Matrix):
        return group.matrix.text if isinstance(group.matrix, Fault) else group.base
    columns, block = group.matrix.shape[1], BLOCKS[format].columns
    # FP8 pads its last block; packed formats have no ragged group.
    if BLOCKS[format].packed > 1 and columns % block:
        return (
            f"{group.matrix.data.name}: {columns} columns, not a multiple of {block}, the group of "
            f"{format}; fp8_block takes any width"
        )
    return None


def _unit(
    group: Group,
    format: str,
    options: QuantizeOptions,
    source_rule: str | None,
    matrices: Mapping[str, Matrix | Fault | None],
) -> Unit:
    matrix = group.matrix
    assert isinstance(matrix, Matrix)
    if matrix.format == format:
        if format == "nvfp4" and matrix.divides != (options.nvfp4_form == "compressed-tensors"):
            outputs = _outputs(group.base, matrix, format, options)
            if matrix.input_scale is not None:
                suffix = "input_scale" if matrix.divides else "input_global_scale"
                outputs += (planned(f"{group.base}.{suffix}", "F32", matrix.input_scale.shape),)
            return Unit(group, "reform", format, outputs)
        # Quark's own rule is taken where none is stated.
        if format != "mxfp4" or (source_rule or "even") == options.mxfp4_rule:
            return _copied(group)
    fused: tuple[Matrix, ...] = ()
    if format == "nvfp4":
        others = (matrices.get(base) for base in _fused_with(group.base))
        fused = (matrix, *(other for other in others if isinstance(other, Matrix)))
    return Unit(group, "convert", format, _outputs(group.base, matrix, format, options), fused)


def _fused_with(base: str) -> tuple[str, ...]:
    """Gate and up are multiplied as one matrix."""
    for one, other in (("w1", "w3"), ("gate_proj", "up_proj")):
        for mine, its in ((one, other), (other, one)):
            if base.endswith(f".{mine}"):
                return (base.removesuffix(mine) + its,)
    return ()


def _copied(group: Group) -> Unit:
    outputs = tuple(planned(info.name, info.dtype, info.shape) for info in group.tensors)
    format = group.matrix.format if isinstance(group.matrix, Matrix) else None
    return Unit(group, "copy", format, outputs)


def _outputs(
    base: str, matrix: Matrix, format: str, options: QuantizeOptions
) -> tuple[TensorInfo, ...]:
    rows, columns = matrix.shape
    if format == "bf16":
        return (planned(f"{base}.weight", "BF16", (rows, columns)),)
    if format == "fp8_block":
        return (
            planned(f"{base}.weight", "F8_E4M3", (rows, columns)),
            planned(f"{base}.weight_scale", "F32", fp8_block.scale_shape(rows, columns)),
        )
    if format == "mxfp4":
        return (
            planned(f"{base}.weight", "U8", (rows, columns // 2)),
            planned(f"{base}.weight_scale", "U8", (rows, columns // mxfp4.GROUP)),
        )
    divides = options.nvfp4_form == "compressed-tensors"
    packed = "weight_packed" if divides else "weight"
    whole = planned(f"{base}.weight_global_scale", "F32", (1,))
    if not divides:
        whole = planned(f"{base}.weight_scale_2", "F32", ())
    return (
        planned(f"{base}.{packed}", "U8", (rows, columns // 2)),
        planned(f"{base}.weight_scale", "F8_E4M3", (rows, columns // nvfp4.GROUP)),
        whole,
    )


def _into_shards(
    units: Sequence[Unit], limit: int, kind: str
) -> dict[str, tuple[PlannedShard, tuple[Unit, ...]]]:
    """Fill files in order; what belongs together stays together."""
    files: list[list[Unit]] = []
    size = header = 0
    for unit in units:
        data = sum(info.nbytes for info in unit.outputs)
        entries = sum(entry_bytes(info.name, info.dtype, info.shape) for info in unit.outputs)
        if not files or size + data > limit or header + entries > MAX_HEADER_BYTES // 2:
            files.append([])
            size = header = 0
        files[-1].append(unit)
        size, header = size + data, header + entries
    return {
        shard_name(number, len(files), kind): (
            PlannedShard((info for unit in file for info in unit.outputs), METADATA),
            tuple(file),
        )
        for number, file in enumerate(files, 1)
    }


def _listing(checkpoint: Checkpoint, options: QuantizeOptions, problems: Sequence[str]) -> str:
    lines = [
        f"{checkpoint.path}: {len(problems)} matrices can't be converted to {options.to}:",
        *(f"  - {text}" for text in problems[:MAX_LISTED]),
    ]
    if len(problems) > MAX_LISTED:
        lines.append(f"    and {len(problems) - MAX_LISTED} more")
    return "\n".join(lines)
