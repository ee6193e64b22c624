"""Opening an engine: sizes, refusals with all reasons, the start-up report, and greedy runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ml4core.api import Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.llm import open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.seeded import make_seeded
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("opening") / "micro", "micro")


@pytest.fixture(scope="module")
def choice():
    return select("cpu")


@pytest.fixture
def start(folder, choice, request):
    """Opens an engine by flags, and closes it at the end."""
    opened = []

    def start(sequences=1, tokens_each=64, **flags):
        args = EngineArgs(str(folder), backend="cpu", **flags)
        engine = open_engine(args, choice=choice, sequences=sequences, tokens_each=tokens_each)
        opened.append(engine)
        return engine

    yield start
    for engine in opened:
        engine.close()


@pytest.fixture(scope="module")
def reference(folder, choice):
    args = EngineArgs(str(folder), backend="cpu")
    engine = open_engine(args, choice=choice, tokens_each=64)
    return engine.generate([PROMPT], GREEDY)[0].token_ids


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1},
        {"block_size": 1},
        {"block_size": 61},
        {"attention_config": {"mla_form": "unabsorbed"}},
        {"max_model_len": 46},
    ],
)
def test_flags_that_change_no_token(start, reference, flags):
    assert start(**flags).generate([PROMPT], GREEDY)[0].token_ids == reference


def test_a_prompt_among_others_gives_what_it_gives_alone(start, reference):
    others = [[200] * 3, PROMPT, list(range(300, 351)), [77]]
    together = start(sequences=4, max_num_seqs=4).generate(others, GREEDY)
    in_turn = start(sequences=4, max_num_seqs=1).generate(others, GREEDY)
    assert [c.token_ids for c in together] == [c.token_ids for c in in_turn]
    assert together[1].token_ids == reference


def test_sampling_depends_on_seed_and_position_alone(start):
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=5, ignore_eos=True)
    first = start().generate([PROMPT], params)[0].token_ids
    assert start(max_num_batched_tokens=11).generate([PROMPT], params)[0].token_ids == first
    assert start().generate([PROMPT], replace(params, seed=6))[0].token_ids != first
    both = start(sequences=2, max_num_seqs=2).generate([PROMPT, PROMPT], params)
    assert both[0].token_ids == first
    assert both[1].token_ids != first, "equal prompts of one call draw apart"


def test_stop_ids_and_limits_end_an_answer(start, reference):
    engine = start(max_model_len=43)
    stopped = engine.generate([PROMPT], replace(GREEDY, stop_token_ids=(reference[1],)))[0]
    assert (stopped.token_ids, stopped.finish_reason) == (reference[:2], "stop")
    full = engine.generate([PROMPT], GREEDY)[0]
    assert (full.token_ids, full.finish_reason) == (reference[:3], "length")
    assert {g: p.free_pages for g, p in engine.runner.pools.items()} == {"latent": 1, "index": 1}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: empty"),
        ([5, 8192], "prompt, token 1: 8192 (works: ids from 0 to 8191)"),
        ([-1], "prompt, token 0: -1"),
        (list(range(64, 128)), "prompt: 64 tokens (works: at most 63"),
    ],
)
def test_bad_prompts_are_refused_before_the_first_step(start, prompt, message):
    engine = start(max_model_len=64)
    with pytest.raises(RequestError) as refused:
        engine.generate([PROMPT, prompt] if prompt != [] else [prompt], GREEDY)
    assert message.split("prompt", 1)[1] in str(refused.value)


def test_a_pool_too_small_for_one_sequence_names_what_would_do(start):
    page = start().kv_plan.bytes_per_token * 64
    with pytest.raises(RequestError) as refused:
        start(tokens_each=200, kv_cache_memory_bytes=3 * page)
    assert refused.value.field == "--kv-cache-memory-bytes"
    assert f"at least {5 * page} for one sequence of 200 tokens" in str(refused.value)
    assert "--max-model-len 128 or less" in str(refused.value)
    # Taking either advice works.
    start(tokens_each=200, kv_cache_memory_bytes=5 * page)
    start(tokens_each=200, kv_cache_memory_bytes=3 * page, max_model_len=128)


def test_a_request_that_outgrows_the_pool_names_what_would_do(start):
    page = start().kv_plan.bytes_per_token * 64
    engine = start(tokens_each=64, kv_cache_memory_bytes=3 * page)
    with pytest.raises(RequestError, match=r"at most 129 in this pool"):
        engine.generate([PROMPT], replace(GREEDY, max_tokens=200))
    assert len(engine.generate([PROMPT], replace(GREEDY, max_tokens=89))[0].token_ids) == 89


def test_more_memory_than_the_device_has_is_refused_with_a_length_that_fits(folder, choice):
    device = replace(choice.devices[0].device, memory_bytes=40 << 20)
    small = replace(choice, devices=(replace(choice.devices[0], device=device),))
    args = EngineArgs(str(folder), backend="cpu")
    with pytest.raises(RequestError, match=r"--max-model-len: 8192 .*--max-model-len \d+ or less"):
        open_engine(args, choice=small)


def test_a_budget_that_the_device_does_not_have_is_refused(folder, choice):
    def opened(budget):
        device = replace(choice.devices[0].device, memory_bytes=40 << 20)
        small = replace(choice, devices=(replace(choice.devices[0], device=device),))
        args = EngineArgs(str(folder), backend="cpu", kv_cache_memory_bytes=budget)
        return open_engine(args, choice=small, tokens_each=64)

    with pytest.raises(
        RequestError, match=r"--kv-cache-memory-bytes: \d+ .works: at most"
    ) as error:
        opened(40 << 20)
    most = int(re.search(r"at most (\d+)", str(error.value))[1])
    with pytest.raises(RequestError):
        opened(most + 1)
    opened(most).close()


def declaring(choice, **changes):
    """The choice of a backend that declares other things."""
    found = choice.devices[0]
    capabilities = replace(found.capabilities, **changes)
    return replace(choice, devices=(replace(found, capabilities=capabilities),))


def test_a_flag_that_asks_for_fp8_is_never_served_with_anything_else(folder, choice):
    words = choice.capabilities.features - {"kv:fp8_ds_mla"}
    chip = declaring(choice, features=words, defaults={"kv": "bf16"})
    for flag in ("fp8", "fp8_e4m3"):
        with pytest.raises(Refused, match="kv:fp8_ds_mla: needed, and not declared"):
            open_engine(EngineArgs(str(folder), kv_cache_dtype=flag), choice=chip)


@pytest.mark.parametrize("name", ["max_topk", "max_heads"])
def test_a_model_beyond_a_declared_limit_is_refused(start, folder, choice, name):
    layers = start().deployment.model.layers
    topk = max(layer.indexer.topk for layer in layers if layer.indexer)
    size = {"max_topk": topk, "max_heads": max(layer.heads for layer in layers)}[name]
    args = EngineArgs(str(folder))
    open_engine(args, choice=declaring(choice, limits={name: size}), tokens_each=64).close()
    with pytest.raises(Refused, match=f"{name}: the model has {size} .* declares {size - 1} at mo"):
        open_engine(args, choice=declaring(choice, limits={name: size - 1}))


def test_a_private_layout_that_the_session_does_not_bring_is_refused(folder, choice, monkeypatch):
    words = choice.capabilities.features | {"kv:x-cpu/rows", "index:x-cpu/keys"}
    chip = declaring(choice, features=words, defaults={"kv": "x-cpu/rows", "index": "x-cpu/keys"})
    declared = chip.devices[0].capabilities
    monkeypatch.setattr(type(choice.backend), "capabilities", lambda self, device: declared)
    with pytest.raises(Refused) as refused:
        open_engine(EngineArgs(str(folder)), choice=chip)
    subjects = {refusal.subject for refusal in refused.value.refusals}
    assert subjects == {"cache layout x-cpu/rows", "cache layout x-cpu/keys"}


def test_the_whole_context_is_the_default_and_more_is_refused(start, folder, choice):
    with pytest.raises(RequestError, match="at most 8192, the model's longest context"):
        open_engine(EngineArgs(str(folder), max_model_len=8193), choice=choice)


def test_all_reasons_come_at_once_before_anything_is_allocated(folder, choice, monkeypatch):
    def never(*args):
        raise AssertionError("opened a session")

    monkeypatch.setattr(type(choice.backend), "open", never)
    args = EngineArgs(
        str(folder),
        block_size=61,
        pipeline_parallel_size=2,
        attention_config={"index_layout": "tiled16_f32"},
        kv_cache_dtype="fp8_ds_mla",
        quantization="fp8",
    )
    with pytest.raises(Refused) as refused:
        open_engine(args, choice=choice)
    subjects = {r.subject for r in refused.value.refusals}
    assert {"parallel:pp", "cache layout tiled16_f32"} <= subjects
    assert any(s.startswith("--pipeline-parallel-size") for s in subjects)
    assert any(s.startswith("--quantization") for s in subjects)
    assert "multiple of 16, got 61" in str(refused.value)


def test_an_index_layout_that_the_backend_lacks_is_refused_by_its_word(folder, choice):
    args = EngineArgs(str(folder), attention_config={"index_layout": "planar_ue8m0x4"})
    with pytest.raises(Refused, match="index:planar_ue8m0x4: needed, and not declared"):
        open_engine(args, choice=choice)


def test_the_report_says_who_serves_each_part_of_each_layer_kind(start):
    engine = start(kv_cache_dtype="fp8_ds_mla")
    report = json.loads(json.dumps(engine.report()))
    assert report["backend"]["name"] == "cpu"
    assert report["kv"]["layouts"] == {"latent": "fp8_ds_mla", "index": "planar_f32"}
    kinds = {layer.kind for layer in engine.deployment.model.layers}
    parts = report["parts"]
    for step in ("decode", "prefill"):
        for part in ("decoder_layer", "attention", "ffn"):
            served = {
                p["layer_kind"] for p in parts if p["part"] == part and p["step_kind"] == step
            }
            assert served == kinds
    ops = [p for p in parts if p["step_kind"] == "*"]
    assert len({p["part"] for p in ops}) == len(ops) >= 23
    assert {p["provider"] for p in ops} == {"cpu"}


def test_allocated_bytes_equal_the_plan(start):
    engine = start(kv_cache_dtype="fp8_ds_mla", tokens_each=130)
    spec = engine.deployment.model
    caches = [*engine.runner.kv.latent.values(), *engine.runner.kv.index_keys.values()]
    assert sum(cache.nbytes for cache in caches) == engine.kv_plan.nbytes
    assert engine.kv_plan.bytes_per_token == 656 * len(spec.kv_owners) + 132 * len(
        spec.index_owners
    )
    assert engine.kv_plan.tokens == 192
