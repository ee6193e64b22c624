"""What the backend says of itself, of runtimes, and of deployments that it can't serve."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from ml4core.api import Deployment, Device, KVCache, ModelSpec, Refusal, Refused
from ml4core_tpu import aot_cases, backend, libraries, ml4core_refusals, runtimes
from ml4core_tpu.backend import TpuBackend
from ml4core_tpu.capabilities import capabilities, smallest_page
from ml4core_tpu.compilation import compilation_refusals
from ml4core_tpu.driver import Chip
from ml4core_tpu.layouts import LANE33, TILES, TILES_NOPE, tiles_layout
from ml4core_tpu.lazy_steps import lazy_buckets
from ml4core_tpu.ops import kv_write
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


def test_without_jax_and_a_chip_the_chip_is_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One reason, which says what would do without one; libraries are no others beside it."""
    no_chip = Refusal("tpu", "chip", "no TPU on the PCI bus", "a TPU host")
    absent = Refusal("tpu", "runtime", "JAX can't be used", libraries.INSTALL)
    monkeypatch.setattr(backend, "find_chips", lambda: ((), (no_chip,)))
    monkeypatch.setattr(backend, "find_runtime", lambda: ("", (absent,)))
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    (reason,) = TpuBackend().probe().refusals
    assert (reason.subject, reason.reason) == (no_chip.subject, no_chip.reason)
    assert reason.remedy.startswith("a TPU host; or --additional-config")
    assert reason.remedy.endswith('pip install "ml4core-tpu[jax]"')
    monkeypatch.setattr(backend, "find_spec", lambda name: object())  # it is there, and broken
    assert TpuBackend().probe().refusals == (no_chip, absent)
    monkeypatch.setattr(backend, "find_chips", lambda: ((Chip(0, "tpu7x"),), ()))
    found = [one.subject for one in TpuBackend().probe().refusals]
    assert found == ["runtime", "libtpu"]


def test_what_is_missing_is_installed_as_the_package_pins_it(
    monkeypatch: pytest.MonkeyPatch, deployment: Deployment
) -> None:
    """torch-xla by an environment of its own: beside core's torch it can't be loaded."""
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    remedies = {}
    for runtime in ("jax", "torch_xla"):
        asked = {"device": "interpreted", "tpu": {"runtime": runtime}}
        (refusal,) = runtimes.runtime_refusals(replace(deployment, additional_config=asked))
        remedies[runtime] = refusal.remedy
        assert refusal.remedy in runtime_reasons()[runtime]
    assert remedies["jax"] == 'pip install "ml4core-tpu[jax]"'
    assert "tools.torch_xla.environment" in remedies["torch_xla"]
    assert "pip install" not in remedies["torch_xla"]


def test_torch_xla_is_bound_to_a_torch(
    monkeypatch: pytest.MonkeyPatch, deployment: Deployment
) -> None:
    """And compiles for itself: switches of the other runtime are refused beside it."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(runtimes, "find_spec", lambda name: object())
    found = {"torch-xla": "2.9.0", "torch": "2.9.1"}
    monkeypatch.setattr(runtimes, "version", found.__getitem__)
    own = {"runtime": "torch_xla", "warm_up": True}
    asked = replace(deployment, additional_config={"device": "interpreted", "tpu": own})
    assert runtimes.runtime_refusals(asked) == ()
    found["torch"] = "2.13.0"
    (refusal,) = runtimes.runtime_refusals(asked)
    assert "torch-xla 2.9.0 is bound to torch of its own release" in refusal.reason
    assert [one.subject for one in compilation_refusals(asked)] == [
        "--additional-config tpu.warm_up"
    ]


def test_torch_xla_is_told_of_no_other_device(
    monkeypatch: pytest.MonkeyPatch, deployment: Deployment
) -> None:
    """Its sessions have programs for the host, which no other device can run."""
    monkeypatch.setattr(runtimes, "find_spec", lambda name: object())
    monkeypatch.setattr(runtimes, "version", {"torch-xla": "2.9.0", "torch": "2.9.1"}.__getitem__)
    own = {"device": "interpreted", "tpu": {"runtime": "torch_xla"}}
    asked = replace(deployment, additional_config=own)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert runtimes.runtime_refusals(asked) == ()
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    (refusal,) = runtimes.runtime_refusals(asked)
    assert "PJRT_DEVICE is 'TPU', and its sessions run on the host" in refusal.reason
    assert refusal.remedy == "PJRT_DEVICE=CPU, or leave it out"
    assert runtimes.runtime_refusals(replace(deployment, additional_config={})) == ()


def test_a_graph_of_each_kind_of_step(deployment: Deployment) -> None:
    small = replace(deployment, max_model_len=1000, max_num_seqs=4, max_num_batched_tokens=64)
    found = lazy_buckets(small)
    assert (found.decode, found.prefill_rows, found.pages) == ((4,), (64,), (4,))
    assert found.logits == (4, 8)


def test_unread_switches_are_refused(deployment: Deployment) -> None:
    asked = {"device": "interpreted", "tpu": {"runtimes": "jax"}, "cuda": {}}
    text = refused(replace(deployment, additional_config=asked))
    assert "--additional-config tpu.runtimes" in text
    assert "--additional-config cuda" in text


def test_undeclared_needs_are_refused(deployment: Deployment) -> None:
    needs = frozenset({"parallel:pp", "feature:graph_capture"})
    text = refused(replace(deployment, needs=needs))
    assert "parallel:pp" in text
    assert "feature:graph_capture" in text


def test_what_does_not_divide_among_ranks_is_refused_by_name(deployment: Deployment) -> None:
    """The published model has 64 query heads and 128 experts."""
    whole = replace(deployment, tensor_parallel_size=8, data_parallel_size=4)
    assert subjects(replace(whole, enable_expert_parallel=True)) == []
    assert subjects(whole) == []
    wrong = replace(whole, tensor_parallel_size=6, enable_expert_parallel=True)
    found = ml4core_refusals(wrong, capabilities(wrong.device))
    assert {(one.subject, one.reason.split(" don't")[0]) for one in found} == {
        ("--tensor-parallel-size 6", "64 query heads"),
        ("--tensor-parallel-size 6", "16384 inner values of a dense layer"),
        ("--tensor-parallel-size 6 --data-parallel-size 4", "128 experts"),
    }
    assert {one.remedy for one in found if "heads" in one.reason} == {"1, 2, 4 ranks"}


def test_a_mesh_runs_programs_of_jax_alone(deployment: Deployment) -> None:
    asked = {"device": "interpreted", "tpu": {"runtime": "torch_xla"}}
    wrong = replace(deployment, tensor_parallel_size=2, enforce_eager=True, additional_config=asked)
    reasons = [one.reason for one in ml4core_refusals(wrong, capabilities(wrong.device))]
    assert [reason.split(":")[0] for reason in reasons] == [
        "--enforce-eager",
        "tpu.runtime=torch_xla",
    ]


def test_a_real_device_is_refused_where_there_is_none(deployment: Deployment) -> None:
    text = refused(replace(deployment, device=TpuBackend.reference_device))
    assert "no TPU on the PCI bus" in text


@pytest.mark.parametrize(
    ("tokens", "requests", "page"),
    [(2**18, 256, 512), (2**20, 256, 2048), (2**20, 8, 64), (1000, 1, 1)],
)
def test_pages_have_a_least_size_by_the_scalar_memory(
    deployment: Deployment, tokens: int, requests: int, page: int
) -> None:
    assert smallest_page(tokens, requests) == page
    real = replace(
        deployment,
        device=TpuBackend.reference_device,
        max_model_len=tokens,
        max_num_seqs=requests,
        block_size=max(page, 128),
    )
    assert subjects(real) == []
    if page > 128:
        (refusal,) = ml4core_refusals(
            replace(real, block_size=page // 2), capabilities(real.device)
        )
        assert refusal.subject == "--block-size"
        assert f"--block-size {page}" in refusal.remedy


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cache_scale_that_rows_can_not_be_divided_by_is_an_error(scale: float) -> None:
    part = torch.zeros(1, 4, 512, dtype=torch.uint8)
    cache = KVCache(tiles_layout(512, 0), 4, (part,), torch.tensor([scale]))
    with pytest.raises(ValueError, match="has to be above 0"):
        kv_write(cache, torch.tensor([0]), torch.ones(1, 512))


@pytest.mark.parametrize(
    ("jax", "libtpu", "known"),
    [
        ("0.10.2", "0.0.42.1", True),
        ("0.11.2", "0.0.50", True),
        ("0.10.2", "0.0.50", False),
        ("0.9.0", "0.0.42.1", False),
    ],
)
def test_jax_and_libtpu_come_in_pairs(
    monkeypatch: pytest.MonkeyPatch, jax: str, libtpu: str, known: bool
) -> None:
    """Asked only where there is a chip: elsewhere libtpu compiles, and says what it can't."""
    monkeypatch.setattr(libraries, "version", {"jax": jax, "libtpu": libtpu}.__getitem__)
    monkeypatch.setattr(libraries, "find_spec", lambda name: object())
    assert libraries.find_libtpu(()) == (f"libtpu {libtpu}", ())
    _, reasons = libraries.find_libtpu((Chip(0, "tpu7x"),))
    assert [one.subject for one in reasons] == ([] if known else ["libtpu"])


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
