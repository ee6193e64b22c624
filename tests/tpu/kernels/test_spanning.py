"""An engine whose layers run on a mesh of virtual devices, beside the cpu backend on one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
from ml4core.models.seeded import make_seeded
from ml4core.registry import select
from support.answers import Answers

TESTS = Path(__file__).parents[2]
CHILD = TESTS / "tpu" / "spanning_child.py"
PROMPTS = [list(range(300, 330)), list(range(7, 16)), [11] * 15]
TOKENS = 5
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
}
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(TESTS),
    # Programs run for a second, and would be compiled for ten.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}
MARGIN = 2e-4
"""Of log probabilities: sums over ranks have another order than those of one device."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three kinds of layers: dense, with experts, and with another's selection."""
    return made(tmp_path_factory.mktemp("seeded") / "plain", "bf16")


def made(folder: Path, format: Any, v_dim: int = 128) -> Path:
    return make_seeded(
        folder,
        format=format,
        layers=3,
        hidden=128,
        heads=4,
        nope_dim=64,
        v_dim=v_dim,
        nope_every=None,
        topk=16,
        index_heads=2,
        dense_width=512,
        experts=8,
        experts_per_token=2,
        expert_width=512,
        vocab=512,
        yarn_original=64,
    )


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[dict[str, list[Any]]]:
    return alone(folder)


def alone(folder: Path, **flags: Any) -> list[dict[str, list[Any]]]:
    """What the cpu backend makes of each prompt."""
    args = EngineArgs(str(folder), backend="cpu", **FLAGS, **flags)
    engine = open_engine(args, choice=select("cpu"), sequences=3, tokens_each=64)
    try:
        return Answers(engine, PROMPTS, TOKENS).all()
    finally:
        engine.close()


def run(folder: Path, replicas: list[list[list[int]]], **flags: Any) -> list[dict[str, Any]]:
    """What each replica makes of its prompts, on virtual devices of a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    several: dict[str, Any] = {}
    if len(replicas) > 1:
        several = {"data_parallel_size": len(replicas), "data_parallel_rpc_port": port}
    children = []
    for rank, prompts in enumerate(replicas):
        own = {"data_parallel_start_rank": rank, "data_parallel_size_local": 1} if several else {}
        asked = {"model": str(folder)} | FLAGS | flags | several | own
        words = json.dumps({"flags": asked, "prompts": prompts, "tokens": TOKENS})
        children.append(
            subprocess.Popen(
                [sys.executable, str(CHILD), words],
                env=os.environ | SETTINGS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [_answer(child) for child in children]
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
        for child in children:
            child.stdin = None  # else it is flushed once more
        ended = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            with child:  # waits, and closes its pipes
                child.kill()
    for child, (_, errors) in zip(children, ended, strict=True):
        assert child.returncode == 0, errors[-3000:]
    return said


def _answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What it says first; then it may end."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return pytest.fail(child.communicate()[1][-3000:])


def check(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The same tokens, about as likely."""
    for got, want in zip(found, wanted, strict=True):
        assert got["tokens"] == want["tokens"]
        assert got["logprobs"] == pytest.approx(want["logprobs"], abs=MARGIN)


HOST = {"device": "interpreted"}
RESIDENT = {"device": "interpreted", "tpu": {"resident": True, "warm_up": True}}
"""The session of TPUs, as it starts there."""


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("own", [HOST, RESIDENT], ids=["host", "resident"])
def test_tensor_ranks_with_experts_over_them(
    folder: Path, wanted: list[dict[str, Any]], own: dict[str, Any]
) -> None:
    """With one latent head, of which each rank has all: the text is that of one rank (B130)."""
    flags = {"tensor_parallel_size": 4, "enable_expert_parallel": True, "additional_config": own}
    (said,) = run(folder, [PROMPTS], **flags)
    check(said["made"], wanted)
    assert said["switches"]["mesh"].startswith("data 1 x tensor 4, whole experts over all")
    assert said["switches"]["programs"].startswith("3 of layers")
    assert said["switches"]["compiled_after_warm_up"] == "0"


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("own", [HOST, RESIDENT], ids=["host", "resident"])
def test_replicas_of_tensor_ranks_with_experts_over_all(
    folder: Path, wanted: list[dict[str, Any]], own: dict[str, Any]
) -> None:
    """Two processes over gloo, in core's lock step. The second has one prompt, which ends later
    than those of the first, and runs without company.
    """
    replicas = [PROMPTS[:2], PROMPTS[2:]]
    said = run(
        folder,
        replicas,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        additional_config=own,
    )
    check([one for each in said for one in each["made"]], wanted)
    for rank, one in enumerate(said):
        mesh = f"data 2 x tensor 2, whole experts over all; host {rank} of 2"
        assert one["switches"]["mesh"] == mesh
        # A warm-up makes those of a chunk beside another host's decodes, too.
        made = 3 if own is HOST else 6
        assert one["switches"]["programs"].startswith(f"{made} of layers")
        assert one["switches"]["compiled_after_warm_up"] == "0"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
@pytest.mark.parametrize("replicas", [1, 2])
def test_experts_of_four_bits_cut_by_width(tmp_path: Path, replicas: int) -> None:
    """Each rank has a part of each expert, packed on its own."""
    folder = made(tmp_path / "fp4", "nvfp4_ct")
    cut = [PROMPTS] if replicas == 1 else [PROMPTS[:1], PROMPTS[1:]]
    said = run(folder, cut, tensor_parallel_size=2 // replicas)
    check([one for each in said for one in each["made"]], alone(folder))
    assert "experts by width" in said[0]["switches"]["mesh"]


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_experts_become_mxfp4_while_they_are_loaded(tmp_path: Path) -> None:
    """Of a checkpoint in FP8: core converts them, and then they are packed for the kernel."""
    folder, asked = made(tmp_path / "fp8", "fp8_block"), {"fp8_moe_requant": "mxfp4"}
    flags = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    (said,) = run(folder, [PROMPTS], **flags, additional_config=RESIDENT | asked)
    check(said["made"], alone(folder, additional_config=asked))
    assert said["switches"]["fp8_moe_requant"] == "mxfp4"


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize("format", ["fp8_block", "nvfp4_ct", "mxfp4"])
def test_a_cut_through_blocks_is_refused(tmp_path: Path, format: str) -> None:
    """Of each format the matrices outside of experts are FP8 in blocks."""
    folder = made(tmp_path / "cut", format, v_dim=120)
    said = "wo: 480 columns over 2 tensor ranks are 240 each, not a multiple of 128"
    with pytest.raises(pytest.fail.Exception, match=said) as caught:
        run(folder, [PROMPTS[:1]], tensor_parallel_size=2, enable_expert_parallel=True)
    assert "(works: --tensor-parallel-size 1)" in str(caught.value)
