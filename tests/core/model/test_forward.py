"""One forward, many ways to cut it: every way gives the same numbers, at contexts well above the
top-k.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ml4core.api import FaultError

LENGTH = 150  # with a top-k of 16


def close(a: torch.Tensor, b: torch.Tensor, bound: float = 2e-5) -> None:
    """Equal up to the order of fp32 sums."""
    assert a.shape == b.shape
    worst = ((a - b).abs().amax(-1) / b.abs().amax(-1)).max().item()
    assert worst <= bound, (
        f"worst row differs by {worst:.2e} of its largest logit, bound {bound:.0e}"
    )


@pytest.fixture(scope="module")
def whole(rig, prompt):
    """Logits of a whole prefill."""
    logits = rig.logits(prompt(LENGTH))
    assert logits.std() > 0.05
    assert (logits[1:] - logits[:-1]).abs().amax(-1).min() > 0.01, "rows can't be told apart"
    return logits


def test_decode_equals_prefill(rig, prompt, whole):
    close(rig.logits(prompt(LENGTH), 1), whole)


@pytest.mark.parametrize("chunks", [(64,), (1, 37), (16, 16, 118), (149, 1), (7,)])
def test_chunked_prefill_equals_whole(rig, prompt, whole, chunks):
    close(rig.logits(prompt(LENGTH), *chunks), whole)


def test_page_permutation_changes_nothing(make_rig, prompt, whole):
    rig = make_rig()
    for group, pool in rig.runner.pools.items():
        # Pages come back, and go out again, in an order of their own.
        pages = pool.allocate(pool.free_pages)
        random.Random(group).shuffle(pages)
        pool.release(pages)
        assert pool.allocate(3) != [1, 2, 3]
    assert torch.equal(rig.logits(prompt(LENGTH)), whole)


@pytest.mark.parametrize("block_size", [1, 16, 61, 64])
def test_block_size_changes_nothing(make_rig, prompt, whole, block_size):
    close(make_rig(block_size=block_size).logits(prompt(LENGTH), 100, 50), whole)


@pytest.mark.parametrize("form", ["absorbed", "unabsorbed"])
def test_both_forms_of_attention_give_the_same(make_rig, prompt, whole, form):
    rig = make_rig(form=form)
    close(rig.logits(prompt(LENGTH)), whole)
    close(rig.logits(prompt(LENGTH), 90, *[1] * 10, 50), whole)


def test_a_mixed_step_equals_each_request_alone(rig, prompt, whole):
    lengths = (LENGTH, 40, 97, 20, 63)
    alone = [whole, *(rig.logits(prompt(n, seed=n)) for n in lengths[1:])]
    made = [rig.sequence(prompt(LENGTH)), *(rig.sequence(prompt(n, seed=n)) for n in lengths[1:])]
    for sequence, rows in zip(made, (149, 37, 60, 0, 60), strict=True):
        if rows:
            rig.step((sequence, rows))
    rows = (1, 3, 37, 20, 3)
    output = rig.step(*zip(made, rows, strict=True), verify_rows=3, all_logits=True)
    # Rows stand as [decodes][windows][chunks, shortest first].
    order = (0, 1, 4, 3, 2)
    expected = torch.cat([alone[i][lengths[i] - rows[i] :] for i in order])
    close(output.logits, expected)
    for sequence in made:
        sequence.release(rig.runner.pools)


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6])
def test_verify_windows_of_any_depth_equal_single_rows(rig, prompt, whole, rows):
    """B009: 1 + depth rows a request."""
    sequence = rig.sequence(prompt(LENGTH))
    rig.step((sequence, 97))
    output = rig.step((sequence, rows), verify_rows=rows, all_logits=True)
    sequence.release(rig.runner.pools)
    close(output.logits, whole[97 : 97 + rows])


def test_a_chunk_selects_keys_from_before_its_start(make_rig, prompt):
    """B007: selection spans the whole visible context, whatever the chunk or the cached prefix."""
    rig = make_rig()
    topk = rig.runner.ops["topk"]
    found: list[torch.Tensor] = []

    def recording(*args):
        result = topk(*args)
        found.append(result[0])
        return result

    context = rig.runner._context
    rig.runner._context = replace(context, ops={**context.ops, "topk": recording})
    ids = prompt(LENGTH)
    rig.logits(ids, LENGTH)
    whole, found[:] = list(found), []
    rig.logits(ids, 100, 50)
    later = found[len(whole) :]
    assert len(later) == len(whole) == len(rig.spec.index_owners)
    for once, chunk in zip(whole, later, strict=True):
        assert torch.equal(chunk, once[100:])
        assert ((chunk >= 0) & (chunk < 100)).any(1).all(), "a row looks at its own chunk only"


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_padding_leaves_no_trace(rig, prompt, kind):
    """B018, B072: padded rows and requests, with wider tables, change no bit of a real row."""
    sizes = (90, 41, 60)
    rows = 1 if kind == "decode" else 30

    def run(**options):
        made = [rig.sequence(prompt(n, seed=n)) for n in sizes]
        for sequence, size in zip(made, sizes, strict=True):
            rig.step((sequence, size - rows))
        output = rig.step(*((s, rows) for s in made), all_logits=True, **options)
        for sequence in made:
            sequence.release(rig.runner.pools)
        return output

    plain = run()
    padded = run(pad_requests=8, pad_rows=128, pad_pages=24)
    assert padded.taps == plain.taps == ()
    # More rows may take the other form of attention: sums in another order. Logits of padded
    # requests come behind the others.
    close(padded.logits[: len(plain.logits)], plain.logits)
    assert torch.isfinite(padded.logits).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_is_not_selected_never_reaches_a_result(make_rig, prompt, whole, poison):
    """B020: stale bytes in pages, the null page included, have no weight."""
    rig = make_rig()
    for caches in (rig.runner.kv.latent, rig.runner.kv.index_keys):
        for cache in caches.values():
            for part in cache.parts:
                part.fill_(poison)
    assert torch.equal(rig.logits(prompt(LENGTH)), whole)
    close(rig.logits(prompt(LENGTH), 64, *[1] * 10, 76), whole)


def test_a_second_prompt_sees_nothing_of_the_first(rig, make_rig, prompt):
    """B013: nothing survives a forward but the caches' rows."""
    rig.logits(prompt(LENGTH, seed=5))
    after = rig.logits(prompt(99, seed=6))
    assert torch.equal(after, make_rig().logits(prompt(99, seed=6)))


def test_short_prompts_around_the_topk_equal_dense_attention(rig, make_rig, prompt):
    """B025: at or below the top-k every key is selected, whatever the scores."""
    for length in (15, 16, 17):
        ids = prompt(length, seed=length)
        sequence = rig.sequence(ids)
        rig.step((sequence, length))
        close(rig.logits(ids, 5, 1), rig.logits(ids))
        sequence.release(rig.runner.pools)


def test_a_long_stream_is_not_disturbed_by_short_prompts(rig, prompt, whole):
    """B025: a decode beside new short prompts."""
    long = rig.sequence(prompt(LENGTH))
    rig.step((long, 100))
    found = []
    for position in range(100, LENGTH):
        length = position % 37 + 2
        short = rig.sequence(prompt(length, seed=position))
        found.append(rig.step((long, 1), (short, length)).logits[0])
        short.release(rig.runner.pools)
    long.release(rig.runner.pools)
    close(torch.stack(found), whole[100:])


def relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


@pytest.mark.parametrize(
    ("kv", "bound"), [("bf16", 0.03), ("fp8_ds_mla", 0.12), ("e4m3", 0.12), ("e4m3fnuz", 0.12)]
)
def test_quantised_latents_stay_near_and_read_back_alike(make_rig, prompt, whole, kv, bound):
    """B029: a latent that was written in one step reads the same in the next.

    The bound is for rows that see no more keys than the top-k: with random weights a key that falls
    out of a selection changes everything after it.
    """
    rig = make_rig(kv=kv)
    once = rig.logits(prompt(LENGTH))
    assert 1e-5 < relative(once, whole)[:16].median() < bound
    again = rig.logits(prompt(LENGTH), 7, *[1] * 9, LENGTH)
    assert 1e-5 < relative(again, whole)[:16].median() < bound


@pytest.mark.parametrize("index", ["planar_f32", "tiled16_f32"])
def test_quantised_index_keys_agree_between_layouts_and_steps(make_rig, prompt, index):
    """Both layouts hold the same bytes in another order, so their results are equal bit for bit."""
    rig = make_rig(index=index)
    once = rig.logits(prompt(LENGTH))
    assert torch.equal(once, make_rig(index="planar_f32").logits(prompt(LENGTH)))
    again = rig.logits(prompt(LENGTH), 70, *[1] * 20, 60)
    assert (relative(again, once) > 1e-4).float().mean() < 0.1


def test_bfloat16_activations_follow_float32(make_rig, prompt, whole):
    got = make_rig(dtype="bfloat16", kv="bf16").logits(prompt(LENGTH))
    assert relative(got, whole)[:16].median() < 0.06
    assert torch.isfinite(got).all()


def test_a_nan_stops_the_engine_for_good(make_rig, prompt):
    """B001: a NaN score is reported, not served; the fault word is sticky."""
    rig = make_rig()
    name, weight = "index_wk", rig.runner.weights.layers[0]["index_wk"]
    weight.data[0, 0] = float("nan")
    sequence = rig.sequence(prompt(30))
    with pytest.raises(FaultError, match="'nan' at step 1") as caught:
        rig.step((sequence, 30))
    weight.data[0, 0] = 0.0
    with pytest.raises(FaultError) as again:
        rig.step((sequence, 30))
    assert again.value.fault == caught.value.fault, name


def test_a_router_that_can_not_judge_stops_the_engine(make_rig, prompt):
    """Its rows have no expert: without a fault they would be wrong and look right."""
    rig = make_rig()
    layer = next(layer.index for layer in rig.spec.layers if layer.moe)
    rig.runner.weights.layers[layer]["gate"][1, 0] = float("nan")
    with pytest.raises(FaultError, match="'nan' at step 1"):
        rig.step((rig.sequence(prompt(3)), 3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_have_the_dtype_asked_for_whatever_the_embedding_has(make_rig, prompt, dtype):
    rig = make_rig(dtype=dtype, kv="bf16")
    table = rig.runner.weights.top["embedding"].to(torch.bfloat16)
    found = []
    for kept in (table.float(), table):
        rig.runner.weights = rig.runner.weights._replace(
            top={**rig.runner.weights.top, "embedding": kept}
        )
        found.append(rig.logits(prompt(9)))
    assert torch.equal(*found)


def test_padded_rows_raise_no_fault(rig, prompt):
    output = rig.step((rig.sequence(prompt(5)), 5), pad_rows=16, pad_requests=3)
    assert not output.fault
