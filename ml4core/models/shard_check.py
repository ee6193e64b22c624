"""Whether a checkpoint can be cut as a shard asks: every reason against it, before any read.

The answer is the same on every rank: parts are equal, so a cut fits on all of them or on none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ml4core.api import ModelSpec
from ml4core.models.errors import CheckpointError
from ml4core.models.matrix_formats import BLOCKS
from ml4core.models.requant import SOURCES, TARGET
from ml4core.models.shards import CUTS, EXPERT_ROLES, HEAD_ROLES, Shard
from ml4core.models.tensor_table import Expected, expected_tensors
from ml4core.models.tensors import TensorReport


@dataclass(frozen=True)
class _Constraint:
    """`total` rows or columns, of which each rank's part must be whole heads and whole blocks."""

    axis: str
    total: int
    head: int
    block: int
    format: str

    def allows(self, size: int) -> bool:
        part, rest = divmod(self.total, size)
        return size == 1 or (rest == 0 and part % self.head == 0 and part % self.block == 0)

    def valid(self) -> list[int]:
        return [size for size in range(1, self.total // self.head + 1) if self.allows(size)]

    def text(self, size: int) -> str:
        part = f"{self.total} {self.axis} over {size} ranks are {self.total / size:g} each"
        if self.total % size or self.total // size % self.head:
            unit = f"whole heads of {self.head}" if self.head > 1 else "whole"
        else:
            unit = f"a multiple of {self.block}, the block of {self.format}"
        return f"{part}, not {unit}; TP sizes that work: {', '.join(map(str, self.valid()))}"


def check_shard(
    where: str, spec: ModelSpec, report: TensorReport, shard: Shard, requant: bool = False
) -> None:
    """Raises one CheckpointError that names each tensor that can't be cut, its size on a rank, the
    block, the TP sizes that would do, and those that would do for all. `requant`: experts in FP8
    become MXFP4, whose groups are what counts then.
    """
    found: dict[tuple[str, _Constraint], list[str]] = {}
    for entry in expected_tensors(spec).values():
        if entry.used and shard.part(entry.role)[1] > 1:
            constraint = _constraint(spec, entry, report, requant)
            found.setdefault((entry.role, constraint), []).append(entry.name)
    problems = list(_expert_problems(spec, shard))
    for (role, constraint), names in found.items():
        _, parts = shard.part(role)
        if not constraint.allows(parts):
            alike = f" (and {len(names) - 1} alike)" if len(names) > 1 else ""
            problems.append(f"{names[0]}{alike}: {constraint.text(parts)}")
    if not problems:
        return
    across = f" over {shard.dp_size} replicas" if shard.dp_size > 1 else ""
    lines = [f"{where}: can't be cut for tensor parallel size {shard.tp_size}{across}", *problems]
    if found:
        all_valid = [set(constraint.valid()) for _, constraint in found]
        sizes = ", ".join(map(str, sorted(set.intersection(*all_valid))))
        lines.append(f"TP sizes that work for every tensor: {sizes}")
        others = [set(c.valid()) for role, c in found if role not in EXPERT_ROLES]
        whole = set.intersection(*others) if others else {shard.tp_size}
        if shard.ep_size == 1 and shard.tp_size in whole:
            lines.append(f"{shard.tp_size} works with --enable-expert-parallel: experts are whole")
    raise CheckpointError("\n  - ".join(lines))


def _expert_problems(spec: ModelSpec, shard: Shard) -> Iterator[str]:
    if shard.ep_size == 1:
        return
    counts = sorted({layer.moe.experts for layer in spec.layers if layer.moe is not None})
    if not counts:
        yield f"expert parallel size {shard.ep_size}: no layer has experts; 1 works"
    elif counts[0] < shard.ep_size:
        yield (
            f"expert parallel size {shard.ep_size}: a layer has {counts[0]} experts, so ranks "
            f"would have none; 1 to {counts[0]} work"
        )


def _constraint(
    spec: ModelSpec, entry: Expected, report: TensorReport, requant: bool
) -> _Constraint:
    axis = CUTS[entry.role]
    total = entry.shapes[0][axis == "columns"]
    assert entry.layer is not None  # nothing outside of layers is cut evenly
    head = total // spec.layers[entry.layer].heads if entry.role in HEAD_ROLES else 1
    matrix = report.matrices.get(entry.name.rpartition(".")[0])
    block, format = 1, ""
    # W_UK and W_UV are decoded, so their cut may be anywhere.
    if matrix is not None and entry.role != "w_uk, w_uv":
        converted = requant and matrix.format in SOURCES and entry.role in EXPERT_ROLES
        format = TARGET if converted else matrix.format
        blocks = BLOCKS[format]
        block = blocks.rows if axis == "rows" else blocks.columns
    return _Constraint(axis, total, head, block, format)
