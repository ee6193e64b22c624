"""Plans of the published shape: what fits, why not, and values that work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ml4core.api import Capabilities
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.planning.launch import named_backend
from ml4core.planning.model import published_model
from ml4core.planning.plan import Plan, PlanOptions, make_plan
from ml4core.planning.proposals import propose

GIB = 2**30
DRAFTS = {"method": "dspark", "num_speculative_tokens": 3}
MODELS = {variant: published_model(variant) for variant in ("fp8", "nvfp4")}


def plan(
    memory: float | None, variant: str = "fp8", reserve: float | None = None, **flags: Any
) -> Plan:
    options = PlanOptions(
        memory=None if memory is None else int(memory * GIB),
        reserve=None if reserve is None else int(reserve * GIB),
    )
    return make_plan(MODELS[variant], EngineArgs("published", **flags), options)


def test_without_a_memory_weights_and_rows_are_planned_alone() -> None:
    made = plan(None, tensor_parallel_size=8)
    assert (made.pools, made.budget, made.usable, made.fits) == (None, None, None, True)
    assert made.weight_bytes > 100 * GIB
    assert propose(made) == []


def test_the_pool_takes_what_is_left() -> None:
    made = plan(280, tensor_parallel_size=8, speculative_config=DRAFTS)
    assert made.pools is not None
    assert made.usable is not None
    used = made.weight_bytes + made.reserve.nbytes + made.pools.nbytes
    assert 0 <= made.usable - used < 64 * 47_136
    assert made.pools.tokens == made.tokens_at("fp8_ds_mla")
    tokens = {name: made.tokens_at(name) for name in made.row_bytes}
    assert tokens["bf16"] < tokens["fp8_ds_mla"] < tokens["e4m3"]  # type: ignore[operator]
    assert tokens["e4m3"] / tokens["bf16"] == pytest.approx(1.862, abs=2e-3)  # type: ignore[operator]


def test_eight_context_ranks_hold_eight_times_the_tokens() -> None:
    """But for memory that a step of them needs; the draft pool is the same on each rank."""
    flags = {"tensor_parallel_size": 8, "speculative_config": DRAFTS}
    one, eight = (plan(280, decode_context_parallel_size=n, reserve=7, **flags) for n in (1, 8))
    assert one.pools is not None
    assert eight.pools is not None
    assert eight.pools.tokens == 8 * one.pools.tokens
    assert eight.pools.blocks["draft"] == one.pools.blocks["draft"] == 256 * 34 + 1
    one, eight = (plan(280, decode_context_parallel_size=n, **flags) for n in (1, 8))
    assert one.pools is not None
    assert eight.pools is not None
    assert 7.9 < eight.pools.tokens / one.pools.tokens < 8


def test_the_drafter_is_there_if_it_is_asked_for() -> None:
    without, drafts = plan(None), plan(None, speculative_config=DRAFTS)
    assert "drafter" in without.not_loaded
    assert "drafter" not in drafts.not_loaded
    assert [group.name for group in without.groups] == ["latent", "index"]
    assert [group.name for group in drafts.groups] == ["latent", "index", "draft"]
    assert drafts.weight_bytes > without.weight_bytes


def test_no_images_no_encoder() -> None:
    """It is loaded, and planned, where its flag asks for images."""
    for flags in ({}, {"limit_mm_per_prompt": {"image": 0}}, {"limit_mm_per_prompt": {"audio": 0}}):
        made = plan(None, **flags)
        assert "vision" in made.not_loaded
        assert "images" not in made.reserve.terms
    for limit in (1, {"count": 2}):
        made = plan(None, limit_mm_per_prompt={"image": limit})
        assert "vision" not in made.not_loaded
        terms = made.reserve.terms
        assert terms["images"] > 16384 * MODELS["fp8"].spec.hidden_size * 2
        assert "16,384 embeddings" in made.reserve.formulas["images"]


def test_drafts_have_logits() -> None:
    """Those of a step, and where they are drawn those that are kept until they are judged."""
    none, greedy, drawn = (
        plan(None, max_num_seqs=8, speculative_config=config).reserve
        for config in ({}, DRAFTS, DRAFTS | {"draft_sample_method": "probabilistic"})
    )
    each = 8 * 3 * MODELS["fp8"].spec.vocab_size * 4
    assert "draft logits" not in none.terms
    assert greedy.terms["draft logits"] == each
    assert drawn.terms["draft logits"] == 2 * each
    assert drawn.nbytes - greedy.nbytes == each


@pytest.mark.usefixtures("probed_once")
@pytest.mark.parametrize(
    ("backend", "kept"), [("cpu", False), ("tpu", False), ("cuda", True), ("rocm", True)]
)
def test_graphs_have_memory_where_the_backend_captures_them(backend: str, kept: bool) -> None:
    """Of the device that is here, or that the backend names for plans."""
    args = EngineArgs("published", backend=backend, tensor_parallel_size=8)
    options = named_backend(args, MODELS["fp8"].spec)
    assert options is not None
    made = make_plan(MODELS["fp8"], args, options)
    assert made.reserve.terms.get("graphs", 0) == (GIB if kept else 0)
    eager = make_plan(MODELS["fp8"], replace(args, enforce_eager=True), options)
    assert "graphs" not in eager.reserve.terms


def test_without_a_backend_graphs_have_memory_unless_none_are_asked_for() -> None:
    assert plan(None).reserve.terms["graphs"] == GIB
    for flags in ({"enforce_eager": True}, {"compilation_config": {"cudagraph_mode": "NONE"}}):
        assert "graphs" not in plan(None, **flags).reserve.terms


def test_a_backends_defaults_are_planned_with() -> None:
    words = Capabilities(
        frozenset({"index:fp32"}),
        {
            **{"dtype": "float32", "kv": "fp32", "index": "planar_f32", "fp8": "e4m3"},
            **{"block_size": "32", "max_num_seqs": "3", "max_num_batched_tokens": "96"},
        },
    )
    args = EngineArgs("published", tensor_parallel_size=8, max_model_len=1024)
    made = make_plan(MODELS["fp8"], args, PlanOptions(backend=words))
    assert (made.dtype, made.layout, made.block_size) == ("float32", "fp32", 32)
    assert (made.max_num_seqs, made.rows) == (3, 96)
    assert {group.layout.id for group in made.groups} == {"fp32"}
    asked = replace(args, dtype="bfloat16", kv_cache_dtype="fp8", block_size=64)
    made = make_plan(MODELS["fp8"], asked, PlanOptions(backend=words))
    assert (made.dtype, made.layout, made.block_size) == ("bfloat16", "e4m3", 64)


@pytest.mark.parametrize(
    ("memory", "variant", "flags", "why"),
    [
        (139.8, "fp8", {"tensor_parallel_size": 8}, "leave nothing"),
        (
            139.8,
            "nvfp4",
            {"tensor_parallel_size": 8, "speculative_config": DRAFTS},
            "one request of 1,048,576 tokens, and draft windows of 256 requests,",
        ),
        (
            142.3,
            "nvfp4",
            {
                "tensor_parallel_size": 8,
                "speculative_config": DRAFTS,
                "max_model_len": 8192,
                "max_num_seqs": 8000,
            },
            "draft windows of 8000 requests",
        ),
        (187, "fp8", {"tensor_parallel_size": 8, "kv_cache_dtype": "bfloat16"}, "need caches"),
        (
            267,
            "fp8",
            {"tensor_parallel_size": 8, "kv_cache_memory_bytes": 10 * GIB},
            "there are 10.00 GiB",
        ),
        (
            150,
            "fp8",
            {"tensor_parallel_size": 8, "kv_cache_memory_bytes": 60 * GIB},
            "--kv-cache-memory-bytes 64424509440 is more than",
        ),
        (60, "nvfp4", {"tensor_parallel_size": 8, "max_model_len": 4096}, "leave nothing"),
    ],
)
def test_what_is_proposed_works(
    memory: float, variant: str, flags: dict[str, Any], why: str
) -> None:
    made = plan(memory, variant, **flags)
    assert not made.fits
    assert why in made.shortfall
    proposals = propose(made)
    assert proposals
    for proposal in proposals:
        again = make_plan(proposal.plan.model, proposal.plan.args, proposal.plan.options)
        assert again.fits, proposal
        assert again.pools is not None
        assert again.pools.requests(again.max_model_len) >= 1
        assert (
            proposal.plan.args != made.args
            or proposal.plan.options != made.options
            or (proposal.plan.model.variant != variant)
        )


def test_a_proposed_length_is_the_longest_that_fits() -> None:
    made = plan(139.8, "nvfp4", tensor_parallel_size=8, speculative_config=DRAFTS)
    (length,) = [one for one in propose(made) if one.flag == "--max-model-len"]
    longest = int(length.value)
    assert longest % 64 == 0
    flags = {"tensor_parallel_size": 8, "speculative_config": DRAFTS}
    assert plan(139.8, "nvfp4", max_model_len=longest, **flags).fits
    assert not plan(139.8, "nvfp4", max_model_len=longest + 64, **flags).fits


def test_a_proposed_memory_is_no_more_than_it_takes() -> None:
    made = plan(139.8, tensor_parallel_size=8)
    (memory,) = [one for one in propose(made) if one.flag == "--memory"]
    assert plan(float(memory.value), tensor_parallel_size=8).fits
    assert not plan(float(memory.value) - 0.3, tensor_parallel_size=8).fits


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            "--tensor-parallel-size: 3 does not divide the 64 attention heads; does not divide a "
            "feed-forward width of 16384; works: 1, 2, 4, 8, 16",
        ),
        (
            {"tensor_parallel_size": 32},
            "cuts the 6144 rows of experts_w13 to 192, and fp8_block has a scale for 128",
        ),
        (
            {"tensor_parallel_size": 8, "data_parallel_size": 3, "enable_expert_parallel": True},
            "with 24 ranks in all, which do not divide the 128 experts",
        ),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size: 2 is not planned"),
        (
            {"max_model_len": 2_000_000},
            "--max-model-len: 2000000 is above the model's longest context; works: up to 1048576",
        ),
    ],
)
def test_sizes_that_cannot_be_are_named_with_those_that_can(
    flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentsError) as refused:
        plan(None, **flags)
    assert message in str(refused.value)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_sizes_that_are_said_to_work_do(size: int) -> None:
    assert plan(None, tensor_parallel_size=size).ranks.tp == size


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ArgumentsError) as refused:
        plan(None, tensor_parallel_size=3, pipeline_parallel_size=2, max_model_len=2_000_000)
    assert len(refused.value.problems) == 3


def test_the_published_many_host_launch_can_be_planned() -> None:
    made = plan(
        94.7,
        tensor_parallel_size=8,
        data_parallel_size=4,
        enable_expert_parallel=True,
        enable_ep_weight_filter=True,
        kv_cache_dtype="fp8_e4m3",
        dtype="bfloat16",
        max_model_len=524_288,
    )
    assert made.fits
    assert made.ranks.ep == 32
