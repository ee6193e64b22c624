"""Fused stages of a layer's decode step against core's compositions of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import (
    IndexerSpec,
    KVCache,
    LayerKV,
    LayerSpec,
    MoESpec,
    RopeSpec,
    Segment,
    Selection,
    SSMaxSpec,
    StepPlan,
    StepShape,
    Weight,
)
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.compose import attention, ffn
from ml4core.compose.context import StageContext
from ml4core.compose.ops import COMPOSED
from ml4core.engine.collectives import SingleRank

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

WIDTH, LATENT, ROPE, BLOCK, PAGES = 256, 128, 64, 16, 4
INDEXER = IndexerSpec(4, 128, 24, ROPE, ssmax=SSMaxSpec("log", per_head=True))
LAYER = LayerSpec(
    index=1, hidden_size=WIDTH, heads=2, kv_lora_rank=LATENT, q_lora_rank=None, nope_dim=32,
    rope_dim=ROPE, v_dim=48, norm_eps=1e-6, softmax_scale=0.1, rope=RopeSpec(ROPE, 1e4),
    ssmax=SSMaxSpec("log", per_head=True, bias=True), kv_source=1, topk_source=1, indexer=INDEXER,
    dense_width=None, moe=MoESpec(8, 3, 128, 128, routed_scale=1.5),
)  # fmt: skip
LAYERS = {
    "owner": LAYER,
    "sharer": replace(LAYER, topk_source=0, indexer=None, ssmax=SSMaxSpec("llama4")),
    "halves": replace(
        LAYER,
        rope=replace(LAYER.rope, interleaved=False),
        indexer=replace(INDEXER, rope_interleaved=False, query_norm=False, ssmax=SSMaxSpec()),
    ),
    "nope consumer": replace(
        LAYER, rope_dim=0, rope=None, kv_source=0, ssmax=SSMaxSpec(),
        indexer=replace(INDEXER, rope_dim=0),
    ),
    "nope owner": replace(LAYER, rope_dim=0, rope=None, indexer=replace(INDEXER, rope_dim=0)),
}  # fmt: skip


class Scene:
    """A step of one-row requests on caches with something in them.

    Attributes:
        weights: those of the layer, in fp32 or, for products, as ``format`` has it.
    """

    def __init__(
        self, layer: LayerSpec, rows: int, dtype: torch.dtype, kv: str, format: str, where: Any
    ) -> None:
        self.draw, self.where = torch.Generator().manual_seed(rows), where
        self.layer, self.dtype = layer, dtype
        requests = rows
        positions = [BLOCK * PAGES - 2, 5, 33, 20][:rows]
        pages = 1 + torch.randperm(requests * PAGES, generator=self.draw).view(requests, PAGES)
        at = torch.tensor(positions)
        slots = pages[torch.arange(rows), at // BLOCK] * BLOCK + at % BLOCK
        slots[rows - 1 :] = slots[rows - 1 :] if rows < 4 else -1  # a padded row
        shape = StepShape(
            Segment(rows, rows, 1), Segment(0, 0, 0), Segment(0, 0, 0),
            (("latent", PAGES), ("index", PAGES)), rows,
        )  # fmt: skip
        table = self.to(pages.int())
        self.plan = StepPlan(
            shape, self.to(at), self.to(at), self.to(torch.arange(rows)),
            self.to(torch.arange(rows + 1).int()), self.to((at + 1).int()),
            {"latent": table, "index": table}, {"latent": self.to(slots), "index": self.to(slots)},
            self.to(torch.arange(rows)),
        )  # fmt: skip
        self.blocks = requests * PAGES + 1
        self.kv = (kv, "fp32" if kv == "fp32" else "planar_f32")
        self.weights = self._weights(format)

    def to(self, value: Tensor) -> Tensor:
        return value.to(self.where)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.to(torch.randn(shape, generator=self.draw) * scale)

    def caches(self) -> LayerKV:
        """Fresh ones with the same content each time."""
        draw = torch.Generator().manual_seed(7)
        found = []
        for layout in (latent_layout(self.kv[0], LATENT, ROPE), index_layout(self.kv[1], 128)):
            rows = torch.randn(self.blocks, BLOCK, layout.width, generator=draw)
            parts = tuple(self.to(part) for part in layout.pack(rows, None))
            found.append(KVCache(layout, BLOCK, parts))
        return LayerKV(found[0], found[1] if self.layer.indexer else None)

    def _weights(self, format: str) -> dict[str, Any]:
        layer, spec, moe = self.layer, self.layer.indexer, self.layer.moe
        assert moe is not None
        found: dict[str, Any] = {
            "attention_norm": 1 + self.normal(WIDTH, scale=0.1),
            "ffn_norm": 1 + self.normal(WIDTH, scale=0.1),
            "wq": self.matrix(format, layer.heads * layer.q_dim, WIDTH),
            "w_uk": self.matrix("", layer.heads, LATENT, layer.nope_dim),
            "w_uv": self.matrix("", layer.heads, layer.v_dim, LATENT),
            "wo": self.matrix(format, WIDTH, layer.heads * layer.v_dim),
            "ssmax_scale": 1 + self.normal(layer.heads, scale=0.1),
            "gate": self.normal(moe.experts, WIDTH, scale=0.1),
            "experts_w13": self.matrix(format, moe.experts, 2 * moe.expert_width, WIDTH),
            "experts_w2": self.matrix(format, moe.experts, WIDTH, moe.expert_width),
            "shared_w13": self.matrix(format, 2 * moe.shared_width, WIDTH),
            "shared_w2": self.matrix(format, WIDTH, moe.shared_width),
        }
        if layer.ssmax.bias:
            found["ssmax_bias"] = self.normal(layer.heads, scale=0.1)
        if not layer.ssmax.per_head:
            del found["ssmax_scale"]
        if layer.rope_dim:
            found["inv_freq"] = self.to(1e4 ** (-torch.arange(ROPE // 2) * 2.0 / ROPE))
        if layer.owns_kv:
            found["wkv_a"] = self.matrix(format, LATENT + layer.rope_dim, WIDTH)
            found["kv_a_norm"] = 1 + self.normal(LATENT, scale=0.1)
        if spec is not None:
            found |= {
                "index_wq": self.matrix(format, spec.heads * spec.head_dim, WIDTH),
                "index_wk": self.matrix(format, spec.head_dim, WIDTH),
                "index_weights_proj": self.matrix("fp32", spec.heads, WIDTH),
                "index_k_norm_weight": 1 + self.normal(spec.head_dim, scale=0.1),
                "index_k_norm_bias": self.normal(spec.head_dim, scale=0.1),
            }
            if spec.query_norm:
                found["index_q_norm_weight"] = 1 + self.normal(spec.head_dim, scale=0.1)
                found["index_q_norm_bias"] = self.normal(spec.head_dim, scale=0.1)
            if spec.ssmax.per_head:
                found["index_ssmax_scale"] = 1 + self.normal(spec.heads, scale=0.1)
        return found

    def matrix(self, format: str, *shape: int) -> Weight:
        data = self.normal(*shape, scale=shape[-1] ** -0.5)
        if format == "fp8_block":
            return COMPOSED["quantize"](data, "fp8_block", None)
        if format == "fp32" or self.dtype == torch.float32:
            return Weight("fp32", shape, {"data": data})
        return Weight("bf16", shape, {"data": data.bfloat16()})

    def context(self) -> StageContext:
        return StageContext(None, self.layer, COMPOSED, SingleRank(), self.dtype)  # type: ignore

    def selection(self) -> Selection:
        """Some of each row's keys, for a layer that is given them."""
        rows, k = len(self.plan.visible), 24
        positions = torch.full((rows, k), -1, dtype=torch.int32)
        lens = self.plan.visible.cpu().clamp(max=k)
        for row in range(rows):
            n = int(lens[row])
            chosen = torch.randperm(int(self.plan.visible[row]), generator=self.draw)[:n]
            positions[row, :n] = chosen.sort()[0].int()
        positions = self.to(positions)
        table = self.plan.block_tables["latent"]
        slots = COMPOSED["to_slots"](positions, table, self.plan.row_request, BLOCK)
        return Selection(positions, self.to(lens.int()), slots, self.to(torch.zeros(rows).bool()))


def scene_of(name: str, rows: int, exact: bool, where: torch.device) -> Scene:
    layer = LAYERS[name]
    if exact:
        return Scene(layer, rows, torch.float32, "fp32", "", where)
    return Scene(layer, rows, torch.bfloat16, "fp8_ds_mla", "fp8_block", where)


def far(found: Tensor, want: Tensor) -> float:
    """Relative distance."""
    found, want = found.double(), want.double()
    return float((found - want).norm() / want.norm().clamp(min=1e-30))


def caches_far(found: LayerKV, want: LayerKV) -> float:
    pairs = [(found.latent, want.latent)]
    if found.index_keys is not None and want.index_keys is not None:
        pairs.append((found.index_keys, want.index_keys))
    return max(
        far(a.layout.unpack(a.parts, None), b.layout.unpack(b.parts, None)) for a, b in pairs
    )


INPUTS = [(name, rows, True) for name in LAYERS for rows in (1, 3)]
INPUTS += [("owner", 1, False), ("owner", 4, False)]


@pytest.mark.parametrize(("name", "rows", "exact"), INPUTS)
def test_attn_inputs(name: str, rows: int, exact: bool, device: torch.device) -> None:
    from ml4core_cuda.kernels.attn_inputs import attn_inputs

    scene = scene_of(name, rows, exact, device)
    residual = scene.normal(rows, WIDTH).to(scene.dtype)
    hidden = None if rows == 3 else scene.normal(rows, WIDTH).to(scene.dtype)
    theirs, ours = scene.caches(), scene.caches()
    composed = attention.attn_inputs(scene.context(), {})
    want = composed(scene.weights, scene.plan, theirs, residual, hidden)
    got = attn_inputs(scene.layer)(scene.weights, scene.plan, ours, residual, hidden)
    allowed = 3e-6 if exact else 8e-3
    assert got.q.dtype == want.q.dtype
    assert far(got.q, want.q) < allowed
    for one, other in zip(got[1:], want[1:], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == torch.float32
            assert far(one, other) < allowed
    assert caches_far(ours, theirs) < (3e-6 if exact else 2e-2)


def test_formats_that_one_launch_does_not_take_have_their_own(device: torch.device) -> None:
    from ml4core_cuda.kernels.attn_inputs import attn_inputs

    scene = scene_of("sharer", 1, False, device)
    scene.weights["wq"] = COMPOSED["quantize"](
        scene.normal(LAYER.heads * LAYER.q_dim, WIDTH, scale=0.06), "nvfp4", None
    )
    hidden = scene.normal(1, WIDTH).bfloat16()
    composed = attention.attn_inputs(scene.context(), {})
    want = composed(scene.weights, scene.plan, scene.caches(), hidden, hidden)
    got = attn_inputs(scene.layer)(scene.weights, scene.plan, scene.caches(), hidden, hidden)
    assert far(got.q, want.q) < 8e-3


@pytest.mark.parametrize(
    ("name", "rows", "exact"),
    [("owner", 1, True), ("sharer", 2, False), ("nope consumer", 1, False)],
)
def test_latency_layer(name: str, rows: int, exact: bool, device: torch.device) -> None:
    from ml4core_cuda.kernels.latency_layer import latency_layer

    scene = scene_of(name, rows, exact, device)
    context = scene.context()
    names = ("attn_inputs", "select", "sparse_mla", "attn_output")
    children = {one: getattr(attention, one)(context, {}) for one in names}
    half = attention.attention(context, children)
    residual, hidden = (scene.normal(rows, WIDTH).to(scene.dtype) for _ in range(2))
    norm = 1 + scene.normal(WIDTH, scale=0.1)
    given = None if scene.layer.owns_index else scene.selection()
    theirs, ours = scene.caches(), scene.caches()
    state = half(scene.weights, scene.plan, theirs, residual, hidden, given)
    want = ffn.ffn(context, {})(scene.weights, state[0], state[1], norm)
    call = latency_layer(scene.layer)
    got = call(scene.weights, scene.plan, ours, residual, hidden, given, norm)
    allowed = 1e-5 if exact else 1.5e-2
    for one, other in zip(got[:2], want, strict=True):
        assert one.dtype == scene.dtype
        assert far(one, other) < allowed
    assert got[2] is not None
    assert state[2] is not None
    same = (got[2].positions == state[2].positions).float().mean()
    assert float(same) == 1.0 if exact else float(same) > 0.7
    bare = call(scene.weights, scene.plan, scene.caches(), residual, hidden, given, None)
    assert bare[1] is None
    assert torch.equal(bare[0], got[0])


def test_a_row_that_cannot_be_routed_is_nan(device: torch.device) -> None:
    from ml4core_cuda.kernels.latency_layer import latency_layer

    scene = scene_of("sharer", 2, True, device)
    residual, hidden = (scene.normal(2, WIDTH) for _ in range(2))
    residual[1, 3] = torch.inf
    given = scene.selection()
    call = latency_layer(scene.layer)
    found, _, _ = call(scene.weights, scene.plan, scene.caches(), residual, hidden, given, None)
    assert not bool(found[0].isnan().any())
    assert bool(found[1].isnan().all())


def test_an_expert_apart_is_added_too(device: torch.device) -> None:
    from ml4core_cuda.kernels.latency_layer import latency_layer

    scene = scene_of("sharer", 1, True, device)
    scene.weights["shared_w13"] = scene.matrix("", 2 * 64, WIDTH)
    scene.weights["shared_w2"] = scene.matrix("", WIDTH, 64)
    context, given = scene.context(), scene.selection()
    names = ("attn_inputs", "select", "sparse_mla", "attn_output")
    children = {one: getattr(attention, one)(context, {}) for one in names}
    residual, hidden = (scene.normal(1, WIDTH) for _ in range(2))
    norm = 1 + scene.normal(WIDTH, scale=0.1)
    state = attention.attention(context, children)(
        scene.weights, scene.plan, scene.caches(), residual, hidden, given
    )
    want = ffn.ffn(context, {})(scene.weights, state[0], state[1], norm)
    call = latency_layer(scene.layer)
    got = call(scene.weights, scene.plan, scene.caches(), residual, hidden, given, norm)
    assert max(far(a, b) for a, b in zip(got[:2], want, strict=True)) < 1e-5
