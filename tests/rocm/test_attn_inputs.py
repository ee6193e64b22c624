"""The stage that writes an index key in one launch, beside its composition from the same ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ml4core.api import (
    IndexerSpec,
    KVCache,
    LayerKV,
    ModelSpec,
    Refusal,
    Rejected,
    RopeSpec,
    Segment,
    SSMaxSpec,
    StepPlan,
    StepShape,
    Weight,
)
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.compose.attention import attn_inputs as composed
from ml4core.compose.context import StageContext
from ml4core.compose.ops import COMPOSED
from ml4core.engine.collectives import SingleRank
from ml4core_rocm.inputs_stage import inputs_candidate
from ml4core_rocm.ops import load_ops

from .control.conftest import deployment, layer

ROWS, BLOCK, HIDDEN = 5, 16, 64
NONE = Segment(0, 0, 0)
SMALL: dict[str, Any] = {"hidden_size": HIDDEN, "heads": 2, "nope_dim": 32, "moe": None}
INDEX = IndexerSpec(2, 128, 16, 64)
PLAIN = IndexerSpec(2, 128, 16, 0, query_input="q_lora", ssmax=SSMaxSpec("llama4"))


def matrix(draw: torch.Generator, *shape: int) -> Weight:
    return Weight("fp32", shape, {"data": torch.randn(*shape, generator=draw) * 0.1})


def weights(one: Any, draw: torch.Generator) -> dict[str, Any]:
    spec, width = one.indexer, one.heads * one.q_dim
    source = HIDDEN if one.q_lora_rank is None else one.q_lora_rank
    asked = HIDDEN if spec.query_input == "hidden" else source
    found: dict[str, Any] = {
        "attention_norm": torch.rand(HIDDEN, generator=draw),
        "wq": matrix(draw, width, HIDDEN),
        "wq_a": matrix(draw, source, HIDDEN),
        "wq_b": matrix(draw, width, source),
        "q_a_norm": torch.rand(source, generator=draw),
        "w_uk": matrix(draw, one.heads, 512, one.nope_dim),
        "wkv_a": matrix(draw, 512 + one.rope_dim, HIDDEN),
        "kv_a_norm": torch.rand(512, generator=draw),
        "index_wq": matrix(draw, spec.heads * spec.head_dim, asked),
        "index_wk": matrix(draw, spec.head_dim, HIDDEN),
        "index_weights_proj": matrix(draw, spec.heads, HIDDEN),
        "inv_freq": torch.rand(32, generator=draw),
    }
    for name in ("q", "k"):
        found[f"index_{name}_norm_weight"] = torch.rand(spec.head_dim, generator=draw)
        found[f"index_{name}_norm_bias"] = torch.rand(spec.head_dim, generator=draw)
    return found


def caches() -> LayerKV:
    latents, keys = latent_layout("fp32"), index_layout("fp32")
    return LayerKV(
        KVCache(latents, BLOCK, latents.pack(torch.zeros(3, BLOCK, 576), None)),
        KVCache(keys, BLOCK, keys.pack(torch.zeros(3, BLOCK, 128), None)),
    )


@pytest.mark.parametrize(
    ("changes", "normed"),
    [
        ({"indexer": INDEX, "rope": RopeSpec(64, 1e4)}, True),
        ({"indexer": INDEX, "rope": RopeSpec(64, 1e4), "kv_source": 1}, False),
        ({"indexer": PLAIN, "rope": None, "rope_dim": 0, "q_lora_rank": 48}, False),
        ({"indexer": INDEX, "rope": RopeSpec(64, 1e4), "ssmax": SSMaxSpec("llama4")}, True),
    ],
)
def test_it_is_the_composition(changes: dict[str, Any], normed: bool) -> None:
    draw = torch.Generator().manual_seed(len(changes))
    one = layer(0, **SMALL, **changes)
    w = weights(one, draw)
    slots = torch.tensor([20, 3, -1, 47, 16])
    plan = StepPlan(
        StepShape(Segment(ROWS, ROWS, 1), NONE, NONE, (("latent", 1), ("index", 1)), ROWS),
        torch.zeros(ROWS, dtype=torch.int64),
        torch.tensor([0, 7, 8, 70000, 2]),
        torch.arange(ROWS),
        torch.arange(ROWS + 1, dtype=torch.int32),
        torch.ones(ROWS, dtype=torch.int32),
        {},
        {"latent": slots, "index": slots.flip(0)},
        torch.arange(ROWS),
    )
    residual = torch.randn(ROWS, HIDDEN, generator=draw)
    hidden = torch.randn(ROWS, HIDDEN, generator=draw) if normed else None
    model = ModelSpec("ml4", 8, HIDDEN, 1e-6, 1 << 20, False, (one,))
    context = StageContext(model, one, COMPOSED, SingleRank(), torch.float32)
    found = inputs_candidate(one, deployment(index_layout="fp32"), COMPOSED)
    assert not isinstance(found, Rejected)
    ours, theirs = caches(), caches()
    made: Any = found.call(w, plan, ours, residual, hidden)  # type: ignore[call-arg,arg-type]
    want = composed(context, {})(w, plan, theirs, residual, hidden)
    for name in ("q", "index_q", "index_weights"):
        assert torch.equal(getattr(made, name), getattr(want, name)), name
    assert torch.equal(ours.latent.parts[0], theirs.latent.parts[0])
    assert ours.index_keys is not None
    assert theirs.index_keys is not None
    torch.testing.assert_close(
        ours.index_keys.parts[0], theirs.index_keys.parts[0], atol=1e-5, rtol=1e-5
    )
    assert int(ours.index_keys.parts[0].ne(0).any(-1).sum()) == 4


def test_layers_and_devices_that_it_is_not_for() -> None:
    def reasons(one: Any, ops: Any = COMPOSED, **more: Any) -> list[str]:
        found = inputs_candidate(one, deployment(**more), ops)
        assert isinstance(found, Rejected)
        assert all(isinstance(refusal, Refusal) for refusal in found.refusals)
        return [refusal.reason for refusal in found.refusals]

    turned = IndexerSpec(2, 128, 16, 64, hadamard=True)
    assert "Hadamard" in reasons(layer(0, indexer=turned))[0]
    assert "writes no index key" in reasons(layer(0, indexer=None))[0]
    assert "planar_ue8m0x4" in reasons(layer(0), index_layout="planar_ue8m0x4")[0]
    assert reasons(layer(0), {"rope": None})[0].startswith("its parts gemm, head_gemm")
    assert not isinstance(inputs_candidate(layer(0), deployment(), load_ops()), Rejected)
