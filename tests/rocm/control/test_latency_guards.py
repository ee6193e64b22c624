"""Guards of the specialised decode: each by itself, all of them together, and ranks that agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ml4core.api import (
    Deployment,
    Device,
    LayerSpec,
    Refusal,
    Refused,
    Rejected,
    Segment,
    StepShape,
)
from ml4core_rocm.backend import RocmBackend
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.devices import REFERENCE
from ml4core_rocm.latency import guards, provider
from ml4core_rocm.latency.agreement import One, agree
from ml4core_rocm.latency.guards import GUARDS, LDS_BYTES, config_reasons, kernel_reasons
from ml4core_rocm.switches import read

Deploy = Callable[..., Deployment]
ASKED = {"decode_backend": "latency_specialized"}
A4W4 = {"fp8_moe_requant": "mxfp4", "fp8_moe_requant_act": "a4w4"}
KERNEL = "latency_specialized, kernel"


def served(deploy: Deploy, **more: Any) -> Deployment:
    """What nothing but the missing kernel stands against."""
    fields: dict[str, Any] = {
        "tensor_parallel_size": 4,
        "weight_formats": frozenset({"fp8_block", "bf16", "mxfp4"}),
        "max_num_seqs": 64,
        "speculative_config": {"method": "dspark", "num_speculative_tokens": 3},
        "additional_config": ASKED | A4W4,
    }
    return deploy(**(fields | more))


def reasons(deployment: Deployment) -> list[Refusal]:
    switches, _ = read(deployment, capabilities(deployment.device), {})
    return list(config_reasons(deployment, switches))


def subjects(deployment: Deployment) -> list[str]:
    return [
        refusal.subject.removeprefix("latency_specialized, ") for refusal in reasons(deployment)
    ]


def narrower(deployment: Deployment) -> dict[str, Any]:
    layers = tuple(replace(layer, hidden_size=4096) for layer in deployment.model.layers)
    return {"model": replace(deployment.model, layers=layers)}


SINGLE: dict[str, tuple[dict[str, Any], str]] = {
    "tensor_parallel": ({"tensor_parallel_size": 8}, "--tensor-parallel-size"),
    "pipeline_parallel": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    "data_parallel": ({"data_parallel_size": 2}, "--data-parallel-size"),
    "nodes": ({"nnodes": 2}, "--nnodes"),
    "expert_parallel": ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
    "decode_context": ({"decode_context_parallel_size": 4}, "--decode-context-parallel-size"),
    "prefill_context": ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
    "transfer": ({"needs": frozenset({"feature:kv_transfer"})}, "--kv-transfer-config"),
    "host offload": ({"needs": frozenset({"feature:host_offload"})}, "--kv-transfer-config"),
    "speculation": ({"speculative_config": {"method": "eagle"}}, "--speculative-config method"),
    "long drafts": (
        {"speculative_config": {"method": "dspark", "num_speculative_tokens": 8}},
        "--speculative-config num_speculative_tokens",
    ),
    "experts": (
        {"additional_config": ASKED | A4W4 | {"fp8_moe_requant_act": "a8w4"}},
        "VLLM_FP8_MOE_REQUANT_ACT",
    ),
    "fp8 experts": (
        {"weight_formats": frozenset({"fp8_block"}), "additional_config": ASKED},
        "VLLM_FP8_MOE_REQUANT_ACT",
    ),
    "dtype": ({"dtype": "float32"}, "--dtype"),
    "latent cache": ({"kv_layout": "fp32"}, "--kv-cache-dtype"),
    "index cache": ({"index_layout": "planar_f32"}, "--attention-config index_layout"),
    "pages": ({"block_size": 128}, "--block-size"),
    "kind": ({"device": replace(REFERENCE, kind="interpreted")}, "device"),
    "architecture": ({"device": replace(REFERENCE, arch="gfx942")}, "architecture"),
    "partition": ({"device": replace(REFERENCE, details={"cus": "32"})}, "compute units"),
    "unknown units": ({"device": replace(REFERENCE, details={})}, "compute units"),
}


@pytest.mark.parametrize("layout", ["e4m3", "bf16"])
def test_a_deployment_that_fits_lacks_the_kernel_alone(deploy: Deploy, layout: str) -> None:
    (refusal,) = reasons(served(deploy, kv_layout=layout))
    assert refusal.subject == KERNEL
    assert refusal.reason == "no gfx950 kernel in this version"


@pytest.mark.parametrize("name", SINGLE)
def test_each_guard_names_itself_alone(deploy: Deploy, name: str) -> None:
    changes, subject = SINGLE[name]
    found = reasons(served(deploy, **changes))
    assert [one.subject for one in found] == [f"latency_specialized, {subject}", KERNEL]
    assert all(one.remedy for one in found)


def test_other_widths_are_told(deploy: Deploy) -> None:
    deployment = served(deploy)
    found = reasons(replace(deployment, **narrower(deployment)))
    assert [one.subject for one in found] == ["latency_specialized, model", KERNEL]
    assert "hidden_size 4096, not 6144" in found[0].reason


def test_all_of_them_at_once_and_the_kernel_last(deploy: Deploy) -> None:
    deployment = served(
        deploy,
        tensor_parallel_size=8,
        pipeline_parallel_size=2,
        data_parallel_size=2,
        nnodes=2,
        enable_expert_parallel=True,
        decode_context_parallel_size=4,
        prefill_context_parallel_size=2,
        needs=frozenset({"feature:kv_transfer", "feature:host_offload"}),
        speculative_config={"method": "eagle", "num_speculative_tokens": 9},
        weight_formats=frozenset({"fp8_block"}),
        additional_config=ASKED,
        dtype="float32",
        kv_layout="fp32",
        index_layout="planar_f32",
        block_size=128,
        device=replace(REFERENCE, kind="fake", arch="gfx942"),
    )
    deployment = replace(deployment, **narrower(deployment))
    found = subjects(deployment)
    named = {subject for _, subject in SINGLE.values()} - {"compute units"}
    assert set(found) == named | {"model", "kernel"}
    assert found[-1] == "kernel"
    with pytest.raises(Refused) as refused:
        RocmBackend().open(deployment)
    assert named <= {one.subject.split(", ")[-1] for one in refused.value.refusals}


def test_every_guard_can_say_no() -> None:
    """A guard that no case breaks would be an ornament."""
    covered = {name for name in SINGLE if name in GUARDS} | {"caches", "device", "model", "kernel"}
    assert covered == set(GUARDS)


@pytest.mark.parametrize("config", [{}, {"decode_backend": "stock"}])
def test_who_does_not_ask_is_not_told(deploy: Deploy, config: dict[str, str]) -> None:
    deployment = deploy(additional_config=config, tensor_parallel_size=8)
    assert reasons(deployment) == []


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"scratch_bytes": 16}, "16 bytes a lane"),
        ({"lds_bytes": LDS_BYTES + 1}, f"of {LDS_BYTES}"),
        ({"workgroups_per_cu": 0}, "wait for ever"),
    ],
)
def test_what_was_compiled_is_judged(facts: dict[str, int], told: str) -> None:
    fine = {"scratch_bytes": 0, "lds_bytes": LDS_BYTES, "workgroups_per_cu": 1}
    assert kernel_reasons([("1 row", fine)]) == ()
    (refusal,) = kernel_reasons([("1 row", fine), ("4 rows", fine | facts)])
    assert refusal.subject.endswith("kernel 4 rows")
    assert told in refusal.reason


NONE = Segment(0, 0, 0)
ONE_ROW = StepShape(Segment(1, 1, 1), NONE, NONE, (("latent", 8),), 1)
CHUNK = StepShape(NONE, NONE, Segment(1, 64, 64), (("latent", 8),), 1)


def test_the_provider_tells_the_step_the_layer_and_the_kernel_last(
    deploy: Deploy, make_layer: Callable[..., LayerSpec]
) -> None:
    declared = capabilities(REFERENCE)
    assert provider.candidates(make_layer(1), ONE_ROW, deploy(), declared, {}) == ()
    (decode,) = provider.candidates(make_layer(1), ONE_ROW, served(deploy), declared, {})
    assert isinstance(decode, Rejected)
    assert [one.subject for one in decode.refusals] == [KERNEL]
    dense = make_layer(1, moe=None, dense_width=16384)
    (chunk,) = provider.candidates(dense, CHUNK, served(deploy), declared, {})
    assert isinstance(chunk, Rejected)
    told = [one.reason for one in chunk.refusals]
    assert told[0] == "a prefill step: 64 rows of prompts are among its rows"
    assert told[1] == "a dense layer is no part of it"
    assert told[-1] == "no gfx950 kernel in this version"


def test_with_a_kernel_the_deployment_that_fits_is_served(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the kernel's guard keeps it away."""
    monkeypatch.setattr(guards, "KERNEL", "1")
    assert reasons(served(deploy)) == []


class Recorded:
    """A group whose other ranks answer what is written down."""

    def __init__(self, rank: int, answers: Sequence[tuple[str, tuple[Refusal, ...]]]) -> None:
        self.rank = rank
        self.size = len(answers)
        self.answers = answers

    def gather(self, value: object) -> Sequence[Any]:
        assert value == self.answers[self.rank]
        return self.answers


def test_a_reason_of_one_rank_refuses_all_of_them() -> None:
    few = Refusal("rocm", "compute units", "it has 128", "another GPU")
    both = Refusal("rocm", "weights", "w13 is not contiguous")
    answers = [("bound", (both,)), ("bound", (both, few)), ("bound", (both,))]
    texts = set()
    for rank in range(3):
        with pytest.raises(Refused) as refused:
            agree(Recorded(rank, answers), answers[rank][1], "bound")
        texts.add(str(refused.value))
    (text,) = texts
    assert "compute units: it has 128 (on rank 1 of 3)" in text
    assert "w13 is not contiguous\n" in text + "\n"
    assert "is refused for 2 reasons" in text


def test_ranks_at_different_stages_and_ranks_that_do_not_answer() -> None:
    answers: list[tuple[str, tuple[Refusal, ...]]] = [("bound", ()), ("ready", ())]
    with pytest.raises(Refused, match="different stages: 'bound', 'ready'"):
        agree(Recorded(0, answers), (), "bound")

    class Alone(One):
        def gather(self, value: object) -> Sequence[Any]:
            raise RuntimeError("connection closed by peer\nmore")

    with pytest.raises(Refused, match="did not answer at 'armed': connection closed by peer"):
        agree(Alone(), (), "armed")
    agree(One(), (), "armed")


def test_an_interpreted_device_is_named(deploy: Deploy) -> None:
    fake = Device("fake", "torch on the host", "gfx950", "cpu")
    assert subjects(served(deploy, device=fake)) == ["device", "kernel"]
