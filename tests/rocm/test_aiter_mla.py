"""AITER's sparse decoding against a fake that holds its adapter to signatures and byte orders."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ml4core.api import KVCache
from ml4core.api.known_layouts import latent_layout
from ml4core_rocm import aiter_functions

from .fake_aiter import Fake, Misuse

BLOCK = 16


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latents(layout: str, blocks: int, random: torch.Generator) -> KVCache:
    found = latent_layout(layout)
    scale = torch.tensor([0.05]) if layout.startswith("e4m3") else None
    rows = torch.randn(blocks, BLOCK, 576, generator=random)
    return KVCache(found, BLOCK, found.pack(rows, scale), scale)


def attended(
    q: torch.Tensor, cache: KVCache, slots: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = cache.layout.unpack(cache.parts, cache.scale).flatten(0, 1).double()
    keys = rows[slots[(slots >= 0) & (slots < len(rows))].long()]
    scores = scale * (q.double() @ keys[:, : q.shape[-1]].T)
    return torch.softmax(scores, -1) @ keys[:, :512], torch.logsumexp(scores, -1)


def far(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("layout", ["e4m3", "bf16"])
def test_any_count_of_heads_attends(aiter: Fake, layout: str, heads: int) -> None:
    """B126: heads a rank that no kernel has are filled up, and the result is that of all heads."""
    from ml4core_rocm.kernels.aiter_mla import sparse_mla

    random = draw(heads)
    cache = latents(layout, 6, random)
    q = torch.randn(3, heads, 576, generator=random).bfloat16()
    slots = torch.stack([torch.randperm(96, generator=random)[:40] for _ in range(3)]).int()
    lens = torch.tensor([40, 17, 1], dtype=torch.int32)
    out, lse = sparse_mla(q, cache, slots, lens, 0.04)
    assert out.shape == (3, heads, 512)
    assert out.is_contiguous()
    for t in range(3):
        want, sums = attended(q[t], cache, slots[t, : lens[t]], 0.04)
        assert far(out[t], want) < (4e-3 if layout == "bf16" else 4e-2)
        assert (lse[t].double() - sums).abs().max() < (1e-4 if layout == "bf16" else 0.15)
    assert aiter.last("mla_decode_fwd")["q"].shape[1] == -(-heads // 16) * 16


def test_entries_that_are_no_slots_are_never_attended(aiter: Fake) -> None:
    """B016, B018: -1 would be read as the first slot, inside a row's run; and a row without keys
    is none that the library writes.
    """
    from ml4core_rocm.kernels.aiter_mla import sparse_mla

    random = draw(1)
    cache = latents("bf16", 4, random)
    cache.parts[0][0, 0] = float("nan")  # the slot that a -1 would become
    q = torch.randn(4, 16, 576, generator=random).bfloat16()
    slots = torch.stack([1 + torch.randperm(63, generator=random)[:30] for _ in range(4)]).int()
    slots[0, ::2] = -1
    slots[1, 3] = 64  # behind the cache
    slots[2] = -1
    lens = torch.tensor([30, 30, 30, 0], dtype=torch.int32)
    out, lse = sparse_mla(q, cache, slots, lens, 0.04)
    for t in range(2):
        want, sums = attended(q[t], cache, slots[t], 0.04)
        assert far(out[t], want) < 4e-3
        assert torch.allclose(lse[t].double(), sums, atol=1e-4)
    assert not out[2:].any()
    assert bool(torch.isneginf(lse[2:]).all())


def test_rows_without_rope(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_mla import sparse_mla

    random = draw(2)
    cache = latents("e4m3", 4, random)
    cache.parts[0][..., 512:] = 0  # as a layer without rope writes them
    q = torch.randn(2, 8, 512, generator=random).bfloat16()
    slots = torch.randperm(64, generator=random)[:20].expand(2, -1).int()
    lens = torch.tensor([20, 20], dtype=torch.int32)
    out, _ = sparse_mla(q, cache, slots, lens, 0.04)
    for t in range(2):
        assert far(out[t], attended(q[t], cache, slots[t], 0.04)[0]) < 4e-2
    # The scale is the model's, never that of 576 values.
    assert aiter.last("mla_decode_fwd")["sm_scale"] == 0.04


def test_padded_rows_leave_no_trace_in_the_scale_of_queries(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_mla import sparse_mla

    random = draw(3)
    cache = latents("e4m3", 4, random)
    q = torch.randn(3, 8, 576, generator=random).bfloat16()
    slots = torch.randperm(64, generator=random)[:20].expand(3, -1).int()
    lens = torch.tensor([20, 20, 0], dtype=torch.int32)
    first, _ = sparse_mla(q, cache, slots, lens, 0.04)
    q[2] = 3e4  # of a padded row, which sees nothing
    second, _ = sparse_mla(q, cache, slots, lens, 0.04)
    assert torch.equal(first, second)


def test_many_rows_stay_in_the_persistent_kernel(aiter: Fake) -> None:
    """From 32 rows of 16 heads in bf16 on the library leaves it, unless the splits are stated."""
    from ml4core_rocm.kernels.aiter_mla import sparse_mla

    random = draw(4)
    cache = latents("bf16", 4, random)
    q = torch.randn(40, 16, 576, generator=random).bfloat16()
    slots = torch.randperm(64, generator=random)[:20].expand(40, -1).int()
    lens = torch.full((40,), 20, dtype=torch.int32)
    out, _ = sparse_mla(q, cache, slots, lens, 0.04)
    assert torch.isfinite(out).all()
    assert aiter.last("mla_decode_fwd")["num_kv_splits"] == 1


def test_what_no_kernel_exists_for_is_refused(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_mla import cache_rows, sparse_mla

    cache = latents("bf16", 2, draw(5))
    slots = torch.zeros(1, 4, dtype=torch.int32)
    lens = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="up to 128 heads"):
        sparse_mla(torch.zeros(1, 144, 576).bfloat16(), cache, slots, lens, 0.04)
    with pytest.raises(ValueError, match="bf16 queries"):
        sparse_mla(torch.zeros(1, 16, 576), cache, slots, lens, 0.04)
    with pytest.raises(ValueError, match="gfx950 doesn't read caches of 'e4m3fnuz'"):
        sparse_mla(
            torch.zeros(1, 16, 576).bfloat16(), latents("e4m3fnuz", 2, draw(5)), slots, lens, 0.04
        )
    spaced = KVCache(cache.layout, BLOCK, (torch.zeros(4, BLOCK, 576).bfloat16()[::2],))
    with pytest.raises(ValueError, match="dense rows"):
        cache_rows(spaced)
    assert "mla_decode_fwd" not in aiter.names()


def test_layers_of_a_step_share_their_plan(aiter: Fake) -> None:
    from ml4core.api import LayerKV, Selection
    from ml4core_rocm.kernels.aiter_mla import StepPlans, stage

    random = draw(6)
    cache = latents("bf16", 4, random)
    slots = torch.stack([torch.randperm(64, generator=random)[:20] for _ in range(2)]).int()
    lens = torch.tensor([20, 9], dtype=torch.int32)
    slots[1, 9:] = -1
    chosen = Selection(slots, lens, slots, torch.zeros(2, dtype=torch.bool))
    other = Selection(slots.flip(0), lens.flip(0), slots.flip(0), chosen.has_nan)
    layer = type("Layer", (), {"softmax_scale": 0.04})()
    shared = StepPlans()
    calls = [stage(layer, shared) for _ in range(3)]
    q = torch.randn(2, 16, 576, generator=random).bfloat16()
    step, later = object(), object()
    caches = [dataclasses.replace(cache) for _ in calls]  # each layer has its own
    for call, own in zip(calls, caches, strict=True):
        out, _ = call(step, LayerKV(own, None), q, chosen)
        assert far(out[1], attended(q[1], cache, slots[1, :9], 0.04)[0]) < 4e-3
    assert aiter.names().count("get_mla_metadata_v1") == 1
    assert aiter.names().count("mla_decode_fwd") == 3
    out, _ = calls[0](later, LayerKV(cache, None), q, other)
    assert far(out[0], attended(q[0], cache, slots[1, :9], 0.04)[0]) < 4e-3
    assert aiter.names().count("get_mla_metadata_v1") == 2
    # The same step from its first layer on again, as a graph is captured after its warm-up.
    for own in (*caches, *caches):
        out, _ = calls[0](step, LayerKV(own, None), q, chosen)
        assert far(out[1], attended(q[1], cache, slots[1, :9], 0.04)[0]) < 4e-3
    assert aiter.names().count("get_mla_metadata_v1") == 4
    with pytest.raises(ValueError, match="choose their keys"):
        calls[0](step, LayerKV(cache, None), q, None)


def test_layers_of_another_top_k_have_a_plan_of_their_own(aiter: Fake) -> None:
    from ml4core.api import LayerKV, Selection
    from ml4core_rocm.kernels.aiter_mla import StepPlans, stage

    random = draw(7)
    cache = latents("bf16", 4, random)
    layer = type("Layer", (), {"softmax_scale": 0.04})()
    shared, step, made = StepPlans(), object(), []
    for width in (8, 20, 8):
        slots = torch.stack([torch.randperm(64, generator=random)[:width] for _ in range(2)]).int()
        lens = torch.full((2,), width, dtype=torch.int32)
        made.append(Selection(slots, lens, slots, torch.zeros(2, dtype=torch.bool)))
    q = torch.randn(2, 16, 576, generator=random).bfloat16()
    for chosen in made:
        own = LayerKV(dataclasses.replace(cache), None)
        out, _ = stage(layer, shared)(step, own, q, chosen)
        for t in (0, 1):
            assert far(out[t], attended(q[t], cache, chosen.slots[t], 0.04)[0]) < 4e-3
    assert aiter.names().count("get_mla_metadata_v1") == 2


def test_a_row_that_lost_keys_shifts_no_other(aiter: Fake) -> None:
    """NaN among the scores of one layer leaves a row fewer keys than the step's plan counts."""
    from ml4core.api import LayerKV, Selection
    from ml4core_rocm.kernels.aiter_mla import StepPlans, stage

    random = draw(8)
    cache = latents("bf16", 4, random)
    cache.parts[0][0] = 0  # the null page
    slots = torch.stack([16 + torch.randperm(48, generator=random)[:20] for _ in range(3)]).int()
    nothing = torch.zeros(3, dtype=torch.bool)
    whole = Selection(slots, torch.tensor([20, 20, 20], dtype=torch.int32), slots, nothing)
    fewer = slots.clone()
    fewer[1, 12:] = -1
    lost = Selection(fewer, torch.tensor([20, 12, 20], dtype=torch.int32), fewer, nothing)
    layer = type("Layer", (), {"softmax_scale": 0.04})()
    shared = StepPlans()
    first, second = stage(layer, shared), stage(layer, shared)
    q, step = torch.randn(3, 16, 576, generator=random).bfloat16(), object()
    first(step, LayerKV(cache, None), q, whole)
    out, _ = second(step, LayerKV(dataclasses.replace(cache), None), q, lost)
    for t in (0, 2):
        assert far(out[t], attended(q[t], cache, slots[t], 0.04)[0]) < 4e-3
    assert torch.isfinite(out).all()
    assert aiter.names().count("get_mla_metadata_v1") == 1


@pytest.mark.parametrize(
    ("rows", "heads", "shapes"),
    [
        (1, 16, ((2,), (257,), (256, 8), (2,), (1, 2), (256,))),
        (64, 16, ((2,), (257,), (319, 8), (65,), (64, 2), (319,))),
        (256, 16, ((2,), (257,), (511, 8), (257,), (256, 2), (510,))),
        (64, 32, ((2,), (257,), (638, 8), (129,), (128, 2), (638,))),
    ],
)
def test_the_plans_arrays_are_as_large_as_the_librarys(
    aiter: Fake, rows: int, heads: int, shapes: tuple[tuple[int, ...], ...]
) -> None:
    """Of 256 compute units in FP8, as the library itself describes them."""
    from ml4core_rocm.kernels.aiter_mla import plan_mla
    from ml4core_rocm.kernels.slot_streams import starts_of

    starts = starts_of(torch.full((rows,), 20, dtype=torch.int32))
    plan = plan_mla(starts, 2048, heads, torch.float8_e4m3fn, torch.float8_e4m3fn)
    names = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map")
    found = [plan.work[name] for name in (*names, "reduce_partial_map")]
    assert tuple(tuple(one.shape) for one in found) == shapes
    assert [one.dtype for one in found] == [torch.uint64, *[torch.int32] * 5]
    given = aiter.last("get_mla_metadata_v1")
    assert (given["page_size"], given["kv_granularity"]) == (1, 16)
    assert (given["max_seqlen_qo"], given["uni_seqlen_qo"], given["is_causal"]) == (1, 1, True)


def test_a_selection_as_a_stream() -> None:
    from ml4core_rocm.kernels.slot_streams import starts_of, stream_at

    slots = torch.tensor([[5, 6, -1], [7, 8, 9], [1, 2, 3]], dtype=torch.int32)
    lens = torch.tensor([2, 3, 0], dtype=torch.int32)
    starts = starts_of(lens)
    stream = stream_at(slots, lens, starts)
    assert starts.tolist() == [0, 2, 5, 5]
    assert starts.dtype == stream.dtype == torch.int32
    assert stream.tolist() == [5, 6, 7, 8, 9, 0, 0, 0, 0]
    assert starts_of(lens[:0]).tolist() == [0]
    assert stream_at(slots[:0], lens[:0], starts_of(lens[:0])).tolist() == []


def test_the_fake_kills_swapped_work_arrays(aiter: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """work_indptr comes first from one function and goes second into the next."""
    from ml4core_rocm.kernels import aiter_mla

    real = aiter_functions.load("get_mla_metadata_v1")

    def swapped(*place: object, **named: object) -> None:
        order = [*place]
        order[7], order[8] = order[8], order[7]
        real(*order, **named)

    loads = {"get_mla_metadata_v1": swapped}
    monkeypatch.setattr(aiter_mla, "load", lambda n: loads.get(n) or aiter_functions.load(n))
    cache = latents("bf16", 1, draw(7))
    slots = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(Misuse, match="work_"):
        aiter_mla.sparse_mla(
            torch.zeros(1, 16, 576).bfloat16(), cache, slots, torch.ones(1, dtype=torch.int32), 0.1
        )
