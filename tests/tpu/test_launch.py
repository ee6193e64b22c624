"""The published launch on a slice of v7x, one of its four hosts, where there is no TPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ml4core.cli import main
from ml4core.engine.args import EngineArgs
from ml4core.models.seeded import make_seeded
from ml4core.planning.launch import Launch, judge
from ml4core_tpu.commands import app
from ml4core_tpu.driver import find_chips

ARGS = EngineArgs(
    "mistralai/Mistral-Large-4-1T-A52B",
    backend="tpu",
    tensor_parallel_size=8,
    data_parallel_size=4,
    data_parallel_size_local=1,
    data_parallel_address="10.0.0.1",
    data_parallel_rpc_port=29696,
    enable_expert_parallel=True,
    enable_ep_weight_filter=True,
    dtype="bfloat16",
    kv_cache_dtype="fp8_e4m3",
)
MISSING = {"chip", "device"}
"""Subjects of what isn't on this machine, whatever is installed."""


def own(launch: Launch) -> set[str]:
    return {refusal.subject for refusal in launch.refusals if refusal.source == "tpu"}


@pytest.mark.skipif(bool(find_chips()[0]), reason="there is a TPU")
@pytest.mark.parametrize("host", range(4))
def test_nothing_is_missing_but_the_hardware(host: int) -> None:
    """Its layouts, widths and pages serve the published model at its whole context."""
    launch = judge(replace(ARGS, data_parallel_start_rank=host), {})
    assert "chip" in own(launch)
    assert own(launch) <= MISSING
    assert launch.deployment is not None
    assert launch.deployment.max_model_len == 1 << 20
    assert not {one.subject for one in launch.refusals if one.source != "tpu"}


def test_a_dry_run_tells_memory_and_programs_of_a_device() -> None:
    launch = judge(replace(ARGS, data_parallel_start_rank=0), {})
    assert launch.plan is not None
    assert launch.plan.options.memory == int(94.75 * 2**30)
    assert launch.plan.fits, launch.plan.shortfall
    assert "graphs" not in launch.plan.reserve.terms, "programs are compiled, and none captured"
    assert launch.programs is not None
    # The last holds a chunk of a prompt of one host beside the decodes of another.
    assert list(launch.programs["tokens"])[:10] == [16 << power for power in range(10)]
    assert len(launch.programs["tokens"]) == 11
    assert list(launch.programs["page_table"]) == [128, 1024]


@pytest.mark.parametrize("whole", [True, False])
def test_a_cut_through_blocks_is_told_before_a_launch(tmp_path: Path, whole: bool) -> None:
    """By the tensor ranks that the one session of a host drives, and with what would work."""
    folder = make_seeded(
        tmp_path / "odd", format="fp8_block", layers=2, hidden=128, heads=4, nope_dim=64, v_dim=120,
        nope_every=None, topk=16, index_heads=2, dense_width=512, experts=8, experts_per_token=2,
        expert_width=512, vocab=512, yarn_original=64,
    )  # fmt: skip
    asked = EngineArgs(
        str(folder), backend="tpu", enable_expert_parallel=whole,
        additional_config={"device": "interpreted"},
    )  # fmt: skip
    assert not judge(asked, {}).refusals
    (refusal,) = judge(replace(asked, tensor_parallel_size=2), {}).refusals
    assert refusal.subject == "--tensor-parallel-size"
    assert "2 cuts the 480 columns of wo to 240, and fp8_block has a scale for 128" in str(refusal)
    assert "works: 1" in str(refusal)


def call(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["buckets", *words])
    return found.exit_code, found.output


def test_sizes_of_each_device_are_printed() -> None:
    code, text = call()
    assert code == 0, text
    assert "token buckets    16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192\n" in text
    assert "request buckets  8, 16, 32, 64, 128\n" in text
    assert "page tables      128 x 1024 pages of 1024 tokens\n" in text
    assert "640 a token and owner of latents, 132 a token and indexer" in text


def test_page_tables_that_are_too_large_are_refused() -> None:
    code, text = call("--block-size", "512", "--max-num-seqs", "256")
    assert code == 1
    assert "REFUSED" in text
    assert "--block-size 2048" in text


def test_tiles_are_planned_at_their_bytes() -> None:
    """Rows of 640 bytes on every layer that owns latents, keys of 132 on owners of an index."""
    launch = judge(replace(ARGS, data_parallel_start_rank=0), {})
    assert launch.plan is not None
    spec = launch.plan.model.spec
    want = {"latent": 640 * len(spec.kv_owners), "index": 132 * len(spec.index_owners)}
    assert {group.name: group.bytes_per_token for group in launch.plan.groups} == want
    assert launch.plan.ranks.ep == 32


def test_pages_that_fill_no_lanes_are_refused() -> None:
    """And the size that would do is one that a session takes, however short requests are."""
    code, text = call("--block-size", "48", "--max-model-len", "4096")
    assert code == 1
    assert "REFUSED          pages don't fill the 128 lanes; --block-size 128" in text
    assert call("--block-size", "128", "--max-model-len", "4096")[0] == 0


@pytest.mark.parametrize(
    "flag", ["--block-size", "--max-num-seqs", "--max-num-batched-tokens", "--max-model-len"]
)
def test_sizes_of_nothing_are_a_wrong_command_line(flag: str) -> None:
    """In place of a default that nobody asked for."""
    assert call(flag, "0")[0] == 2


def test_the_one_latent_head_is_whole_on_each_tensor_rank() -> None:
    """B130: neither rows nor pages are cut, so each holds the tokens of one that is alone."""
    tokens = set()
    for tensor in (1, 2, 4, 8):
        asked = replace(ARGS, tensor_parallel_size=tensor, kv_cache_memory_bytes=48 << 30)
        launch = judge(asked, {})
        assert launch.plan is not None
        assert launch.plan.pools is not None
        tokens.add(launch.plan.pools.tokens)
        assert own(launch) <= MISSING
    (only,) = tokens
    assert only > 1 << 20


@pytest.mark.parametrize("axis", ["decode", "prefill"])
def test_ranks_that_would_cut_a_context_are_refused(axis: str) -> None:
    """B130: those alone cut pages, and a session here has none of them."""
    flags: dict[str, Any] = {f"{axis}_context_parallel_size": 2}
    launch = judge(replace(ARGS, tensor_parallel_size=2, **flags), {})
    said = {refusal.subject: refusal for refusal in launch.refusals}
    word = f"parallel:{axis[0]}cp"
    assert f"--{axis}-context-parallel-size" in said
    assert "parallel:tp" in said[word].reason, said


def test_a_plan_counts_the_caches_of_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    launch = judge(replace(ARGS, data_parallel_start_rank=0), {})
    assert launch.plan is not None
    flags = "--backend tpu -tp 8 -dp 4 --enable-expert-parallel --kv-cache-dtype fp8_e4m3 --json"
    assert main(["plan", *flags.split()]) == 0
    facts = json.loads(capsys.readouterr().out)
    found = [(one["group"], one["layout"], one["bytes_per_token"]) for one in facts["kv"]["groups"]]
    want = [(one.name, one.layout.id, one.bytes_per_token) for one in launch.plan.groups]
    assert found == want
    assert facts["weights"]["rank"] == launch.plan.weight_bytes
    assert facts["limits"]["max_num_seqs"] == launch.plan.max_num_seqs
