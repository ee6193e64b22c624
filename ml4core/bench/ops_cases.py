"""Ops at shapes worth knowing, for ``ml4 bench ops``: what each is given, and the least that it has
to move and to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Capabilities, KVCache, KVLayout, Weight
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.compose.ops import COMPOSED

BLOCK = 64
"""Tokens a page."""
_BITS = {"fp8_block": 8.0, "bf16": 16.0, "fp32": 32.0, "mxfp4": 4.25, "nvfp4": 4.5}


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its contexts.

    Attributes:
        rows: of a step, each of which is measured.
        width: of the residual; ``expert`` of an expert.
    """

    rows: tuple[int, ...]
    heads: int
    index_heads: int
    width: int
    expert: int
    experts: int
    topk: int
    context: int
    vocab: int


SIZES = {
    # A tensor-parallel rank of eight of the full model.
    "full": Size((1, 8, 64), 8, 32, 6144, 768, 128, 2048, 65536, 131072),
    "small": Size((1, 4), 4, 4, 256, 128, 8, 64, 512, 2048),
}


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        make: its arguments of a seed.
        nbytes, flops: the least that it moves and computes.
    """

    name: str
    op: str
    make: Callable[[int], tuple[Any, ...]]
    nbytes: int
    flops: int = 0


class Maker:
    """Draws arguments on a device, in layouts and formats that a backend declares."""

    def __init__(self, size: Size, device: torch.device, capabilities: Capabilities) -> None:
        self.size, self.device = size, device
        self.dtype = getattr(torch, capabilities.defaults.get("dtype", "float32"))
        self.latent = latent_layout(capabilities.defaults.get("kv", "fp32"))
        self.index = index_layout(capabilities.defaults.get("index", "fp32"))
        formats = capabilities.names("weights")
        self.formats = [name for name in ("fp8_block", "mxfp4", "bf16", "fp32") if name in formats]

    def normal(self, seed: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        few = torch.randn(min(1 << 20, max(1, _count(shape))), generator=draw)
        # What is long repeats itself: a device's own generator gives other numbers than the host's.
        flat = few.to(self.device).repeat(-(-_count(shape) // len(few)))[: _count(shape)]
        return flat.view(shape).to(dtype or self.dtype)

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)

    def cache(self, layout: KVLayout, blocks: int, seed: int) -> KVCache:
        rows = self.normal(seed, blocks, BLOCK, layout.width, dtype=torch.float32)
        return KVCache(layout, BLOCK, tuple(layout.pack(rows, None)))

    def weight(self, format: str, seed: int, *shape: int) -> Weight:
        data = self.normal(seed, *shape, dtype=torch.float32) * shape[-1] ** -0.5
        if format in ("fp32", "bf16"):
            dtype = torch.float32 if format == "fp32" else torch.bfloat16
            return Weight(format, shape, {"data": data.to(dtype)})
        found = COMPOSED["quantize"](data, format, None)
        assert isinstance(found, Weight)
        return found

    def chosen(self, seed: int, rows: int, count: int, high: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        each = [torch.randperm(high, generator=draw)[:count] for _ in range(rows)]
        return torch.stack(each).to(self.device)


def cases(maker: Maker) -> Iterator[Case]:
    """In the order of the table."""
    for rows in maker.size.rows:
        yield from _attention(maker, rows)
        yield from _products(maker, rows)
        yield from _small(maker, rows)


def _attention(m: Maker, rows: int) -> Iterator[Case]:
    size, pages = m.size, m.size.context // BLOCK
    row = m.latent.bytes_per_token

    def sparse(seed: int) -> tuple[Any, ...]:
        cache = m.cache(m.latent, pages + 1, seed)
        slots = m.chosen(seed, rows, size.topk, size.context).to(torch.int32)
        q = m.normal(seed, rows, size.heads, m.latent.width)
        return q, cache, slots, m.ints(*[size.topk] * rows), m.latent.width**-0.5

    yield Case(
        f"sparse_mla {m.latent.id} {size.heads} heads, {size.topk} keys, {rows} rows",
        "sparse_mla", sparse, rows * size.topk * row,
        2 * rows * size.heads * size.topk * (m.latent.width + 512),
    )  # fmt: skip

    def logits(seed: int) -> tuple[Any, ...]:
        cache = m.cache(m.index, rows * pages + 1, seed)
        table = 1 + m.chosen(seed, 1, rows * pages, rows * pages).to(torch.int32)
        q = m.normal(seed, rows, size.index_heads, m.index.width, dtype=torch.float32)
        weights = m.normal(seed + 1, rows, size.index_heads, dtype=torch.float32)
        visible = m.ints(*[size.context] * rows)
        start = m.ints(*range(rows + 1))
        return q, weights, 0.01, cache, table.view(rows, pages), start, visible, 1

    yield Case(
        f"indexer_logits {m.index.id} {size.index_heads} heads, {rows} rows of {size.context}",
        "indexer_logits", logits, rows * size.context * (m.index.bytes_per_token + 4),
        2 * rows * size.index_heads * size.context * m.index.width,
    )  # fmt: skip

    def top(seed: int) -> tuple[Any, ...]:
        scores = m.normal(seed, rows, size.context, dtype=torch.float32)
        return scores, m.ints(*[size.context] * rows), size.topk

    yield Case(
        f"topk {size.topk} of {size.context}, {rows} rows", "topk", top, 4 * rows * size.context
    )


def _products(m: Maker, rows: int) -> Iterator[Case]:
    size, item = m.size, m.dtype.itemsize
    width, inner = size.width, size.expert
    for format in m.formats:
        each = _BITS[format] / 8

        def product(seed: int, format: str) -> tuple[Any, ...]:
            return m.normal(seed, rows, width), m.weight(format, seed, width, width)

        yield Case(
            f"gemm {format} {width}x{width}, {rows} rows", "gemm", partial(product, format=format),
            int(width * width * each) + 2 * rows * width * item, 2 * rows * width * width,
        )  # fmt: skip
    format = m.formats[0]
    choices = min(4, size.experts)
    touched = size.experts * (1 - (1 - choices / size.experts) ** rows)
    stacks: list[Weight] = []

    def experts(seed: int) -> tuple[Any, ...]:
        if not stacks:  # one for all seeds: choices differ
            for shape in ((2 * inner, width), (width, inner)):
                one = m.weight(format, 1, *shape)
                parts = {
                    key: part.unsqueeze(0).repeat(size.experts, *[1] * part.dim())
                    for key, part in one.parts.items()
                }
                stacks.append(Weight(format, (size.experts, *shape), parts))
        ids = m.chosen(seed, rows, choices, size.experts)
        weights = m.normal(seed, rows, choices, dtype=torch.float32).abs()
        return m.normal(seed, rows, width), *stacks, weights, ids

    yield Case(
        f"moe_experts {format} {size.experts} of {inner}, {rows} rows", "moe_experts", experts,
        int(touched * 3 * width * inner * _BITS[format] / 8), 6 * rows * choices * width * inner,
    )  # fmt: skip

    def routed(seed: int) -> tuple[Any, ...]:
        gate = m.normal(seed, size.experts, width, dtype=torch.float32)
        return m.normal(seed, rows, width), gate, choices, True, 1.0

    yield Case(
        f"router {size.experts} experts, {rows} rows", "router", routed, 4 * size.experts * width,
        2 * rows * size.experts * width,
    )  # fmt: skip


def _small(m: Maker, rows: int) -> Iterator[Case]:
    width, item = m.size.width, m.dtype.itemsize

    def normed(seed: int) -> tuple[Any, ...]:
        return m.normal(seed, rows, width), m.normal(seed + 1, width), 1e-6

    yield Case(f"rms_norm {width}, {rows} rows", "rms_norm", normed, 2 * rows * width * item)

    def written(seed: int) -> tuple[Any, ...]:
        counts = {field.name: field.count for field in m.latent.fields}
        slots = m.ints(*range(BLOCK, BLOCK + rows), dtype=torch.int64)
        latent, rope = (m.normal(seed, rows, counts[name]) for name in ("latent", "rope"))
        return m.cache(m.latent, 2 + rows // BLOCK, seed), slots, latent, rope

    row = m.latent.bytes_per_token
    yield Case(f"kv_write {m.latent.id}, {rows} rows", "kv_write", written, rows * row)

    def drawn(seed: int) -> tuple[Any, ...]:
        zeros = m.ints(*[0] * rows, dtype=torch.int64)
        logits = m.normal(seed, rows, m.size.vocab, dtype=torch.float32)
        return logits, zeros.float(), zeros, zeros

    yield Case(f"sample of {m.size.vocab}, {rows} rows", "sample", drawn, 4 * rows * m.size.vocab)


def _count(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
