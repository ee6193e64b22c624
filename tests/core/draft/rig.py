"""Small drafters with random weights, and requests with pages of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    DraftOutput,
    DraftPlan,
    DraftSpec,
    DraftWeights,
    KVCache,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    Sampling,
    SSMaxSpec,
    Weight,
)
from ml4core.api.known_layouts import latent_layout
from ml4core.compose.context import StageContext
from ml4core.compose.draft import draft_block
from ml4core.compose.ops import COMPOSED
from ml4core.engine.collectives import SingleRank

from .reference import Reference, Rows

HIDDEN, HEADS, LATENT, ROPE, NOPE, VALUE, VOCAB, RANK = 24, 2, 16, 4, 6, 5, 37, 7
TAPS = (0, 3, 2)  # joined in this order
LAYER = LayerSpec(
    index=0,
    hidden_size=HIDDEN,
    heads=HEADS,
    kv_lora_rank=LATENT,
    q_lora_rank=None,
    nope_dim=NOPE,
    rope_dim=ROPE,
    v_dim=VALUE,
    norm_eps=1e-6,
    softmax_scale=0.4,
    rope=RopeSpec(ROPE, 100.0),
    ssmax=SSMaxSpec(),
    kv_source=0,
    topk_source=None,
    indexer=None,
    dense_width=20,
    moe=None,
)
MOE = MoESpec(experts=5, topk=2, expert_width=10, shared_width=6, routed_scale=1.5)


def draft_of(layers: int = 3, layer: LayerSpec = LAYER, **fields: Any) -> DraftSpec:
    """A drafter of equal layers; by default of depth 3, window 6, and a vector for each mask."""
    return DraftSpec(
        **{
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "norm_eps": 1e-5,
            "layers": tuple(replace(layer, index=n, kv_source=n) for n in range(layers)),
            "taps": TAPS,
            "window": 6,
            "markov_rank": RANK,
            "mask_rows": fields.get("depth", 3) - (fields.get("anchor_vector", "none") == "none"),
        }
        | fields
    )


def model_of(draft: DraftSpec | None, vocab: int = VOCAB) -> ModelSpec:
    layers = tuple(replace(LAYER, index=n, kv_source=n) for n in range(4))
    return ModelSpec("small", vocab, HIDDEN, 1e-6, 4096, False, layers, TAPS, draft=draft)


def context_of(draft: DraftSpec | None, dtype: torch.dtype = torch.float32) -> StageContext:
    return StageContext(model_of(draft), None, COMPOSED, SingleRank(), dtype)


class Values:
    """Random values of one seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def tensor(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator) * std + mean
        return values.to(self.dtype)

    def weight(self, *shape: int) -> Weight:
        data = self.tensor(*shape, std=1.4 / shape[-1] ** 0.5)
        format = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return Weight(format, shape, {"data": data})

    def norm(self, size: int) -> Tensor:
        return self.tensor(size, mean=1.0, std=0.2)


def weights_of(draft: DraftSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> DraftWeights:
    v = Values(seed, dtype)
    hidden, vocab, rank = draft.hidden_size, draft.vocab_size, draft.markov_rank
    top = {
        "embedding": v.tensor(vocab, hidden),
        "output": v.weight(vocab, hidden),
        "fc": v.weight(hidden, len(draft.taps) * hidden),
        "context_norm": v.norm(hidden),
        "mask_embeddings": v.tensor(draft.mask_rows, hidden),
        "norm": v.norm(hidden),
        "markov_w1": v.tensor(vocab, rank),
        "markov_joint": v.weight(3 * rank, 2 * rank + hidden),
        "markov_joint_bias": v.tensor(3 * rank, std=0.3),
        "markov_w2": v.weight(vocab, rank),
    }
    if not draft.mask_rows:
        del top["mask_embeddings"]
    return DraftWeights(top, tuple(_layer_weights(layer, v) for layer in draft.layers))


def _layer_weights(layer: LayerSpec, v: Values) -> dict[str, Any]:
    hidden, latent = layer.hidden_size, layer.kv_lora_rank
    weights: dict[str, Any] = {
        "attention_norm": v.norm(hidden),
        "ffn_norm": v.norm(hidden),
        "wkv_a": v.weight(latent + layer.rope_dim, hidden),
        "kv_a_norm": v.norm(latent),
        "w_uk": v.weight(layer.heads, latent, layer.nope_dim),
        "w_uv": v.weight(layer.heads, layer.v_dim, latent),
        "wo": v.weight(hidden, layer.heads * layer.v_dim),
    }
    if layer.rope is not None:
        weights["inv_freq"] = torch.tensor([0.7, 0.09][: layer.rope_dim // 2])
    if layer.q_lora_rank is None:
        weights["wq"] = v.weight(layer.heads * layer.q_dim, hidden)
    else:
        weights["wq_a"] = v.weight(layer.q_lora_rank, hidden)
        weights["q_a_norm"] = v.norm(layer.q_lora_rank)
        weights["wq_b"] = v.weight(layer.heads * layer.q_dim, layer.q_lora_rank)
    if layer.moe is None:
        assert layer.dense_width is not None
        weights["dense_w13"] = v.weight(2 * layer.dense_width, hidden)
        weights["dense_w2"] = v.weight(hidden, layer.dense_width)
        return weights
    moe = layer.moe
    weights["gate"] = v.tensor(moe.experts, hidden).float()
    weights["experts_w13"] = v.weight(moe.experts, 2 * moe.expert_width, hidden)
    weights["experts_w2"] = v.weight(moe.experts, hidden, moe.expert_width)
    weights["shared_w13"] = v.weight(2 * moe.shared_width, hidden)
    weights["shared_w2"] = v.weight(hidden, moe.shared_width)
    return weights


@dataclass
class Request:
    """A request whose tokens below `length` are accepted; the anchor stands at `length`."""

    length: int
    anchor: int
    pages: list[int]
    taps: list[Tensor]
    """Of each tapped layer, [room, H] by position: those at and above `length` are of rejects."""
    seed: int = 0
    temperature: float = 0.0
    stored: int = 0
    """Positions below are stored."""

    def slot(self, position: int, block_size: int) -> int:
        return self.pages[position // block_size] * block_size + position % block_size


@dataclass
class Rig:
    """A drafter, its caches, and requests."""

    draft: DraftSpec
    dtype: torch.dtype = torch.float32
    layout: str = "fp32"
    block_size: int = 4
    blocks: int = 80
    seed: int = 0
    weights: DraftWeights = field(init=False)
    caches: list[KVCache] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = weights_of(self.draft, self.seed, self.dtype)
        self.call = draft_block(context_of(self.draft, self.dtype), {})
        self.reference = Reference(self.draft, self.weights)
        first = self.draft.layers[0]
        layout = latent_layout(self.layout, first.kv_lora_rank, first.rope_dim)
        noise = Values(99, torch.float32)
        self.caches = [
            KVCache(
                layout,
                self.block_size,
                layout.pack(noise.tensor(self.blocks, self.block_size, layout.width), None),
            )
            for _ in self.draft.layers
        ]
        self.order = torch.randperm(self.blocks - 1, generator=noise.generator) + 1

    def requests(self, *lengths: int, room: int = 0, seed: int = 1) -> list[Request]:
        """Requests of these lengths, with pages for a block after them, scattered."""
        v = Values(seed, self.dtype)
        made, used = [], 0
        for number, length in enumerate(lengths):
            size = max(room, length + self.draft.depth)
            count = -(-size // self.block_size)
            pages = self.order[used : used + count].tolist()
            assert len(pages) == count, "the rig has too few blocks"
            used += count
            taps = [v.tensor(size, self.draft.hidden_size) for _ in self.draft.taps]
            anchor = (7 * number + 3) % self.draft.vocab_size
            made.append(Request(length, anchor, pages, taps, 1000 + number))
        return made

    def plan(
        self,
        requests: Sequence[Request],
        *,
        rejects: int = 0,
        pad_rows: int = 0,
        pad_requests: int = 0,
        pages: int = 0,
        draft: bool = True,
    ) -> tuple[DraftPlan, list[Tensor]]:
        """The plan that stores what isn't stored, with `rejects` rejected rows of each request
        behind it, and drafts; and its taps.
        """
        depth, size = self.draft.depth, self.block_size
        positions, slots, rows = [], [], []
        for request in requests:
            for position in range(request.stored, request.length + rejects):
                kept = position < request.length
                positions.append(position if kept else 0)
                slots.append(request.slot(position, size) if kept else -1)
                rows.append([tap[position] for tap in request.taps])
        padding = [torch.zeros(self.draft.hidden_size, dtype=self.dtype)] * len(self.draft.taps)
        positions += [0] * pad_rows
        slots += [-1] * pad_rows
        rows += [padding] * pad_rows
        taps = [
            torch.stack([row[m] for row in rows])
            if rows
            else torch.empty(0, self.draft.hidden_size, dtype=self.dtype)
            for m in range(len(self.draft.taps))
        ]
        drafting = list(requests) if draft else []
        count = len(drafting) + pad_requests
        width = max([pages, 1, *(len(request.pages) for request in drafting)])
        table = torch.zeros(count, width, dtype=torch.int32)
        block = torch.full((count, depth), -1)
        for r, request in enumerate(drafting):
            table[r, : len(request.pages)] = torch.tensor(request.pages)
            block[r] = torch.tensor([request.slot(request.length + i, size) for i in range(depth)])
        pad = [0] * pad_requests
        sampling = Sampling(
            torch.tensor([r.temperature for r in drafting] + pad, dtype=torch.float32),
            torch.tensor([r.seed for r in drafting] + pad, dtype=torch.int64),
            torch.tensor([r.length for r in drafting] + pad, dtype=torch.int64),
        )
        anchors = torch.tensor([r.anchor for r in drafting] + pad, dtype=torch.int64)
        made = DraftPlan(
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(slots, dtype=torch.int64),
            anchors,
            block,
            table,
            sampling,
        )
        return made, taps

    def run(self, requests: Sequence[Request], **options: Any) -> DraftOutput:
        """Stores and drafts; afterwards all accepted tokens count as stored."""
        plan, taps = self.plan(requests, **options)
        output = self.call(self.weights, plan, self.caches, taps)
        for request in requests:
            request.stored = request.length
        return output

    def context(self, request: Request) -> list[Rows]:
        """By layer, the rows that the reference stores of the accepted tokens."""
        rows: list[Rows] = [{} for _ in self.draft.layers]
        for position in range(request.length):
            made = self.reference.context_rows([tap[position] for tap in request.taps], position)
            for layer, row in zip(rows, made, strict=True):
                layer[position] = row
        return rows

    def stored_row(self, layer: int, slot: int) -> Tensor:
        return COMPOSED["gather_kv"](self.caches[layer], torch.tensor([slot]))[0].double()

    def snapshot(self) -> list[Tensor]:
        return [cache.parts[0].clone() for cache in self.caches]


def close(got: Tensor, want: Tensor, bound: float = 2e-5) -> None:
    """Each row (last axis) equal up to `bound` of its largest value."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().amax(-1) / want.double().abs().amax(-1)
    assert torch.isfinite(got).all()
    assert error.max() <= bound, f"a row is off by {error.max():.2e} of its largest, bound {bound}"


def check(rig: Rig, requests: Sequence[Request], output: DraftOutput, bound: float = 2e-5) -> None:
    """Greedy drafts, their logits and the block's rows against the reference."""
    for r, request in enumerate(requests):
        ids = output.ids[r].tolist()
        logits, written = rig.reference.draft(
            request.anchor, request.length, rig.context(request), ids
        )
        close(output.logits[r], logits, bound)
        assert ids == output.logits[r].argmax(-1).tolist()
        for layer, rows in enumerate(written):
            for position, row in rows.items():
                slot = request.slot(position, rig.block_size)
                close(rig.stored_row(layer, slot), row, bound)
