"""What the backend says of itself, of runtimes, and of deployments that it can't serve."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from ml4core.api import Deployment, Device, ModelSpec, Refused
from ml4core_tpu import aot_cases, ml4core_refusals
from ml4core_tpu.backend import TpuBackend
from ml4core_tpu.capabilities import capabilities
from ml4core_tpu.layouts import LANE33, TILES, TILES_NOPE
from ml4core_tpu.runtimes import runtime_reasons


@pytest.fixture
def deployment(device: Device, published: ModelSpec) -> Deployment:
    return Deployment(
        published,
        device,
        dtype="bfloat16",
        kv_layout=TILES,
        index_layout=LANE33,
        block_size=256,
        additional_config={"device": "interpreted"},
    )


def subjects(deployment: Deployment) -> list[str]:
    found = ml4core_refusals(deployment, capabilities(deployment.device))
    return [refusal.subject for refusal in found]


def refused(deployment: Deployment) -> str:
    with pytest.raises(Refused) as error:
        TpuBackend().open(deployment)
    return str(error.value)


def test_fp8_means_tiles(device: Device) -> None:
    defaults = capabilities(device).defaults
    assert (defaults["kv"], defaults["fp8"], defaults["index"]) == (TILES, TILES, LANE33)


def test_a_common_deployment_has_nothing_against_it(deployment: Deployment) -> None:
    assert subjects(deployment) == []


def test_every_reason_is_told_at_once(deployment: Deployment) -> None:
    wrong = replace(deployment, block_size=130, kv_layout=TILES_NOPE)
    assert subjects(wrong) == [f"index:{LANE33}", f"kv:{TILES_NOPE}"]
    assert subjects(replace(deployment, block_size=66)) == [f"kv:{TILES}", f"index:{LANE33}"]


@pytest.mark.parametrize("runtime", ["torch_xla", "torch_tpu", "tensorflow"])
def test_a_runtime_that_can_not_serve_says_why(deployment: Deployment, runtime: str) -> None:
    asked = {"device": "interpreted", "tpu": {"runtime": runtime}}
    text = refused(replace(deployment, additional_config=asked))
    assert f"tpu.runtime={runtime}" in text
    if runtime == "tensorflow":
        assert "works: jax, torch_xla, torch_tpu" in text
    elif find_spec(runtime) is None:
        assert f"{runtime} is not installed" in text


def test_unread_switches_are_refused(deployment: Deployment) -> None:
    asked = {"device": "interpreted", "tpu": {"runtimes": "jax"}, "cuda": {}}
    text = refused(replace(deployment, additional_config=asked))
    assert "--additional-config tpu.runtimes" in text
    assert "--additional-config cuda" in text


def test_undeclared_needs_are_refused(deployment: Deployment) -> None:
    needs = frozenset({"parallel:tp", "feature:graph_capture"})
    text = refused(replace(deployment, needs=needs))
    assert "parallel:tp" in text
    assert "feature:graph_capture" in text


def test_a_real_device_is_refused_where_there_is_none(deployment: Deployment) -> None:
    text = refused(replace(deployment, device=TpuBackend.reference_device))
    assert "no TPU on the PCI bus" in text


def test_each_runtime_is_told_of() -> None:
    assert set(runtime_reasons()) == {"jax", "torch_xla", "torch_tpu"}


def test_programs_are_compiled_at_the_published_widths(published: ModelSpec) -> None:
    layers = [layer for layer in published.layers if layer.moe and layer.rope_dim]
    (widths,) = {
        (one.hidden_size, one.heads, one.kv_lora_rank, one.rope_dim, one.moe.experts,
         one.moe.expert_width, one.moe.shared_width)
        for one in layers
        if one.moe
    }  # fmt: skip
    width = aot_cases.EXPERT_WIDTH
    assert widths == (
        aot_cases.HIDDEN, aot_cases.HEADS, aot_cases.LATENT, aot_cases.ROPE, aot_cases.EXPERTS,
        width, width,
    )  # fmt: skip
    indexers = {(one.indexer.heads, one.indexer.topk) for one in layers if one.indexer}
    assert indexers == {(aot_cases.INDEX_HEADS, aot_cases.TOPK)}
