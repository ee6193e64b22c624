"""The weights of a model as a short table: what a checkpoint stores, and what ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ml4core.models.matrix_formats import BLOCKS
from ml4core.models.requant import SOURCES, TARGET
from ml4core.models.shards import EXPERT_ROLES, Shard
from ml4core.planning.formats import PLAIN, held_bytes
from ml4core.planning.parts import PARTS, Cut, cut_of
from ml4core.planning.ranks import Ranks

STORED_ONLY = "stored only"


@dataclass(frozen=True, slots=True)
class Lot:
    """Weights that are alike: one role, shape and format.

    Attributes:
        role: a name of ``LAYER_WEIGHTS`` and the like.
        rows, columns: of the matrix; a vector is [1, columns], and has its size as rows where ranks
            share it out.
        format: as stored, of ``WEIGHT_FORMATS``.
        kind: ``matrix`` may be quantised, ``plain`` is a matrix that may not, ``vector`` the rest;
            ``STORED_ONLY`` is read and then dropped.
        stacked: matrices that are laid one below the other in one weight, this one's height each.
        count: how many there are.
        stored: bytes of all of them in the checkpoint.
        mixed: whether others of the same stack have another format.
    """

    part: str
    role: str
    rows: int
    columns: int
    format: str
    kind: str
    stacked: int
    count: int
    stored: int
    mixed: bool = False


Held = Callable[[Lot], str]
"""The format in which a device holds what is stored so."""

_ALWAYS_FP32 = ("gate", "index_weights_proj")


def kept(dtype: str) -> Held:
    """As core hands weights to a backend: quantised ones stay so wherever they can.

    ``dtype`` (``bf16`` or ``fp32``) is what the others are decoded to: the two halves of wkv_b, and
    stacks whose parts end within a block or differ in format.
    """

    def held(lot: Lot) -> str:
        if lot.role in _ALWAYS_FP32:
            return "fp32"
        if lot.kind == "vector":
            learned = lot.role.startswith(("index_", "ssmax_")) or lot.role == "inv_freq"
            return "fp32" if learned else lot.format
        if lot.format in PLAIN and not lot.mixed:
            return lot.format
        ragged = lot.stacked > 1 and lot.rows % BLOCKS[lot.format].rows
        return dtype if lot.mixed or ragged or lot.role == "w_uk, w_uv" else lot.format

    return held


def decoded(dtype: str) -> Held:
    """Of a backend that brings every matrix to ``dtype`` when it loads it."""
    as_handed = kept(dtype)

    def held(lot: Lot) -> str:
        if lot.kind == "vector" or lot.role in _ALWAYS_FP32:
            return as_handed(lot)
        return lot.format if lot.role in _TENSORS and lot.format in PLAIN else dtype

    return held


def requantised(held: Held) -> Held:
    """As ``held``, with routed experts in FP8 as MXFP4: what they become while they are loaded."""

    def converted(lot: Lot) -> str:
        return TARGET if lot.role in EXPERT_ROLES and lot.format in SOURCES else held(lot)

    return converted


# Matrices that backends receive as plain tensors, in the checkpoint's dtype.
_TENSORS = ("markov_w1", "mask_embeddings")


@dataclass(frozen=True)
class PartBytes:
    """Bytes of one part: in the checkpoint, held by all ranks if there were one, held by one."""

    stored: int
    held: int
    rank: int


class WeightTable:
    """All weights of a model, as lots."""

    def __init__(self, lots: Iterable[Lot]) -> None:
        self.lots = tuple(lots)

    @cached_property
    def stored(self) -> int:
        return sum(lot.stored for lot in self.lots)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        found = {lot.part for lot in self.lots}
        return tuple(part for part in PARTS if part in found)

    def without(self, *parts: str) -> WeightTable:
        return WeightTable(lot for lot in self.lots if lot.part not in parts)

    def by_part(self, ranks: Ranks, held: Held) -> dict[str, PartBytes]:
        sums = {part: [0, 0, 0] for part in self.parts}
        for lot in self.lots:
            sums[lot.part][0] += lot.stored
            if lot.kind == STORED_ONLY:
                continue
            format = held(lot)
            sums[lot.part][1] += lot.count * held_bytes(format, lot.rows, lot.columns)
            sums[lot.part][2] += rank_bytes(lot, format, ranks)
        return {part: PartBytes(*each) for part, each in sums.items()}

    def formats(self) -> Mapping[str, int]:
        """Bytes stored in each format."""
        found: dict[str, int] = {}
        for lot in self.lots:
            found[lot.format] = found.get(lot.format, 0) + lot.stored
        return dict(sorted(found.items()))


def rank_shape(lot: Lot, ranks: Ranks) -> tuple[int, int, int]:
    """(count, rows, columns) of a rank's share, of the rank that has most."""
    cut: Cut = cut_of(lot.part, lot.role)
    count, rows, columns = lot.count, lot.rows, lot.columns
    if cut == "vocabulary":
        return count, Shard(0, ranks.tp).vocab(rows).rows, columns
    if cut == "rows":
        return count, -(-rows // ranks.tp), columns
    if cut == "columns":
        return count, rows, -(-columns // ranks.tp)
    if cut == "whole":
        return count, rows, columns
    if ranks.ep > 1:
        return -(-count // ranks.ep), rows, columns
    width = ranks.expert_width
    if cut == "expert_rows":
        return count, -(-rows // width), columns
    return count, rows, -(-columns // width)


def rank_bytes(lot: Lot, format: str, ranks: Ranks) -> int:
    count, rows, columns = rank_shape(lot, ranks)
    return count * held_bytes(format, rows, columns)
