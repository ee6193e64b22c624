"""Who serves what: AITER where it is asked for and nothing stands against it, else ours; with every
reason told. AITER is a stand-in with the signatures of a release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

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
    Selection,
    StepPlan,
    StepShape,
)
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_rocm import aiter_functions
from ml4core_rocm.aiter_ops import with_aiter
from ml4core_rocm.backend import RocmBackend
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.devices import REFERENCE
from ml4core_rocm.ops import load_ops
from ml4core_rocm.providers import FUNCTIONS, PEERS, PROMPT_KEYS, RAGGED
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


OURS: dict[str, Any] = load_ops()


def test_without_the_switch_every_part_is_ours(deploy: Deploy, make_layer: Any) -> None:
    stages = Stages(deploy(), {}, OURS)
    for stage in ("select", "sparse_mla"):
        (found,) = stages.candidates(stage, make_layer(0), DECODE)
        assert isinstance(found, Accepted)
        assert found.provider == "triton"
    other = make_layer(1, topk_source=None, indexer=None)
    assert told(stages, other) == {
        "triton": ["a layer that attends to every key chooses none; that is the op window_mla"]
    }
    assert told(stages, other, "select") == {"triton": ["the layer owns no indexer"]}
    assert stages.candidates("attn_output", make_layer(0), DECODE) == ()
    bare = Stages(deploy(), {})  # as on a device that stands for a GPU in all but kernels
    assert told(bare, make_layer(0)) == {"triton": ["sparse_mla are no kernels of ours here"]}
    ops: dict[str, Any] = {"rms_norm": lambda *args: None}
    switches, _ = read(deploy(), capabilities(REFERENCE), {})
    assert with_aiter(ops, deploy(), switches) == (ops, {})


def test_with_it_the_assembly_attention_serves_layers_that_choose(
    deploy: Deploy, make_layer: Any, aiter: Fake
) -> None:
    stages = Stages(deploy(), {AITER: "1"}, OURS)
    found = stages.candidates("sparse_mla", make_layer(0), DECODE)
    *rejected, chosen, ours = found
    assert (ours.provider, type(ours)) == ("triton", Accepted)
    assert isinstance(chosen, Accepted)
    assert (chosen.provider, chosen.version) == ("AITER MLA", "0.1.21")
    assert [one.provider for one in rejected] == ["AITER Triton sparse MLA", RAGGED]
    other = told(stages, make_layer(1, topk_source=None, indexer=None))
    assert other["AITER MLA"] == ["its sparse decoding serves layers that choose their keys"]
    assert stages.candidates("attn_output", make_layer(0), DECODE) == ()


def test_layers_without_rope_on_bf16_take_the_ragged_kernel(
    deploy: Deploy, make_layer: Any, aiter: Fake
) -> None:
    """It reads the 512 values that such a row has, where the assembly reads 576."""
    stages, plain = Stages(deploy(kv_layout="bf16"), {AITER: "1"}), make_layer(0, rope_dim=0)
    found = told(stages, plain)
    assert found[RAGGED] == []
    assert [f"{64 + 512} values of a row of bf16" in one for one in found["AITER MLA"]] == [True]
    for other, more in ((make_layer(0), {"kv_layout": "bf16"}), (plain, {})):
        found = told(Stages(deploy(**more), {AITER: "1"}), other)
        assert found["AITER MLA"] == []
        assert [one.startswith("it serves layers without rope on bf16; this has ") for one in
                found[RAGGED]] == [True]  # fmt: skip
    assert told(stages, make_layer(0, rope_dim=0, topk_source=None, indexer=None))[RAGGED] == [
        "it serves layers that choose their keys"
    ]


def test_both_kernels_attend_to_one_stream(
    deploy: Deploy, make_layer: Any, aiter: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner with rope by the assembly, then a sharer without by the ragged kernel."""
    from ml4core_rocm.kernels import slot_streams

    made: list[Any] = []
    stream_at = slot_streams.stream_at

    def counted(*given: Any) -> Any:
        made.append(given)
        return stream_at(*given)

    monkeypatch.setattr(slot_streams, "stream_at", counted)
    draw, latents = torch.Generator().manual_seed(4), latent_layout("bf16")
    rows = torch.randn(4, 16, 576, generator=draw)
    slots = torch.stack([torch.randperm(64, generator=draw)[:20] for _ in range(3)]).int()
    lens = torch.tensor([20, 7, 0], dtype=torch.int32)
    slots[1, 7:], slots[2] = -1, -1
    chosen = Selection(slots, lens, slots, torch.zeros(3, dtype=torch.bool))
    stages, step = Stages(deploy(kv_layout="bf16"), {AITER: "1"}), cast(StepPlan, object())
    for one, width in ((make_layer(0), 576), (make_layer(1, rope_dim=0), 512)):
        cache = KVCache(latents, 16, latents.pack(rows, None))
        candidates = stages.candidates("sparse_mla", one, DECODE)
        served = next(each for each in candidates if isinstance(each, Accepted))
        q = torch.randn(3, 16, width, generator=draw).bfloat16()
        out, lse = cast(Any, served.call)(step, LayerKV(cache, None), q, chosen)
        keys = cache.parts[0].flatten(0, 1).double()
        for t in (0, 1):
            own = keys[slots[t, : lens[t]].long()]
            scores = one.softmax_scale * (q[t].double() @ own[:, :width].T)
            want = torch.softmax(scores, -1) @ own[:, :512]
            torch.testing.assert_close(out[t].double(), want, atol=0.02, rtol=0.02)
            assert torch.allclose(lse[t].double(), scores.logsumexp(-1), atol=1e-3)
        assert not out[2].any()
        assert bool(torch.isneginf(lse[2]).all())
    assert len(made) == 1
    assert aiter.names().count("mla_decode_fwd") == 1
    with pytest.raises(ValueError, match="runs of a stream"):
        cast(Any, served.call)(step, LayerKV(cache, None), q, None)


CHUNK = StepShape(Segment(4, 4, 1), NONE, Segment(1, 9, 9), (("latent", 8), ("index", 8)), 5)
LONG = replace(CHUNK, pages=(("latent", 8), ("index", PROMPT_KEYS // 64)))


@pytest.mark.parametrize(
    ("changes", "layer_changes", "shape", "reason"),
    [
        ({}, {}, DECODE, ""),
        ({}, {}, CHUNK, "rows of prompts see 512 keys at most here"),
        ({}, {}, LONG, ""),
        ({}, {"heads": 24}, DECODE, "powers of two of heads and values, and the index has [24,"),
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
    found, ours = Stages(deploy(**changes), {AITER: "1"}, OURS).candidates("select", one, shape)
    assert (ours.provider, type(ours)) == ("triton", Accepted)
    assert found.provider == "AITER index scores and top-k"
    if not reason:
        assert isinstance(found, Accepted)
    else:
        assert isinstance(found, Rejected)
        assert [reason in refusal.reason for refusal in found.refusals] == [True]


@pytest.mark.parametrize("bytes_of_keys", [0, 64 << 20, 2 * 32 * 132])
@pytest.mark.parametrize("bytes_of_scores", [0, 64 << 20])
def test_its_selection_is_ours(
    deploy: Deploy,
    make_layer: Any,
    aiter: Fake,
    monkeypatch: pytest.MonkeyPatch,
    bytes_of_scores: int,
    bytes_of_keys: int,
) -> None:
    """Decodes, a verify window and chunks of two prompts, with padded requests and rows; ours is
    composed of our ops. Keys of a request at a time, of two and one, and of all three.
    """
    from ml4core_rocm.kernels import aiter_select
    from ml4core_rocm.kernels.indexer_logits import indexer_logits
    from ml4core_triton.kernels.to_slots import to_slots
    from ml4core_triton.kernels.topk import topk

    draw, size = torch.Generator().manual_seed(3), 16
    keys, latents = index_layout("tiled16_f32"), latent_layout("bf16")
    rows = torch.randn(8, size, 128, generator=draw)
    kv = LayerKV(
        KVCache(latents, size, latents.pack(torch.zeros(8, size, 576), None)),
        KVCache(keys, size, keys.pack(rows, None)),
    )
    monkeypatch.setattr(aiter_select, "SCORE_BYTES", bytes_of_scores)  # 0: row by row
    monkeypatch.setattr(aiter_select, "KEY_BYTES", bytes_of_keys)
    gathered: list[int] = []
    gather = aiter_select.gathered_keys

    def counted(*given: Any) -> Any:
        found = gather(*given)
        gathered.append(sum(one.numel() * one.element_size() for one in found))
        return found

    monkeypatch.setattr(aiter_select, "gathered_keys", counted)
    monkeypatch.setattr("ml4core_rocm.stages.PROMPT_KEYS", 2 * size)
    prompts = Segment(3, 6, 4)
    shape = StepShape(Segment(2, 2, 1), Segment(1, 3, 3), prompts, (("latent", 2), ("index", 2)), 5)
    pages = [[1, 2], [0, 0], [3, 4], [5, 6], [7, 0], [0, 0]]
    table = torch.tensor(pages, dtype=torch.int32)
    visible = torch.tensor([25, 0, 18, 19, 20, 21, 22, 23, 15, 16, 0], dtype=torch.int32)
    request = torch.tensor([0, 1, 2, 2, 2, 3, 3, 3, 4, 4, 0])  # the last row belongs to none
    start = torch.tensor([0, 1, 2, 5, 8, 10, 10], dtype=torch.int32)
    ints = torch.zeros(11, dtype=torch.int64)
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
    q = torch.randn(11, 4, 128, generator=draw)
    weights = torch.randn(11, 4, generator=draw)
    one = make_layer(0)
    stages = Stages(deploy(block_size=size), {AITER: "1"}, OURS)
    found, ours = stages.candidates("select", one, shape)
    assert isinstance(found, Accepted)
    assert isinstance(ours, Accepted)
    chosen: Any = found.call(plan, kv, q, weights)
    for value, other in zip(chosen, cast(Any, ours.call)(plan, kv, q, weights), strict=True):
        assert torch.equal(value, other)
    scale = one.indexer.scale
    scores = indexer_logits(q, weights, scale, kv.index_keys, table, start, visible, 4)
    positions, lens, has_nan = topk(scores, visible, 2048)
    assert torch.equal(chosen.positions, positions)
    assert torch.equal(chosen.lens, lens)
    assert torch.equal(chosen.has_nan, has_nan)
    assert torch.equal(chosen.slots, to_slots(positions, table.flip(1), request, size))
    groups = {0: [1, 1, 1], 64 << 20: [3], 2 * 32 * 132: [2, 1]}[bytes_of_keys]
    assert gathered == [requests * 2 * size * 132 for requests in groups]
    assert aiter.names().count("top_k_per_row_decode") == (2 if bytes_of_scores else 3)
    calls = len(groups) * (1 if bytes_of_scores else 6)
    assert aiter.names().count("top_k_per_row_prefill") == calls


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


def test_what_a_selection_holds_is_what_is_reserved_for_it() -> None:
    """Core counts half a GiB for it, where rows and contexts are as many as AITER serves."""
    from ml4core.planning.reserve import SCORES
    from ml4core_rocm.kernels import aiter_select

    assert aiter_select.KEY_BYTES + aiter_select.SCORE_BYTES == SCORES
