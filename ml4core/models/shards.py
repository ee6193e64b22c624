"""One rank's share of the weights.

Heads, widths and the vocabulary are cut over the tensor-parallel ranks, evenly; routed experts over
the expert-parallel ranks, by ranges that may differ by one. What reads everything is on every rank.
Replicas, of data parallelism, share nothing but routed experts: these are cut over all their ranks.

rows            wq, wq_b, wkv_b (W_UK, W_UV) by heads; w1, w3 by width; embedding, output by tokens
columns         wo by heads; w2 by width
every rank      wq_a, wkv_a, norms, router, indexer, frequencies, and activation scales of experts

With expert parallelism routed experts are whole; shared experts and dense layers are still cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from ml4core.api import LayerSpec, ModelSpec, Weight
from ml4core.formats.blocks import block_count
from ml4core.models.matrix_formats import BLOCKS

Span: TypeAlias = tuple[int, int]
"""[start, stop)."""
Axis = Literal["rows", "columns"]

VOCAB_MULTIPLE = 128
"""Rows of a rank's embedding and output are a multiple of this: whole blocks in any format."""

CUTS: Mapping[str, Axis] = MappingProxyType(
    {
        "wq": "rows",
        "wq_b": "rows",
        "w_uk, w_uv": "rows",
        "wo": "columns",
        "ssmax_scale": "rows",
        "ssmax_bias": "rows",
        "dense_w13": "rows",
        "dense_w2": "columns",
        "shared_w13": "rows",
        "shared_w2": "columns",
        "experts_w13": "rows",
        "experts_w2": "columns",
    }
)
"""Role of `Expected` -> the axis of each of its tensors that tensor parallelism cuts."""
HEAD_ROLES = frozenset({"wq", "wq_b", "w_uk, w_uv", "wo", "ssmax_scale", "ssmax_bias"})
EXPERT_ROLES = frozenset({"experts_w13", "experts_w2"})


class Cut(NamedTuple):
    """Rows and columns of a matrix; None for all."""

    rows: Span | None = None
    columns: Span | None = None

    def box(self, shape: tuple[int, ...]) -> tuple[Span, Span]:
        return self.rows or (0, shape[0]), self.columns or (0, shape[1])


ALL = Cut()


class VocabRows(NamedTuple):
    """A rank's rows of the vocabulary: tokens [start, stop), then rows of zeros up to `rows`."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Which rank of how many. Ranks count from 0. ValueError for a rank that is not there.

    `dp`: the replica. Expert-parallel ranks are those of all replicas, those of one side by side.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "dp"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            if size < 1 or not 0 <= rank < size:
                raise ValueError(f"{name}_rank {rank} of {name}_size {size}; ranks are 0 to size-1")

    def part(self, role: str) -> tuple[int, int]:
        """Which part, of how many, of tensors of the role this rank has; (0, 1): all."""
        if role not in CUTS:
            return 0, 1
        if role not in EXPERT_ROLES:
            return self.tp_rank, self.tp_size
        if self.ep_size > 1:
            return 0, 1
        return self.dp_rank * self.tp_size + self.tp_rank, self.dp_size * self.tp_size

    def cut(self, role: str, shape: tuple[int, ...]) -> Cut:
        """What this rank has of a tensor [rows, ...] of the role."""
        part, parts = self.part(role)
        if parts == 1:
            return ALL
        if CUTS[role] == "rows":
            return Cut(rows=_share(shape[0], part, parts))
        return Cut(columns=_share(shape[1], part, parts))

    def experts(self, count: int) -> range:
        """This rank's experts of `count`; the first ranks have one more if they don't divide."""
        size, more = divmod(count, self.ep_size)
        start = self.ep_rank * size + min(self.ep_rank, more)
        return range(start, start + size + (self.ep_rank < more))

    def vocab(self, size: int) -> VocabRows:
        """This rank's rows of a vocabulary of `size`. All ranks have as many: the last are filled
        up with zeros, whose logits are cut off behind `size` once they are gathered.
        """
        if self.tp_size == 1:
            return VocabRows(0, size, size)
        rows = math.ceil(size / (self.tp_size * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE
        start = min(self.tp_rank * rows, size)
        return VocabRows(start, min(start + rows, size), rows)


WHOLE = Shard()


def _share(total: int, part: int, parts: int) -> Span:
    """One of equal parts. ValueError if there are none."""
    if total % parts:
        raise ValueError(f"{total} can't be cut into {parts} equal parts")
    size = total // parts
    return part * size, (part + 1) * size


def padded_rows(weight: Weight, rows: int) -> Weight:
    """A matrix [N, K] with zeros below, [rows, K]: zero bytes are zeros in every format."""

    def pad(name: str, part: Tensor) -> Tensor:
        blocks = BLOCKS[weight.format]
        height = rows
        if name == "scale":
            if weight.format == "fp8_tensor":
                return part
            height = block_count(rows, blocks.rows)
        out = part.new_zeros((height, *part.shape[1:]))
        out[: len(part)] = part
        return out

    parts = {name: pad(name, part) for name, part in weight.parts.items()}
    return Weight(weight.format, (rows, *weight.shape[1:]), parts)


def shard_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The table as this rank sees it: `heads`, `dense_width`, `expert_width`, `shared_width` and
    `first_expert` are local. `moe.experts` stays the number that the router knows, `vocab_size` the
    whole vocabulary; the drafter and the vision encoder are not cut.

    Raises ValueError for a number that can't be cut.
    """
    if shard == WHOLE:
        return spec
    return replace(spec, layers=tuple(_layer(layer, shard) for layer in spec.layers))


def _layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    def part(total: int, name: str, role: str = "wq") -> int:
        _, parts = shard.part(role)
        if total % parts:
            raise ValueError(f"layer {layer.index}: {name} {total} over {parts} ranks")
        return total // parts

    width, moe = layer.dense_width, layer.moe
    if moe is not None:
        moe = replace(
            moe,
            expert_width=part(moe.expert_width, "expert_width", "experts_w2"),
            shared_width=part(moe.shared_width, "shared_width"),
            first_expert=shard.experts(moe.experts).start,
        )
    return replace(
        layer,
        heads=part(layer.heads, "heads"),
        dense_width=None if width is None else part(width, "dense_width"),
        moe=moe,
    )
