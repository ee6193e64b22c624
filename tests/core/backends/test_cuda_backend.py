"""The cuda backend on any machine: devices, refusals, what it declares, who serves a stage."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from ml4core.api import (
    OPS,
    STAGES,
    Accepted,
    Deployment,
    Device,
    IndexerSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    Refused,
    Rejected,
    Segment,
    SSMaxSpec,
    StepShape,
)
from ml4core.engine.args import EngineArgs
from ml4core.planning.launch import judge
from ml4core.registry import PluginRecord, load_plugin, probe, select
from ml4core_cuda import aot, attn_stage, latency, libraries, stages
from ml4core_cuda.backend import CudaBackend
from ml4core_cuda.capabilities import capabilities
from ml4core_cuda.driver import Gpu
from ml4core_cuda.ops import OWN

INTERPRETED = Device("interpreted", "the interpreter", "sm_90", "cpu")
H200 = Device("real", "NVIDIA H200", "sm_90", "cuda:0", memory_bytes=140 << 30)
MODEL = ModelSpec("none", 8, 128, 1e-6, 128, False, ())
LAYER = LayerSpec(
    index=1,
    hidden_size=128,
    heads=8,
    kv_lora_rank=512,
    q_lora_rank=None,
    nope_dim=64,
    rope_dim=64,
    v_dim=128,
    norm_eps=1e-6,
    softmax_scale=0.1,
    rope=None,
    ssmax=SSMaxSpec(),
    kv_source=1,
    topk_source=1,
    indexer=IndexerSpec(32, 128, 2048, 64),
    dense_width=256,
    moe=None,
)
NONE = Segment(0, 0, 0)
DECODE = StepShape(Segment(4, 4, 1), NONE, NONE, (("latent", 8), ("index", 8)), 4)


def deployment(device: Device = INTERPRETED, **more: Any) -> Deployment:
    fields: dict[str, Any] = {"kv_layout": "fp8_ds_mla", "index_layout": "planar_f32"}
    return Deployment(MODEL, device, **(fields | {"dtype": "bfloat16"} | more))


def gpus(monkeypatch: pytest.MonkeyPatch, *found: Gpu) -> None:
    backend = sys.modules[CudaBackend.__module__]
    monkeypatch.setattr(backend, "find_gpus", lambda: (found, ()))
    monkeypatch.setattr(backend, "find_torch", lambda: ("torch 2.13", ()))
    monkeypatch.setattr(backend, "find_triton", lambda: ("triton 3.6", ()))


def test_a_machine_without_gpu_has_the_interpreter(cuda: PluginRecord) -> None:
    answer = probe(cuda, timeout=120)
    if answer.devices and answer.devices[0].device.kind == "real":
        pytest.skip("this machine has a GPU")
    if not libraries.find_triton()[0]:
        pytest.skip("triton is not installed")
    ((found),) = answer.devices
    assert (found.device.kind, found.device.torch_device) == ("interpreted", "cpu")
    assert {refusal.source for refusal in answer.refusals} == {"cuda"}
    assert "driver" in {refusal.subject for refusal in answer.refusals}


def test_each_gpu_is_a_device_and_others_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(
        monkeypatch,
        Gpu(0, "NVIDIA H200", "sm_90", 140 << 30),
        Gpu(1, "NVIDIA A100", "sm_80", 80 << 30),
        Gpu(2, "NVIDIA B200", "sm_100", 180 << 30),
    )
    answer = CudaBackend().probe()
    real = [device for device in answer.devices if device.kind == "real"]
    assert [(d.arch, d.torch_device, d.memory_bytes >> 30) for d in real] == [
        ("sm_90", "cuda:0", 140),
        ("sm_100", "cuda:2", 180),
    ]
    (refusal,) = answer.refusals
    assert refusal.subject == "GPU 1"
    assert "NVIDIA A100 (sm_80" in refusal.reason
    assert refusal.remedy == "a GPU of sm_100, sm_90"


def test_what_is_declared_goes_by_architecture_and_kind() -> None:
    h200, b200 = capabilities(H200), capabilities(replace(H200, arch="sm_100"))
    assert {f"op:{name}" for name in OWN} <= h200.features
    assert set(OWN) <= set(OPS)
    assert "feature:compose" in h200
    assert b200.features - h200.features == {"index:planar_ue8m0x4"}
    assert h200.features - capabilities(INTERPRETED).features == {
        "feature:graph_capture",
        "feature:async_scheduling",
    }
    assert capabilities(replace(H200, arch="sm_80")).features == frozenset()
    assert all(f"{key}:{h200.defaults[key]}" in h200 for key in ("kv", "index"))


def test_open_refuses_all_at_once_before_it_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)
    wanted = deployment(
        replace(H200, arch="sm_80"), needs=frozenset({"kv:nvfp4_ds_mla", "parallel:dcp"})
    )
    with pytest.raises(Refused) as refused:
        CudaBackend().open(wanted)
    assert [refusal.subject for refusal in refused.value.refusals] == [
        "device",
        "kv:nvfp4_ds_mla",
        "parallel:dcp",
    ]


def test_the_interpreter_needs_triton_unimported(cuda: PluginRecord) -> None:
    """A process that compiled kernels can't interpret them any more."""
    pytest.importorskip("triton")
    code = (
        "import triton\n"
        "from ml4core_triton.interpreter import interpreter_refusals\n"
        "(refusal,) = interpreter_refusals('cuda')\n"
        "print(refusal.remedy)"
    )
    assert python("-c", code).stdout.strip() == "TRITON_INTERPRET=1 in the environment"
    assert load_plugin(cuda).backend.name == "cuda"


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Another interpreter of Python, in which triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


AOT = "from ml4core_cuda.commands import app; app()"


def test_kernels_compile_without_a_gpu() -> None:
    pytest.importorskip("triton")
    done = python("-c", AOT, "aot", "-k", "^(to_slots|kv_write fp8)")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()[1:]
    assert last.startswith("4 kernels compiled; 0 faults:")
    for line in lines:
        *_, kernel, arch, warps, registers, shared, spilled = line.split()
        assert (kernel, arch) in {
            (name, of)
            for name in ("to_slots_kernel", "kv_write_kernel")
            for of in ("sm_90", "sm_100")
        }
        assert (int(warps) > 0, 8 < int(registers) < 256) == (True, True)
        assert (int(shared), int(spilled)) == (0, 0)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_whole_layers_launches_compile_and_none_spills(rows: int) -> None:
    pytest.importorskip("triton")
    which = f"^latency layer 8 heads, owner, {rows} rows"
    done = python("-c", AOT, "aot", "-k", which, "--arch", "sm_90")
    assert done.returncode == 0, done.stdout
    kernels = {line.split()[-6] for line in done.stdout.splitlines()[1:-1]}
    assert {"_project_kernel", "finish_kernel", "_values_kernel", "_logits_kernel"} <= kernels
    assert {"_row_kernel", "gated_kernel", "outer_kernel"} <= kernels
    assert "kernels compiled; 0 faults:" in done.stdout.splitlines()[-1]


def test_layers_do_not_need_a_gluon_that_is_not_known() -> None:
    """It is an experimental language: another triton may have none, or another one."""
    pytest.importorskip("triton")
    modules = "attn_output, ffn, latency_layer, moe_experts, sparse_mla"
    script = f"""if True:
        import sys
        sys.modules["triton.experimental"] = None
        from ml4core_cuda.kernels import {modules}, target
        target.GLUON = ()
        print(target.gluon())"""
    assert python("-c", script).stdout.strip() == "False"


ONE_EXPERT = """if True:
    import torch
    from ml4core.api import MoESpec
    from ml4core_cuda import aot
    from ml4core_cuda.kernels import fp4_experts, short_experts
    from ml4core_cuda.measure.work import Draw
    from ml4core_triton.aot import Case
    from ml4core_triton.kernels.weights import weight_args

    draw = Draw(0, torch.device("meta"))
    w13, w2 = (weight_args(draw.weight("fp8_block", 1, *s)) for s in ((512, 256), (256, 256)))
    fp4 = [
        [weight_args(draw.weight(format, 1, *s)) for s in ((1536, 768), (768, 768))]
        for format in ("nvfp4", "mxfp4")
    ]
    x, wide, share = draw.bf16(1, 256), draw.bf16(1, 768), draw.normal(1, 1)
    expert = torch.zeros(1, 1, dtype=torch.int64, device="meta")

    def call():
        for first in (0, 1):
            short_experts.launch(
                x, w13, w2, None, share, expert, x, count=1, first_expert=first, ahead=False
            )
        for first, second in fp4:
            fp4_experts.each_choice(wide, first, second, None, share, expert, 0)

    case = Case("one expert", call)
    for launch in aot.launches(case, "sm_90"):
        print(aot.compile_launch(case, launch, "sm_90").spill_bytes)"""


def test_a_rank_of_a_single_expert_compiles() -> None:
    """Numbers that are 1 are known as a kernel is compiled, and no tensors there."""
    pytest.importorskip("triton")
    assert python("-c", ONE_EXPERT).stdout.split() == ["0"] * 9  # with an order


def test_attention_by_warps_of_two_kinds_compiles_and_does_not_spill() -> None:
    pytest.importorskip("triton")
    which = "^sparse_mla fp8_ds_mla (32|64) heads 4096"
    done = python("-c", AOT, "aot", "-k", which, "--arch", "sm_90")
    assert done.returncode == 0, done.stdout
    *compiled, last = done.stdout.splitlines()[1:]
    assert [x.split()[-6] for x in compiled] == ["warp_mla_few_kernel", "warp_mla_kernel"]
    assert "2 kernels compiled; 0 faults:" in last


@pytest.mark.parametrize(
    "rows",
    ["200", pytest.param("(20|64)", marks=pytest.mark.slow)],  # fewer never take more memory
)
def test_products_in_fp32_fit_into_shared_memory(rows: str) -> None:
    pytest.importorskip("triton")
    done = python("-c", AOT, "aot", "-k", f"fp32 {rows} rows", "--arch", "sm_90")
    assert done.returncode == 0, done.stdout
    compiled = done.stdout.splitlines()[1:-1]
    assert {"_tile_kernel", "_gated_kernel", "_outer_kernel"} <= {x.split()[-6] for x in compiled}


def test_a_kernel_that_cannot_be_loaded_or_spills_is_a_fault() -> None:
    fits = aot.Compiled("case", "kernel", "sm_90", 4, 128, aot.SHARED_BYTES, 0, True)
    assert fits.fault == ""
    assert "shared memory" in replace(fits, shared_bytes=aot.SHARED_BYTES + 1, hot=False).fault
    assert "spills" in replace(fits, spill_bytes=8).fault
    assert replace(fits, spill_bytes=8, hot=False).fault == ""


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (("aot", "--arch", "sm_80"), {}, "sm_80; works: sm_100, sm_90"),
        (("aot", "-k", "no such"), {}, "no case has 'no such' in its name"),
        (("aot",), {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set"),
    ],
)
def test_aot_says_what_is_wrong(
    words: tuple[str, ...], variables: dict[str, str], told: str
) -> None:
    pytest.importorskip("triton")
    done = python("-c", AOT, *words, **variables)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_aot_without_triton_says_what_to_install(backend: str) -> None:
    script = f"""if True:
        import sys
        from importlib import util
        found = util.find_spec
        util.find_spec = lambda name, *more: None if name == "triton" else found(name, *more)
        sys.modules["triton"] = None
        from ml4core_{backend}.commands import app
        app()"""
    done = python("-c", script, "aot")
    assert done.returncode == 2
    assert "pip install triton" in " ".join(done.stderr.replace("│", " ").split())


def reasons(stage: str, layer: LayerSpec = LAYER, **more: Any) -> dict[str, list[str]]:
    found = stages.candidates(stage, layer, DECODE, deployment(**more))
    return {
        each.provider: [r.reason for r in each.refusals] if isinstance(each, Rejected) else []
        for each in found
    }


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates without triton: reasons alone are of interest."""
    monkeypatch.setattr(stages, "_own_call", lambda stage, layer: lambda *args: None)
    monkeypatch.setattr(stages, "_against", lambda *args: ())


@pytest.mark.usefixtures("no_kernels")
def test_peers_come_before_us_with_every_reason() -> None:
    found = reasons("sparse_mla", replace(LAYER, kv_lora_rank=256), dtype="float32")
    assert list(found) == ["FlashMLA", "triton"]
    told = " ".join(found["FlashMLA"])
    for part in ("256 and 64", "bfloat16, not float32", "flash_mla is not installed", "by rule"):
        assert part in told
    assert found["triton"] == []
    told = " ".join(reasons("sparse_mla", device=H200)["measured sizes"])
    assert "NVIDIA H200" in told or "measured" in told
    chosen = reasons("select")
    assert list(chosen) == ["FlashInfer", "DeepGEMM", "triton"]
    assert "lowest position" in chosen["FlashInfer"][0]
    assert "FP8 instructions" in chosen["DeepGEMM"][0]


@pytest.mark.usefixtures("no_kernels")
def test_stages_that_nobody_serves_are_left_to_core() -> None:
    assert stages.candidates("attention", LAYER, DECODE, deployment()) == ()
    assert stages.candidates("verify_and_sample", None, DECODE, deployment()) == ()


def test_what_is_offered_for_a_stage_is_declared() -> None:
    """Core refuses a session that offers more than its backend declares."""
    declared = capabilities(H200)
    offered = {
        stage
        for stage in STAGES
        for layer in (LAYER, MOE)
        for given in (deployment(), specialised())
        if stages.candidates(stage, layer, DECODE, given)
    }
    assert {"attn_inputs", "attn_output", "ffn", "decoder_layer"} <= offered
    assert not [stage for stage in offered if f"stage:{stage}" not in declared]


@pytest.mark.parametrize(
    ("shape", "more", "told"),
    [
        (replace(DECODE, decode=Segment(5, 5, 1)), {}, "4 rows at most; this step has 5"),
        (DECODE, {"tensor_parallel_size": 2}, "heads are spread over 2 ranks"),
        (DECODE, {"needs": frozenset({"act:fp8_block"})}, "quantised to fp8_block"),
    ],
)
def test_attn_output_says_what_it_does_not_take(
    shape: StepShape, more: dict[str, Any], told: str
) -> None:
    (taken,) = stages.candidates("attn_output", LAYER, DECODE, deployment())
    assert isinstance(taken, Accepted)
    (found,) = stages.candidates("attn_output", LAYER, shape, deployment(**more))
    assert isinstance(found, Rejected)
    assert [told in one.reason for one in found.refusals] == [True]


def specialised(**more: Any) -> Deployment:
    config = {"decode_backend": "latency_specialized"}
    model = replace(MODEL, layers=(MOE,))
    return replace(deployment(**more), model=model, additional_config=config)


MOE = replace(LAYER, dense_width=None, moe=MoESpec(8, 2, 128, 128))


def test_latency_specialised_decoding_denies_all_at_once() -> None:
    assert latency.refusals(deployment(H200, dtype="float32")) == ()  # nobody asked
    assert latency.refusals(specialised(device=H200)) == ()
    wanted = replace(
        specialised(device=H200, dtype="float32", tensor_parallel_size=8),
        enable_expert_parallel=True,
        weight_formats=frozenset({"nvfp4", "bf16"}),
        needs=frozenset({"act:mxfp4"}),
    )
    told = " ".join(refusal.reason for refusal in latency.refusals(wanted))
    for part in ("8 ranks", "experts are spread", "not float32", "in nvfp4", "to mxfp4"):
        assert part in told
    wanted = replace(wanted, model=replace(MODEL, layers=(LAYER,)))
    assert "no layer of this model" in latency.refusals(wanted)[-1].reason
    with pytest.raises(Refused) as refused:
        CudaBackend().open(replace(wanted, device=replace(H200, arch="sm_80")))
    assert len(refused.value.refusals) > 5


@pytest.mark.usefixtures("no_kernels")
def test_a_layer_is_specialised_for_few_rows_alone() -> None:
    def reasons_for(layer: LayerSpec, shape: StepShape) -> list[str]:
        (found,) = stages.candidates("decoder_layer", layer, shape, specialised())
        assert isinstance(found, Rejected)
        return [refusal.reason for refusal in found.refusals]

    assert stages.candidates("decoder_layer", MOE, DECODE, deployment()) == ()
    wide = replace(DECODE, decode=Segment(8, 8, 1))
    assert "this is one of 8 rows" in reasons_for(MOE, wide)[0]
    chunk = replace(DECODE, decode=NONE, prefill=Segment(1, 2, 2))
    assert "with a chunk of a prompt" in reasons_for(MOE, chunk)[0]
    assert "layers with experts" in reasons_for(LAYER, DECODE)[0]


def test_fused_inputs_say_what_they_do_not_take() -> None:
    layer = replace(LAYER, q_lora_rank=64, indexer=replace(LAYER.indexer, hadamard=True))
    wide = replace(DECODE, decode=Segment(64, 64, 1))
    given = deployment(needs=frozenset({"act:fp8_block"}), kv_layout="e4m3fnuz")
    (found,) = attn_stage.attn_inputs_candidates(layer, wide, given)
    assert isinstance(found, Rejected)
    told = " ".join(refusal.reason for refusal in found.refusals)
    for part in ("LoRA of rank 64", "Hadamard", "quantised to fp8_block", "64", "e4m3fnuz"):
        assert part in told


def test_a_launch_on_eight_gpus_lacks_the_hardware_alone() -> None:
    try:
        select("cuda", timeout=240)
    except Refused as refused:
        hardware = refused
    else:
        pytest.skip("this machine has an NVIDIA GPU")
    args = EngineArgs(
        "mistralai/Mistral-Large-4-1T-A52B",
        backend="cuda",
        tensor_parallel_size=8,
        speculative_config={"method": "dspark", "num_speculative_tokens": 3},
    )
    launch = judge(args, {})
    assert {one.subject for one in launch.refusals} <= {"driver", "torch", "triton", "device"}
    assert set(launch.refusals) == set(hardware.refusals)
