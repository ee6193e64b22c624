"""By which sizes a model can't be shared out among ranks, and by which it can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ml4core.api import ModelSpec
from ml4core.engine.args import EngineArgs
from ml4core.models.matrix_formats import BLOCKS
from ml4core.planning.ranks import Ranks
from ml4core.planning.weights import Held, WeightTable, rank_shape

MAX_SIZE = 512


def problems(args: EngineArgs, spec: ModelSpec, table: WeightTable, held: Held) -> list[str]:
    """Sizes by which this model can't be shared out, each with those that work."""
    found = []
    ranks = Ranks.of(args)
    if args.pipeline_parallel_size > 1:
        found.append(
            f"--pipeline-parallel-size: {args.pipeline_parallel_size} is not planned: layers that "
            "read another layer's rows would be parted from it; works: 1, with a larger "
            "--tensor-parallel-size"
        )
    reasons = list(_reasons(ranks, spec, table, held))
    if reasons:
        found.append(_told(ranks, reasons, spec, table, held))
    heads = spec.layers[0].heads
    if heads % ranks.dcp:
        works = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        found.append(
            f"--decode-context-parallel-size: {ranks.dcp} does not divide the {heads} attention "
            f"heads, which its ranks share when they join results; works: {works}"
        )
    return found


def valid_tensor_sizes(
    ranks: Ranks, spec: ModelSpec, table: WeightTable, held: Held, dcp: int = 1
) -> list[int]:
    """Tensor parallel sizes by which the model can be shared out, the other sizes as they are."""
    heads = spec.layers[0].heads
    return [
        tp
        for tp in range(1, min(heads, MAX_SIZE) + 1)
        if heads % tp == 0
        and (ranks.pcp > 1 or tp % dcp == 0)
        and not any(_reasons(replace(ranks, tp=tp), spec, table, held))
    ]


def _told(ranks: Ranks, reasons: list[str], spec: ModelSpec, table: WeightTable, held: Held) -> str:
    field, value = "--tensor-parallel-size", ranks.tp
    works = ", ".join(map(str, valid_tensor_sizes(ranks, spec, table, held)))
    if not works:  # no tensor parallel size is right: the others are too large
        field, value = "--data-parallel-size", ranks.dp
        sizes = [
            dp
            for dp in range(1, ranks.dp)
            if not any(_reasons(replace(ranks, dp=dp), spec, table, held))
        ]
        works = ", ".join(map(str, sizes))
    remedy = f"; works: {works}" if works else "; works: other parallel sizes, or another format"
    return f"{field}: {value} {'; '.join(reasons)}{remedy}"


def _reasons(ranks: Ranks, spec: ModelSpec, table: WeightTable, held: Held) -> Iterator[str]:
    """Why these sizes don't do, as texts that follow the size. Scales are only looked at where all
    divides.
    """
    coarse = list(_undivided(ranks, spec))
    yield from coarse or _cut_scales(ranks, table, held)


def _undivided(ranks: Ranks, spec: ModelSpec) -> Iterator[str]:
    layers = spec.layers  # the drafter's are not cut
    for heads in sorted({layer.heads for layer in layers}):
        if heads % ranks.tp:
            yield f"does not divide the {heads} attention heads"
    widths = {layer.dense_width for layer in layers if layer.dense_width is not None}
    widths |= {layer.moe.shared_width for layer in layers if layer.moe is not None}
    for width in sorted(widths - {0}):
        if width % ranks.tp:
            yield f"does not divide a feed-forward width of {width}"
    for moe in dict.fromkeys(layer.moe for layer in layers if layer.moe is not None):
        across = f"with {ranks.world} ranks in all, which"
        if ranks.expert_parallel and moe.experts % ranks.world:
            yield f"{across} do not divide the {moe.experts} experts"
        elif not ranks.expert_parallel and moe.expert_width % ranks.world:
            yield f"{across} do not divide the experts' width of {moe.expert_width}"


def _cut_scales(ranks: Ranks, table: WeightTable, held: Held) -> Iterator[str]:
    """Weights whose share would begin within a block or group that has one scale."""
    told = set()
    for lot in table.lots:
        format = held(lot)
        piece = BLOCKS.get(format)
        if lot.kind != "matrix" or piece is None:
            continue
        _, rows, columns = rank_shape(lot, ranks)
        for what, whole, share, size in (
            ("rows", lot.rows, rows, piece.rows),
            ("columns", lot.columns, columns, piece.columns),
        ):
            if share != whole and share % size and lot.role not in told:
                told.add(lot.role)
                yield (
                    f"cuts the {whole} {what} of {lot.role} to {share}, and {format} has a scale "
                    f"for {size}"
                )
