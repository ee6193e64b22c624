"""The command line is an interface: what it holds is written down here, and changes on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from ml4core.cli.app import build_app
from ml4core.engine.args import FLAGS

COMMANDS = [
    "backends",
    "bench",
    "checkpoint",
    "doctor",
    "eval",
    "generate",
    "inspect",
    "plan",
    "quantize",
    "serve",
]

ENGINE_FLAGS = """
--additional-config --async-scheduling --attention-backend --attention-config --backend --block-size
--compilation-config --cp-kv-cache-interleave-size --cudagraph-capture-sizes --data-parallel-address
--data-parallel-rpc-port --data-parallel-size --data-parallel-size-local --data-parallel-start-rank
--dcp-comm-backend --dcp-q-replicate --decode-context-parallel-size --distributed-executor-backend
--download-dir --dtype --enable-auto-tool-choice --enable-ep-weight-filter --enable-expert-parallel
--enable-prefix-caching --enforce-eager --gpu-memory-utilization --headless --kv-cache-dtype
--kv-cache-memory-bytes --kv-transfer-config --limit-mm-per-prompt --load-format --master-addr
--master-port --max-model-len --max-num-batched-tokens --max-num-seqs --nnodes
--no-async-scheduling --no-dcp-q-replicate --no-enable-auto-tool-choice
--no-enable-ep-weight-filter --no-enable-expert-parallel --no-enable-prefix-caching
--no-enforce-eager --no-headless --node-rank --num-gpu-blocks-override --pipeline-parallel-size
--prefill-context-parallel-size --quantization --reasoning-parser --revision --scheduling-policy
--seed --served-model-name --speculative-config --step-timeout-s --tensor-parallel-size --tokenizer
--tokenizer-mode --tool-call-parser -dcp -dp -ep -n -pcp -pp -r -tp
"""

OPTIONS = {
    "": "--version",
    "backends": "--json",
    "doctor": "--json",
    "inspect": "--json",
    "bench": "",
    "bench step": """--batch-size --compare --context --input-len --json --output-len --part
        --repeats --requests --threads """
    + ENGINE_FLAGS,
    "bench ops": "--backend --device --json --op --plot --repeats --size --threads",
    "bench requant": "--json --repeats --rule --threads",
    "bench serve": """--api-key --backend --base-url --burstiness --dataset-name --dataset-path
        --devices --endpoint --goodput --host --ignore-eos --json --max-concurrency
        --metric-percentiles --model --no-stream --num-prompts --num-warmups --output-len
        --percentile-metrics --plot --port --random-input-len --random-output-len
        --random-prefix-len --request-rate --result-dir --save-result --seed --temperature
        --think-time-s""",
    "checkpoint": "",
    "quantize": """--all --experts-only --include-drafter --include-output
        --max-shard-bytes --mxfp4-rule --nvfp4-form --rest --to""",
    "checkpoint make": "--format --if-missing --overwrite --seed",
    "generate": """--chat --raw --json --json-schema --prompt --prompt-file --prompts --report
        --stream --no-stream
        --frequency-penalty --ignore-eos --logprobs --max-tokens --min-p --min-tokens --n
        --presence-penalty --repetition-penalty --stop --stop-token-ids --temperature --top-k
        --top-p """
    + ENGINE_FLAGS,
    "serve": """--allowed-local-media-path --allowed-media-domains --api-key --body-timeout-s
        --dry-run --h11-max-incomplete-event-size --header-timeout-s
        --host --limit-concurrency --log-format --max-logprobs --max-queue
        --max-request-bytes --no-dry-run --no-vllm-metrics --null-step-ms --otlp-traces-endpoint
        --port --ready-timeout-s --shutdown-grace-s --slow-reader-timeout-s --ssl-certfile
        --ssl-keyfile --timeout-keep-alive --vllm-metrics """
    + ENGINE_FLAGS,
    "eval": "--full --json --length --limit --plot --text --weights " + ENGINE_FLAGS,
    "plan": """--context --device --held --json --memory --reserve --weights """ + ENGINE_FLAGS,
}


def command(words: str) -> Any:
    found: Any = typer.main.get_command(build_app())
    for word in words.split():
        found = found.commands[word]
    return found


def test_commands() -> None:
    assert sorted(command("").commands) == COMMANDS


@pytest.mark.parametrize("words", OPTIONS)
def test_options(words: str) -> None:
    options = [p for p in command(words).params if p.param_type_name == "option"]
    names = sorted(name for option in options for name in (*option.opts, *option.secondary_opts))
    assert names == sorted(OPTIONS[words].split())


def test_help_shows_every_flag_in_its_panel(ml4: Any) -> None:
    done = ml4("generate", "--help")
    assert (done.code, done.err) == (0, "")
    sections = dict.fromkeys(("Model", "Memory", "Parallel", "Features"), "")
    title = ""
    for line in done.out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line[:-1]
        elif title in sections:
            sections[title] += line + "\n"
    for flag in FLAGS.values():
        assert flag.name in sections[flag.panel].split(), flag.name
        assert all(choice in sections[flag.panel] for choice in flag.choices)
    assert "-tp, --tensor-parallel-size INTEGER" in sections["Parallel"]
    assert "--enforce-eager / --no-enforce-eager" in sections["Features"]


def test_help_says_what_has_not_landed(ml4: Any) -> None:
    words = ml4("generate", "--help").out.split()
    pages = " ".join(words).split(" --")
    (transfer,) = [page for page in pages if page.startswith("kv-transfer-config JSON")]
    (block,) = [page for page in pages if page.startswith("block-size INTEGER")]
    assert transfer.rstrip(".").endswith("has not landed")
    assert "has not landed" not in block


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["-h"], ["checkpoint", "--help"]])
def test_words_for_people_go_to_stdout(ml4: Any, words: list[str]) -> None:
    done = ml4(*words)
    assert (done.code, done.err) == (0, "")
    assert done.out.strip()


def test_a_group_without_a_command_shows_its_help(ml4: Any) -> None:
    done = ml4("checkpoint")
    assert (done.code, done.err) == (2, "")
    assert "make" in done.out


def test_no_command_is_a_usage_error_that_shows_the_commands(ml4: Any) -> None:
    done = ml4()
    assert done.code == 2
    assert all(name in done.out for name in COMMANDS)
