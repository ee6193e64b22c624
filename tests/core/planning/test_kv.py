"""Cache groups and pools: bytes a token out of the layer table, draft windows first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ml4core.planning import kv
from ml4core.planning.model import published_model
from ml4core.planning.plan import row_bytes
from support.stepping import plan_pools

SPEC = published_model().spec
PAGE = 64


def groups(latent: str = "fp8_ds_mla", index: str = "planar_f32") -> tuple[kv.KVGroup, ...]:
    return kv.target_groups(SPEC, kv.model_layouts(SPEC, latent, index))


def draft() -> kv.KVGroup:
    assert SPEC.draft is not None
    return kv.draft_group(SPEC.draft)


def test_b027_bytes_a_token_come_out_of_the_layer_table() -> None:
    assert row_bytes(SPEC) == {"fp8_ds_mla": 47_136, "e4m3": 42_096, "bf16": 78_384}


def test_b027_each_kind_of_sharing_counts() -> None:
    """Were no latent shared, or no index, a token would have more bytes; so the table is read."""
    own_kv = replace(SPEC, layers=tuple(replace(one, kv_source=one.index) for one in SPEC.layers))
    assert row_bytes(own_kv)["fp8_ds_mla"] == 53_040
    indexer = SPEC.layers[0].indexer
    layers = tuple(replace(one, topk_source=one.index, indexer=indexer) for one in SPEC.layers)
    assert row_bytes(replace(SPEC, layers=layers))["fp8_ds_mla"] == 50_832


def test_groups_have_owners_and_their_own_row_bytes() -> None:
    latent, index = groups()
    assert (len(latent.owners), latent.bytes_per_token) == (63, 41_328)
    assert (len(index.owners), index.bytes_per_token) == (44, 5_808)
    assert (len(draft().owners), draft().bytes_per_token) == (3, 3 * 1_152)
    assert (draft().window, draft().sharded) == (2048, False)


def test_layouts_that_only_change_the_order_of_bytes_change_no_size() -> None:
    tiled = groups("e4m3fnuz", "tiled16_f32")
    assert sum(group.bytes_per_token for group in tiled) == 42_096


@pytest.mark.parametrize(
    ("tokens", "rows", "wanted"),
    [
        (1, 0, 1),
        (64, 0, 1),
        (65, 7, 2),
        (2048, 7, 32),  # all of the context is less than the window and its slack
        (1 << 20, 7, 34),  # ceil((2047 + 7) / 64) = 33, and one for where the window begins
        (1 << 20, 1537, 57),
        (1 << 20, 0, 33),
    ],
)
def test_a_window_is_bounded(tokens: int, rows: int, wanted: int) -> None:
    window = replace(draft(), ahead=0)
    assert window.pages(tokens, PAGE, step_rows=rows) == wanted
    assert window.pages(tokens, PAGE, ranks=8, step_rows=rows) == wanted, "replicated under DCP"


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(1, 1), (61, 1), (62, 2), (2045, 32), (2046, 33), (1 << 20, 34)]
)
def test_a_draft_window_has_room_for_a_block_and_no_more_for_a_long_chunk(
    tokens: int, wanted: int
) -> None:
    """ceil((2047 + 3 + 2 * 4) / 64) = 33, and one for where the window begins."""
    for rows in (0, 7, 8192):
        assert draft().pages(tokens, PAGE, step_rows=rows) == wanted
    assert kv.draft_step_rows(3) == 11


def test_a_sharded_page_stands_for_tokens_of_every_rank() -> None:
    latent = groups()[0]
    assert [latent.pages(n, PAGE, ranks=8) for n in (1, 512, 513)] == [1, 1, 2]


def test_draft_windows_come_first_and_the_rest_is_shared_out_evenly() -> None:
    all_groups = (*groups(), draft())
    budget = 10 * 2**30
    pools = kv.pools_within(all_groups, PAGE, budget, 16, 1 << 20, 1, 7)
    assert pools is not None
    assert pools.blocks["draft"] == 16 * 34 + 1
    assert pools.bytes_of(all_groups[2]) == (16 * 34 + 1) * PAGE * 3 * 1_152
    left = budget - pools.bytes_of(all_groups[2])
    assert pools.blocks["latent"] == pools.blocks["index"] == left // (PAGE * 47_136)
    assert 0 <= budget - pools.nbytes < PAGE * 47_136, "no page more would fit"
    assert pools.tokens == (pools.blocks["latent"] - 1) * PAGE


def test_eight_context_ranks_hold_eight_times_the_tokens_beside_equal_draft_pools() -> None:
    all_groups = (*groups(), draft())
    one, eight = (
        kv.pools_within(all_groups, PAGE, 100 * 2**30, 256, 1 << 20, n, 7) for n in (1, 8)
    )
    assert one is not None
    assert eight is not None
    assert eight.tokens == 8 * one.tokens
    assert eight.bytes_of(all_groups[2]) == one.bytes_of(all_groups[2])
    assert eight.requests(1 << 20) >= 8 * one.requests(1 << 20)
    assert eight.requests(4096) == 256, "bounded by the draft windows"


def test_pools_for_requests_hold_exactly_them() -> None:
    pools = kv.pools_for(groups(), PAGE, 1000, 3)
    assert pools.requests(1000) == 3
    assert pools.requests(1024) == 3
    assert pools.requests(1025) == 2
    assert pools.blocks == {"latent": 49, "index": 49}


def test_the_engine_counts_as_the_planner_does() -> None:
    layouts = kv.model_layouts(SPEC, "fp8_ds_mla", "planar_f32")
    theirs = plan_pools(SPEC, layouts, PAGE, 1000, 3)
    ours = kv.pools_for(groups(), PAGE, 1000, 3)
    assert (theirs.blocks, theirs.nbytes, theirs.tokens) == (ours.blocks, ours.nbytes, ours.tokens)
    assert theirs.bytes_per_token == 47_136


@pytest.mark.parametrize("budget", [-1, 0, 2 * PAGE * 47_136 - 1])
def test_no_pool_in_too_little(budget: int) -> None:
    assert kv.pools_within(groups(), PAGE, budget, 1, 64) is None
    assert kv.pools_within(groups(), PAGE, 2 * PAGE * 47_136, 1, 64) is not None


def test_a_layout_says_which_pages_it_can_have() -> None:
    with pytest.raises(ValueError, match="multiple of"):
        kv.pools_within(groups("e4m3", "tiled16_f32"), 61, 2**40, 1, 64)


@pytest.mark.parametrize("sequences", [1, 2, 16])
@pytest.mark.parametrize("tokens", [1, 64, 65, 5000])
def test_the_least_pools_are_the_least(sequences: int, tokens: int) -> None:
    """With drafts, the windows of all sequences come first: what one sequence needs is more."""
    for own in (groups(), (*groups(), draft())):
        least = kv.least_pools(own, PAGE, tokens, sequences).nbytes
        pools = kv.pools_within(own, PAGE, least, sequences, tokens)
        assert pools is not None
        assert pools.nbytes == least
        assert pools.requests(tokens) >= 1
        less = kv.pools_within(own, PAGE, least - 1, sequences, tokens)
        assert less is None or less.requests(tokens) == 0
