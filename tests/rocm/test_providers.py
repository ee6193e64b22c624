"""Who serves what: AITER where it is asked for and nothing stands against it, else ours; with every
reason told. AITER is a stand-in with the signatures of a release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ml4core.api import (
    Accepted,
    Deployment,
    KVCache,
    LayerKV,
    LayerSpec,
    Refused,
    Rejected,
    Segment,
    StepPlan,
    StepShape,
    Weight,
)
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.formats import mxfp4
from ml4core_rocm import aiter_functions
from ml4core_rocm.aiter_ops import FORMAT, arranged, with_aiter
from ml4core_rocm.backend import RocmBackend
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.devices import REFERENCE
from ml4core_rocm.providers import FUNCTIONS, PEERS
from ml4core_rocm.stages import Stages
from ml4core_rocm.switches import VARIABLES, read

from .control.conftest import deployment, layer
from .fake_aiter import Fake, install

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

Deploy = Callable[..., Deployment]
AITER, SPARSE, _ = VARIABLES.values()
NONE = Segment(0, 0, 0)
DECODE = StepShape(Segment(4, 4, 1), NONE, NONE, (("latent", 8),), 4)
A4W4 = {"fp8_moe_requant": "mxfp4", "fp8_moe_requant_act": "a4w4"}


@pytest.fixture
def deploy() -> Deploy:
    return deployment


@pytest.fixture
def make_layer() -> Callable[..., LayerSpec]:
    return layer


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install(monkeypatch)


def told(stages: Stages, layer: LayerSpec, stage: str = "sparse_mla") -> dict[str, list[str]]:
    return {
        one.provider: [r.reason for r in one.refusals] if isinstance(one, Rejected) else []
        for one in stages.candidates(stage, layer, DECODE)
    }


def test_without_the_switch_every_part_is_ours(deploy: Deploy, make_layer: Any) -> None:
    stages = Stages(deploy(), {})
    assert told(stages, make_layer(0)) == {}
    ops: dict[str, Any] = {"rms_norm": lambda *args: None}
    switches, _ = read(deploy(), capabilities(REFERENCE), {})
    assert with_aiter(ops, deploy(), switches) == (ops, {})


def test_with_it_the_assembly_attention_serves_layers_that_choose(
    deploy: Deploy, make_layer: Any, aiter: Fake
) -> None:
    stages = Stages(deploy(), {AITER: "1"})
    found = stages.candidates("sparse_mla", make_layer(0), DECODE)
    *rejected, chosen = found
    assert isinstance(chosen, Accepted)
    assert (chosen.provider, chosen.version) == ("AITER MLA", "0.1.21")
    assert [one.provider for one in rejected] == ["AITER Triton sparse MLA"]
    other = told(stages, make_layer(1, topk_source=None, indexer=None))
    assert other["AITER MLA"] == ["its sparse decoding serves layers that choose their keys"]
    assert stages.candidates("attn_output", make_layer(0), DECODE) == ()


CHUNK = StepShape(Segment(4, 4, 1), NONE, Segment(1, 9, 9), (("latent", 8),), 5)


@pytest.mark.parametrize(
    ("changes", "layer_changes", "shape", "reason"),
    [
        ({}, {}, DECODE, ""),
        ({}, {}, CHUNK, "9 rows of prompts"),
        ({}, {"topk": 512}, DECODE, "keeps 2048 keys, not 512"),
        ({"index_layout": "planar_f32"}, {}, DECODE, "not of planar_f32"),
        ({"block_size": 48}, {}, DECODE, "pages of 48 keys"),
        ({"device": replace(REFERENCE, arch="gfx942")}, {}, DECODE, "not for gfx942"),
    ],
)
def test_who_selects(
    deploy: Deploy,
    make_layer: Any,
    aiter: Fake,
    changes: dict[str, Any],
    layer_changes: dict[str, Any],
    shape: StepShape,
    reason: str,
) -> None:
    one = make_layer(0)
    one = replace(one, indexer=replace(one.indexer, **layer_changes))
    (found,) = Stages(deploy(**changes), {AITER: "1"}).candidates("select", one, shape)
    assert found.provider == "AITER index scores and top-k"
    if not reason:
        assert isinstance(found, Accepted)
    else:
        assert isinstance(found, Rejected)
        assert [reason in refusal.reason for refusal in found.refusals] == [True]


def test_its_selection_is_ours(deploy: Deploy, make_layer: Any, aiter: Fake) -> None:
    """Decodes and a verify window, with a padded request; ours is composed of our ops."""
    from ml4core_rocm.kernels.indexer_logits import indexer_logits
    from ml4core_rocm.kernels.to_slots import to_slots
    from ml4core_rocm.kernels.topk import topk

    draw, size = torch.Generator().manual_seed(3), 16
    keys, latents = index_layout("tiled16_f32"), latent_layout("bf16")
    rows = torch.randn(8, size, 128, generator=draw)
    kv = LayerKV(
        KVCache(latents, size, latents.pack(torch.zeros(8, size, 576), None)),
        KVCache(keys, size, keys.pack(rows, None)),
    )
    shape = StepShape(Segment(2, 2, 1), Segment(1, 3, 3), NONE, (("latent", 2), ("index", 2)), 5)
    table = torch.tensor([[1, 2], [0, 0], [3, 4]], dtype=torch.int32)
    visible = torch.tensor([25, 0, 18, 19, 20], dtype=torch.int32)
    request, start = torch.tensor([0, 1, 2, 2, 2]), torch.tensor([0, 1, 2, 5], dtype=torch.int32)
    ints = torch.zeros(5, dtype=torch.int64)
    plan = StepPlan(
        shape,
        ints,
        ints,
        request,
        start,
        visible,
        {"latent": table.flip(1), "index": table},
        {"latent": ints, "index": ints},
        ints,
    )
    q = torch.randn(5, 4, 128, generator=draw)
    weights = torch.randn(5, 4, generator=draw)
    one = make_layer(0)
    (found,) = Stages(deploy(block_size=size), {AITER: "1"}).candidates("select", one, shape)
    assert isinstance(found, Accepted)
    chosen: Any = found.call(plan, kv, q, weights)
    scale = one.indexer.scale
    scores = indexer_logits(q, weights, scale, kv.index_keys, table, start, visible, 3)
    positions, lens, has_nan = topk(scores, visible, 2048)
    assert torch.equal(chosen.positions, positions)
    assert torch.equal(chosen.lens, lens)
    assert torch.equal(chosen.has_nan, has_nan)
    assert torch.equal(chosen.slots, to_slots(positions, table.flip(1), request, size))
    assert aiter.names().count("top_k_per_row_decode") == 2


@pytest.mark.parametrize(
    ("changes", "environment", "reason"),
    [
        ({"kv_layout": "fp32"}, {}, "reads rows of bf16 or e4m3, not of fp32"),
        ({"dtype": "float32"}, {}, "bfloat16, not float32"),
        ({}, {SPARSE: "1"}, f"{SPARSE} wants the Triton kernel in its place"),
        (
            {"device": replace(REFERENCE, arch="gfx942"), "kv_layout": "e4m3"},
            {},
            "on gfx942 it reads rows of bf16 or e4m3fnuz, not of e4m3",
        ),
    ],
)
def test_what_stands_against_the_assembly_attention(
    deploy: Deploy,
    make_layer: Any,
    aiter: Fake,
    changes: dict[str, Any],
    environment: dict[str, str],
    reason: str,
) -> None:
    found = told(Stages(deploy(**changes), {AITER: "1"} | environment), make_layer(0))
    assert any(reason in one for one in found["AITER MLA"])
    assert found["AITER Triton sparse MLA"]  # never bound: what it gives is not the stage


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"kv_lora_rank": 256},
            "rows of 512 values and 64 of rope, and those of the model have 256",
        ),
        ({"rope_dim": 32}, "have 512 and 32"),
        ({"heads": 192}, "128 heads a rank at most, not 192"),
        ({"rope_dim": 0, "heads": 128}, ""),
    ],
)
def test_widths_that_the_assembly_attention_has_no_kernel_for(
    deploy: Deploy, make_layer: Any, aiter: Fake, changes: dict[str, Any], reason: str
) -> None:
    """Told before anything runs: its adapter would raise at the first step."""
    found = told(Stages(deploy(), {AITER: "1"}), make_layer(0, **changes))["AITER MLA"]
    assert [reason in one for one in found] == ([True] if reason else [])


def test_a_library_that_is_not_there_is_named(
    deploy: Deploy, make_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiter_functions, "find_spec", lambda name: None)
    found = told(Stages(deploy(), {AITER: "1"}), make_layer(0))
    assert found["AITER MLA"] == ["the library aiter is not installed"]


def test_open_refuses_a_release_that_does_not_fit(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and version, before anything runs: on a GPU, and where it is asked for."""
    monkeypatch.setenv(AITER, "1")
    monkeypatch.setattr(aiter_functions, "find_spec", lambda name: object())
    monkeypatch.setattr(aiter_functions, "release", lambda: "0.0.9")
    monkeypatch.setattr(
        aiter_functions, "_fault", lambda one: f"no {one.name}" * ("mla_d" in one.name)
    )
    with pytest.raises(Refused) as refused:
        RocmBackend().open(deploy())
    reasons = [one.reason for one in refused.value.refusals if one.subject == "AITER"]
    assert reasons == ["aiter 0.0.9: no mla_decode_fwd"]
    monkeypatch.delenv(AITER)
    with pytest.raises(Refused) as refused:  # this machine's torch reaches no AMD GPU
        RocmBackend().open(deploy())
    assert "AITER" not in {one.subject for one in refused.value.refusals}


def test_every_function_that_is_bound_is_checked() -> None:
    assert set(FUNCTIONS) <= set(aiter_functions.FUNCTIONS)
    assert {name for peer in PEERS for name in peer.functions} == set(FUNCTIONS)


def experts(count: int, rows: int, columns: int, seed: int) -> Weight:
    draw = torch.Generator().manual_seed(seed)
    data, scale = mxfp4.quantize(torch.randn(count, rows, columns, generator=draw) * 0.1)
    return Weight("mxfp4", (count, rows, columns), {"data": data, "scale": scale})


def small(whole: Deployment) -> Deployment:
    """Experts of 256 x 256, which AITER's tiles divide."""
    layers = []
    for one in whole.model.layers:
        assert one.moe is not None
        moe = replace(one.moe, experts=4, topk=2, expert_width=256)
        layers.append(replace(one, hidden_size=256, moe=moe))
    return replace(whole, model=replace(whole.model, layers=tuple(layers)))


def test_ops_in_its_hands_fall_back_to_ours(deploy: Deploy, aiter: Fake) -> None:
    asks = small(deploy(additional_config=A4W4, needs=frozenset({"act:fp8_block"})))
    switches, _ = read(asks, capabilities(REFERENCE), {AITER: "1"})
    asked: list[str] = []

    def ours(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            asked.append(name)
            return None

        return call

    names = ("rms_norm", "gemm", "moe_experts", "topk")
    ops, words = with_aiter({name: ours(name) for name in names}, asks, switches)
    assert words == {
        "op rms_norm": "AITER RMS norm 0.1.21",
        "op gemm": "AITER block FP8 product 0.1.21",
        "op moe_experts": "AITER fused experts 0.1.21",
    }
    x, weight = torch.randn(2, 256).bfloat16(), torch.ones(256)
    normed = ops["rms_norm"](x, weight, 1e-6)
    torch.testing.assert_close(
        normed, torch.nn.functional.rms_norm(x, (256,), eps=1e-6), atol=0.02, rtol=0.02
    )
    ops["rms_norm"](x.float(), weight, 1e-6)
    ops["gemm"](x, Weight("bf16", (8, 256), {"data": torch.ones(8, 256).bfloat16()}), None)
    w13, w2 = experts(4, 512, 256, 1), experts(4, 256, 256, 2)
    choices = (torch.full((2, 2), 0.5), torch.tensor([[0, 1], [2, 3]]))
    ops["moe_experts"](x, w13, w2, *choices)  # not in its order
    assert asked == ["rms_norm", "gemm", "moe_experts"]
    ready = arranged({"experts_w13": w13, "experts_w2": w2, "gate": weight}, "a4w4")
    stacks = [ready[f"experts_{name}"] for name in ("w13", "w2")]
    assert [one.format for one in stacks] == [f"{FORMAT}a4w4"] * 2  # type: ignore[union-attr]
    assert ready["gate"] is weight
    out = ops["moe_experts"](x, *stacks, *choices)
    assert out.shape == x.shape
    assert bool(out.isfinite().all())
    assert aiter.names()[-1] == "fused_moe"
    assert len(asked) == 3


def test_ops_that_it_cannot_serve_say_why(deploy: Deploy, aiter: Fake) -> None:
    asks = deploy(dtype="float32", additional_config=A4W4, enable_expert_parallel=True)
    switches, _ = read(asks, capabilities(REFERENCE), {AITER: "1"})
    ops, words = with_aiter({"rms_norm": lambda *args: None}, asks, switches)
    assert set(ops) == {"rms_norm"}
    assert words["op rms_norm"].startswith("triton; not AITER RMS norm: its rows are bfloat16")
    assert "doesn't ask for" in words["op gemm"]
    assert "no mask of other ranks' experts" in words["op moe_experts"]
    narrow = small(deploy(additional_config=A4W4, tensor_parallel_size=2))
    _, words = with_aiter({}, narrow, replace(switches))
    assert "experts of a rank are [128]" in words["op moe_experts"]


def test_experts_in_other_formats_keep_their_order() -> None:
    plain = {"experts_w13": torch.zeros(1), "wq": torch.zeros(1)}
    assert arranged(plain, "a4w4") is plain
    fp8 = Weight("fp8_block", (1, 256, 128), {"data": torch.zeros(1), "scale": torch.zeros(1)})
    both = {"experts_w13": fp8, "experts_w2": fp8}
    assert arranged(both, "a8w4") is both
