"""The announced launches on AMD GPUs, judged on a machine that has none: they parse, they plan, and
what is missing is the hardware, and nothing else.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ml4core import registry
from ml4core.api import Refused
from ml4core.engine.args import FLAGS, EngineArgs
from ml4core.planning.launch import Launch, judge

MODEL = "mistralai/Mistral-Large-4-1T-A52B"
DRAFT = """--speculative-config '{"method": "dspark", "num_speculative_tokens": 3}'"""
TOOLS = "--tool-call-parser mistral --enable-auto-tool-choice --reasoning-parser mistral"
VARIABLES = {
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_FP8_MOE_REQUANT": "mxfp4",
    "VLLM_FP8_MOE_REQUANT_ACT": "a8w4",
    "VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA": "1",
    "AITER_CUSTOM_AR_MAX_SIZE": "134217728",
}
A4W4 = VARIABLES | {"VLLM_FP8_MOE_REQUANT_ACT": "a4w4"}
EIGHT = f"{MODEL} --backend rocm --tensor-parallel-size 8 {DRAFT}"
LATENCY = """--additional-config '{"decode_backend": "latency_specialized"}' --max-num-seqs 64"""
FOUR = f"{MODEL} --backend rocm --tensor-parallel-size 4 {DRAFT} {LATENCY}"
KERNEL = "latency_specialized, kernel"

Judge = Callable[..., Launch]


@pytest.fixture(scope="module")
def hardware() -> Refused:
    """What keeps this machine from serving on an AMD GPU; no other words are used of it."""
    try:
        registry.select("rocm", timeout=240)
    except Refused as refused:
        return refused
    pytest.skip("this machine has an AMD GPU")


@pytest.fixture
def judged(
    hardware: Refused, monkeypatch: pytest.MonkeyPatch, parse: Callable[[str], EngineArgs]
) -> Judge:
    """Judges a line as the shell would have it. The probe, which takes seconds, ran once."""

    def select(name: str, **more: Any) -> Any:
        raise hardware

    monkeypatch.setattr(registry, "select", select)

    def run(line: str, variables: dict[str, str]) -> Launch:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return judge(parse(line))

    return run


@pytest.fixture
def parse() -> Callable[[str], EngineArgs]:
    """By the one table of flags, as every command does."""

    def from_line(line: str) -> EngineArgs:
        model, *words = shlex.split(line)
        names = {flag.name: field for field, flag in FLAGS.items()}
        given: dict[str, Any] = {}
        while words:
            field = names[words.pop(0)]
            given[field] = True if FLAGS[field].kind is bool else words.pop(0)
        return EngineArgs.parse(model, given)

    return from_line


def lacking(launch: Launch, hardware: Refused) -> dict[str, str]:
    """Reasons beside the hardware's, by subject, but for flags that core has yet to serve on any
    device.
    """
    later = {flag.name for flag in FLAGS.values() if flag.part and not flag.works}
    assert set(hardware.refusals) <= set(launch.refusals)
    return {
        one.subject: one.reason
        for one in launch.refusals
        if one not in hardware.refusals and one.subject.partition(" ")[0] not in later
    }


def test_the_hardware_is_named_and_nothing_else_is(hardware: Refused) -> None:
    subjects = {refusal.subject for refusal in hardware.refusals}
    assert {"driver", "GPU"} <= subjects
    assert subjects <= {"driver", "GPU", "torch", "triton", "device"}
    assert {refusal.source for refusal in hardware.refusals} == {"rocm"}


@pytest.mark.parametrize(
    ("line", "variables", "layout", "row"),
    [
        (EIGHT, VARIABLES, "e4m3", 42_096),
        (f"{EIGHT} --kv-cache-dtype fp8", VARIABLES, "e4m3", 42_096),
        (f"{EIGHT} --kv-cache-dtype bfloat16", VARIABLES, "bf16", 78_384),
        (EIGHT, {}, "e4m3", 42_096),
        (f"{EIGHT} --kv-cache-dtype bfloat16", A4W4, "bf16", 78_384),
    ],
)
def test_tp_8(
    judged: Judge, hardware: Refused, line: str, variables: dict[str, str], layout: str, row: int
) -> None:
    launch = judged(line, variables)
    assert set(launch.refusals) == set(hardware.refusals)
    assert launch.deployment is not None
    assert launch.plan is not None
    assert launch.choice is None
    assert launch.deployment.kv_layout == launch.plan.layout == layout
    assert launch.plan.row_bytes[layout] == row
    converted = bool(variables)
    assert ("mxfp4" in launch.deployment.weight_formats) == converted
    gib = launch.plan.weight_bytes / 2**30
    assert gib == pytest.approx(69 if converted else 125, rel=0.03)  # the drafter included
    with pytest.raises(Refused, match=r"^--backend rocm is refused for "):
        launch.check()


def test_the_specialised_decode_lacks_its_kernel_beside_the_hardware(
    judged: Judge, hardware: Refused
) -> None:
    for line in (FOUR, f"{FOUR} --kv-cache-dtype bfloat16"):
        launch = judged(line, A4W4)
        assert lacking(launch, hardware) == {KERNEL: "no gfx950 kernel in this version"}
        assert len(launch.refusals) == len(hardware.refusals) + 1
        assert launch.plan is not None


WORD = "latency_specialized, "
GUARDS: dict[str, tuple[str, dict[str, str], set[str]]] = {
    "tp": (
        FOUR.replace("--tensor-parallel-size 4", "--tensor-parallel-size 8"),
        A4W4,
        {"--tensor-parallel-size"},
    ),
    "experts": (FOUR, VARIABLES, {"VLLM_FP8_MOE_REQUANT_ACT"}),
    "experts in fp8": (FOUR, {}, {"VLLM_FP8_MOE_REQUANT_ACT"}),
    "pages": (f"{FOUR} --block-size 128", A4W4, {"--block-size"}),
    "index": (
        f"""{FOUR} --attention-config '{{"index_layout": "planar_f32"}}'""",
        A4W4,
        {"--attention-config index_layout"},
    ),
    "ep": (f"{FOUR} --enable-expert-parallel", A4W4, {"--enable-expert-parallel"}),
    "dcp": (
        f"{FOUR} --decode-context-parallel-size 4",
        A4W4 | {"VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA": "0"},
        {"--decode-context-parallel-size"},
    ),
    "pcp": (
        f"{FOUR} --prefill-context-parallel-size 2",
        A4W4 | {"VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA": "0"},
        {"--prefill-context-parallel-size"},
    ),
    "cache": (
        f"{FOUR} --kv-cache-dtype fp8_ds_mla",
        A4W4 | {"VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA": "0"},
        {"--kv-cache-dtype"},
    ),
    "drafts": (
        FOUR.replace('"num_speculative_tokens": 3', '"num_speculative_tokens": 8'),
        A4W4,
        {"--speculative-config num_speculative_tokens"},
    ),
    "pp": (f"{FOUR} --pipeline-parallel-size 2", A4W4, {"--pipeline-parallel-size"}),
    "dp": (f"{FOUR} --data-parallel-size 2", A4W4, {"--data-parallel-size"}),
    "nodes": (
        f"{FOUR} --nnodes 2 --distributed-executor-backend mp",
        A4W4,
        {"--nnodes"},
    ),
    "transfer": (
        f"""{FOUR} --kv-transfer-config '{{"kv_connector": "NixlConnector"}}'""",
        A4W4,
        {"--kv-transfer-config"},
    ),
    "offload": (
        f"""{FOUR} --kv-transfer-config '{{"kv_connector": "HiSparseConnector"}}'""",
        A4W4,
        {"--kv-transfer-config"},
    ),
    "dtype": (
        f"{FOUR} --dtype float32",
        A4W4 | {"VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA": "0"},
        {"--dtype"},
    ),
}


def guards(found: dict[str, str]) -> set[str]:
    return {subject.removeprefix(WORD) for subject in found if subject.startswith(WORD)}


@pytest.mark.parametrize("name", GUARDS)
def test_each_broken_guard_is_named(judged: Judge, hardware: Refused, name: str) -> None:
    line, variables, wanted = GUARDS[name]
    assert guards(lacking(judged(line, variables), hardware)) == wanted | {"kernel"}


def test_all_broken_guards_are_named_at_once(judged: Judge, hardware: Refused) -> None:
    line = FOUR.replace("--tensor-parallel-size 4", "--tensor-parallel-size 8")
    line = line.replace('"num_speculative_tokens": 3', '"num_speculative_tokens": 8')
    line += " --block-size 128 --enable-expert-parallel --pipeline-parallel-size 2"
    line += " --data-parallel-size 2 --decode-context-parallel-size 2 --nnodes 2 --dtype float32"
    line += " --prefill-context-parallel-size 2 --kv-cache-dtype fp8_ds_mla"
    line += """ --distributed-executor-backend mp --kv-transfer-config '{"kv_connector": "Nixl"}'"""
    line += """ --attention-config '{"index_layout": "planar_f32"}'"""
    found = guards(lacking(judged(line, {}), hardware))
    wanted = set().union(*(subjects for _, _, subjects in GUARDS.values()))
    assert found == wanted | {"kernel"}


def test_the_command_refuses_with_what_was_judged(judged: Judge, hardware: Refused) -> None:
    """``ml4 serve --dry-run``, in a process of its own; nothing of it touches a network."""
    launch = judged(FOUR, A4W4)
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "ml4core", "serve", *shlex.split(f"{FOUR} {TOOLS} --dry-run")],
        env=os.environ | A4W4 | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert [one["reason"] for one in report["refusals"]] == [r.reason for r in launch.refusals]
    assert launch.plan is not None
    assert report["plan"]["weights"]["rank"] == launch.plan.weight_bytes
    told = [line[4:] for line in done.stderr.splitlines() if line.startswith("  - ")]
    assert told == [str(refusal) for refusal in launch.refusals]
