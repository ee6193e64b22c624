"""The command line in each form that vLLM takes, and its faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ml4core.cli.exits import UsageError
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError

Parse = Callable[..., EngineArgs]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("-tp 8", {"tensor_parallel_size": 8}),
        ("-tp=8", {"tensor_parallel_size": 8}),
        ("-pp 2 -dp 3", {"pipeline_parallel_size": 2, "data_parallel_size": 3}),
        ("-tp 4 -dcp 4", {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}),
        ("-pcp 2", {"prefill_context_parallel_size": 2}),
        (
            "-tp 2 -n 2 -r 1 --headless",
            {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 1, "headless": True},
        ),
        ("--tensor_parallel_size 8", {"tensor_parallel_size": 8}),
        ("--tensor_parallel_size=8", {"tensor_parallel_size": 8}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no_enable_prefix_caching", {"enable_prefix_caching": False}),
        ("--enforce-eager --no-enforce-eager", {"enforce_eager": False}),
        ("--no-async-scheduling", {"async_scheduling": False}),
        ("--max-model-len 8k", {"max_model_len": 8000}),
        ("--max-model-len 8K", {"max_model_len": 8192}),
        ("--max-model-len 25.6k", {"max_model_len": 25600}),
        ("--kv-cache-memory-bytes 2G", {"kv_cache_memory_bytes": 2 * 2**30}),
        ("--kv-cache-memory-bytes 1t", {"kv_cache_memory_bytes": 10**12}),
        ("--gpu-memory-utilization 1", {"gpu_memory_utilization": 1.0}),
        ("--gpu-memory-utilization .5", {"gpu_memory_utilization": 0.5}),
        ("--seed 7 --seed 8", {"seed": 8}),
        ("--cudagraph-capture-sizes 1 2 4", {"cudagraph_capture_sizes": (1, 2, 4)}),
        ("--cudagraph-capture-sizes 1,2 --seed 3", {"cudagraph_capture_sizes": (1, 2), "seed": 3}),
        ("--served-model-name a b", {"served_model_name": ("a", "b")}),
        (
            "--speculative-config.method dspark --speculative-config.num_speculative_tokens 3",
            {"speculative_config": {"method": "dspark", "num_speculative_tokens": 3}},
        ),
        ("--speculative_config.method=dspark", {"speculative_config": {"method": "dspark"}}),
        (
            "--kv-transfer-config.extra.pool.gib 440 --kv-transfer-config.extra.on true",
            {"kv_transfer_config": {"extra": {"pool": {"gib": 440}, "on": True}}},
        ),
        ("--compilation-config.x -1", {"compilation_config": {"x": -1}}),
        ("--compilation-config.x=a=b", {"compilation_config": {"x": "a=b"}}),
        ("--compilation-config.x=", {"compilation_config": {"x": ""}}),
        ('--limit-mm-per-prompt {"image":2}', {"limit_mm_per_prompt": {"image": 2}}),
        (
            '--speculative-config {"method":"dspark"} --speculative-config.n 3',
            {"speculative_config": {"method": "dspark", "n": 3}},
        ),
    ],
)
def test_forms(parse: Parse, words: str, values: dict[str, Any]) -> None:
    assert parse("m", *words.split()) == EngineArgs("m", **values)


def test_the_model_may_stand_anywhere(parse: Parse) -> None:
    assert parse("--seed", "1", "m") == EngineArgs("m", seed=1)
    assert parse("--cudagraph-capture-sizes", "1", "2", "m").model == "m"
    assert parse("--seed", "1", "--", "-m").model == "-m"


def test_values_are_never_taken_for_flags(parse: Parse) -> None:
    args = parse("m", "--revision", "--speculative-config.method", "--tokenizer", "--seed")
    assert (args.revision, args.tokenizer) == ("--speculative-config.method", "--seed")
    assert parse("m", "--revision", "tensor_parallel_size").revision == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "x"], "--seed: 'x' is not a whole number"),
        (["--seed", "1k"], "--seed: '1k' is not a whole number"),
        (["--seed", "1.0"], "--seed: '1.0' is not a whole number"),
        (["--seed", ""], "--seed: '' is not a whole number"),
        (["--seed", "٣"], "--seed: '٣' is not a whole number"),
        (["--seed", "9" * 40], f"--seed: '{'9' * 40}' is not a whole number"),
        (["--max-model-len", "8KB"], "--max-model-len: '8KB' is not a whole number, with k"),
        (["--max-model-len", "-1"], "--max-model-len: -1 is out of range; works: 1 or above"),
        (["--max-model-len", "1.5K"], "--max-model-len: '1.5K' is not a whole number"),
        (["--gpu-memory-utilization", "a"], "--gpu-memory-utilization: 'a' is not a number"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization: nan is out of range"),
        (["--kv-cache-dtype", "FP8"], "--kv-cache-dtype: 'FP8' is none of auto, bfloat16"),
        (["--cudagraph-capture-sizes", "0"], "--cudagraph-capture-sizes: 0 is out of range"),
        (["--speculative-config", "[1]"], "--speculative-config: '[1]' is not a JSON object"),
        (["--speculative-config", "{"], "--speculative-config: '{': not JSON"),
        (["--speculative-config", ""], "--speculative-config: '': not JSON"),
        (["--speculative-config", '{"a": NaN}'], "numbers must be finite"),
        (["--speculative-config", '{"a": 1, "a": 2}'], "key 'a' appears twice"),
        (["--speculative-config.a", '{"b": 1, "b": 2}'], "key 'b' appears twice"),
        (["--speculative-config.a", "{b}"], "'{b}': not JSON"),
        (
            ["--speculative-config", '{"a": 1}', "--speculative-config.a", "1"],
            "--speculative-config: key 'a' is given twice",
        ),
        (
            ["--speculative-config.a.b", "1", "--speculative-config.a.b", "1"],
            "--speculative-config: key 'a.b' is given twice",
        ),
        (
            ["--speculative-config.a", "1", "--speculative-config.a.b", "1"],
            "--speculative-config: key 'a' is given twice",
        ),
        (["--speculative-config..a", "1"], "is not of the form .key=value"),
        (["--speculative-config.", "1"], "is not of the form .key=value"),
    ],
)
def test_faults_name_flag_and_value(parse: Parse, words: list[str], message: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        parse("m", *words)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_texts_and_relations_are_listed_together(parse: Parse) -> None:
    with pytest.raises(ArgumentsError) as caught:
        parse("m", "-tp", "x", "-n", "0", "--node-rank", "1", "--speculative-config", "1")
    assert [p.split(":")[0] for p in caught.value.problems] == [
        "--tensor-parallel-size",
        "--speculative-config",
        "--nnodes",
    ]


def test_a_dotted_flag_needs_a_value(parse: Parse) -> None:
    with pytest.raises(UsageError, match=r"--speculative-config\.a needs a value"):
        parse("m", "--speculative-config.a")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tensor-paralel-size", "8"], "did you mean --tensor-parallel-size?"),
        (["--kv-cache-type", "fp8"], "did you mean --kv-cache-dtype?"),
        (["--top-kk", "5"], "did you mean --top-k?"),
        (["--bottom-p", "0.5"], "No such option: --bottom-p"),
        (["--top-k", "5.5"], "--top-k"),
        (["--seed.x", "5"], "No such option: --seed.x"),
        (["-tp8"], "No such option"),
        (["--enforce-eager=1"], "does not take a value"),
        (["--seed"], "requires an argument"),
        (["other"], "other"),
    ],
)
def test_unknown_words_end_with_2(ml4: Any, words: list[str], told: str) -> None:
    done = ml4("generate", "m", "--prompt", "p", *words)
    assert (done.code, done.out) == (2, "")
    assert told in done.err
