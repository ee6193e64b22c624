"""Switches by variable and by key: values, contradictions, what a deployment can't have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from ml4core.api import Deployment, Device, Refused
from ml4core_rocm.backend import RocmBackend
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.devices import REFERENCE
from ml4core_rocm.providers import peers
from ml4core_rocm.switches import AR_DEFAULT, AR_POOL, MOE_BOUND, VARIABLES, Switches, read

Deploy = Callable[..., Deployment]
AITER, SPARSE, SIZE = VARIABLES.values()


def found(deployment: Deployment, **environment: str) -> tuple[Switches, dict[str, str]]:
    switches, refusals = read(deployment, capabilities(deployment.device), environment)
    assert all(refusal.source == "rocm" and refusal.remedy for refusal in refusals)
    return switches, {refusal.subject: str(refusal) for refusal in refusals}


def test_nothing_stated(deploy: Deploy) -> None:
    switches, refused = found(deploy())
    assert not refused
    assert switches == replace(Switches(), told=switches.told)
    assert switches.told == {
        "use_aiter": "0 (default)",
        "aiter_triton_sparse_mla": "0 (default)",
        "custom_ar_max_size": f"{AR_DEFAULT} (default)",
        "sparse_mla_precision": "bf16 (default)",
    }


def test_the_announced_variables(deploy: Deploy) -> None:
    announced = {AITER: "1", SPARSE: "1", SIZE: "134217728"}
    switches, refused = found(deploy(tensor_parallel_size=8), **announced)
    assert not refused
    assert (switches.use_aiter, switches.aiter_triton_sparse_mla) == (True, True)
    assert switches.custom_ar_max_size == 128 << 20
    assert switches.told["use_aiter"] == f"1 ({AITER})"


def test_keys_mean_what_variables_mean(deploy: Deploy) -> None:
    own: dict[str, Any] = {
        "use_aiter": True,
        "aiter_triton_sparse_mla": True,
        "custom_ar_max_size": 134217728,
    }
    deploy = partial(deploy, tensor_parallel_size=8)
    by_key, refused = found(deploy(additional_config={"rocm": own}))
    assert not refused
    by_variable, _ = found(deploy(), **{AITER: "true", SPARSE: "1", SIZE: "134217728"})
    assert replace(by_key, told={}) == replace(by_variable, told={})
    assert by_key.told["use_aiter"] == "1 (--additional-config rocm.use_aiter)"
    both, refused = found(deploy(additional_config={"rocm": own}), **{AITER: "1"})
    assert not refused
    assert both.use_aiter


@pytest.mark.parametrize(
    ("own", "environment", "subject", "told"),
    [
        ({"use_aiter": False}, {AITER: "1"}, AITER, "VLLM_ROCM_USE_AITER says True"),
        ({"custom_ar_max_size": 0}, {SIZE: "1"}, SIZE, "custom_ar_max_size says 0"),
        ({}, {AITER: "yes"}, AITER, "'yes' is no value of it (works: 1 or 0, true or false)"),
        ({"use_aiter": 3}, {}, "--additional-config rocm.use_aiter", "3 is no value"),
        ({}, {SIZE: "-1"}, SIZE, f"0 (no custom all-reduce) to {AR_POOL}, its pool"),
        ({}, {SIZE: str(AR_POOL + 1)}, SIZE, "its pool"),
        ({"custom_ar_max_size": True}, {}, "--additional-config rocm.custom_ar_max_size", "True"),
    ],
)
def test_wrong_values_and_contradictions(
    deploy: Deploy, own: dict[str, Any], environment: dict[str, str], subject: str, told: str
) -> None:
    _, refused = found(deploy(additional_config={"rocm": own}), **environment)
    assert set(refused) == {subject}
    assert told in refused[subject]


def test_the_bounds_of_the_all_reduce(deploy: Deploy) -> None:
    for text, size in (("0", 0), (str(AR_POOL), AR_POOL)):
        switches, refused = found(deploy(tensor_parallel_size=2), **{AITER: "1", SIZE: text})
        assert not refused
        assert switches.custom_ar_max_size == size


KEY_SIZE = "--additional-config rocm.custom_ar_max_size"


@pytest.mark.parametrize(
    ("changes", "environment", "subject", "told"),
    [
        ({"tensor_parallel_size": 8}, {SIZE: "4096"}, SIZE, "without AITER torch sums"),
        ({}, {AITER: "1", SIZE: "4096"}, SIZE, "one rank sums with no other"),
        ({"tensor_parallel_size": 3}, {AITER: "1", SIZE: "4096"}, SIZE, "2, 4, 6, 8 ranks, not"),
        ({"tensor_parallel_size": 8, "nnodes": 2}, {AITER: "1", SIZE: "1"}, SIZE, "not of 2"),
        (
            {"additional_config": {"rocm": {"custom_ar_max_size": 4096}}},
            {AITER: "1"},
            KEY_SIZE,
            "one rank",
        ),
    ],
)
def test_a_size_that_bounds_nothing_is_refused(
    deploy: Deploy, changes: dict[str, Any], environment: dict[str, str], subject: str, told: str
) -> None:
    _, refused = found(deploy(**changes), **environment)
    assert set(refused) == {subject}
    assert told in refused[subject]
    # That there is no such all-reduce is so, whoever sums; what nobody states is refused nowhere.
    without = {name: value for name, value in environment.items() if name != SIZE}
    for size in ({}, {SIZE: "0"}) if subject == SIZE else ():
        assert not found(deploy(**changes), **without, **size)[1]


@pytest.mark.parametrize("kind", ["FP8 from 256 rows", "never"])
def test_a_contrary_bound_of_the_librarys_is_refused(deploy: Deploy, kind: str) -> None:
    """It would be overwritten where a8w4 experts are AITER's, as they have to be FP8 always."""
    stated = {"FP8 from 256 rows": "256", "never": "1048576"}[kind]
    a8w4 = deploy(additional_config={"fp8_moe_requant": "mxfp4", "fp8_moe_requant_act": "a8w4"})
    _, refused = found(a8w4, **{AITER: "1", MOE_BOUND: stated})
    assert set(refused) == {MOE_BOUND}
    assert f"it says '{stated}'" in refused[MOE_BOUND]
    assert "works: 0, or leave it out" in refused[MOE_BOUND]
    for other, environment in (
        (a8w4, {AITER: "1", MOE_BOUND: "0"}),
        (a8w4, {AITER: "1"}),
        (a8w4, {MOE_BOUND: stated}),
        (deploy(), {AITER: "1", MOE_BOUND: stated}),
    ):
        assert not found(other, **environment)[1]


ANYWAY = "our Triton kernel attends anyway, so it would change nothing"


@pytest.mark.parametrize(
    ("changes", "environment", "told"),
    [
        ({}, {SPARSE: "1"}, f"without AITER {ANYWAY} (works: VLLM_ROCM_USE_AITER=1,"),
        ({"dtype": "float32"}, {SPARSE: "1", AITER: "1"}, f"bfloat16, not float32: {ANYWAY}"),
        ({"kv_layout": "fp32"}, {SPARSE: "1", AITER: "1"}, f"e4m3, not of fp32: {ANYWAY}"),
        (
            {"device": replace(REFERENCE, arch="gfx942"), "kv_layout": "e4m3fnuz"},
            {SPARSE: "1", AITER: "1"},
            "published for gfx950; this device is gfx942",
        ),
        (
            {"decode_context_parallel_size": 8},
            {SPARSE: "1", AITER: "1"},
            "no context parallelism, and --decode-context-parallel-size is 8",
        ),
        (
            {"prefill_context_parallel_size": 2},
            {SPARSE: "1", AITER: "1"},
            "no context parallelism, and --prefill-context-parallel-size is 2",
        ),
    ],
)
def test_our_sparse_mla_in_aiters_place_needs_its_deployment(
    deploy: Deploy, changes: dict[str, Any], environment: dict[str, str], told: str
) -> None:
    _, refused = found(deploy(**changes), **environment)
    assert set(refused) == {SPARSE}
    assert told in refused[SPARSE]


@pytest.mark.parametrize("changes", [{}, {"dtype": "float32"}, {"kv_layout": "fp32"}])
def test_what_sparse_mla_is_refused_for_is_so(deploy: Deploy, changes: dict[str, Any]) -> None:
    """Without the switch our kernel attends there; where it isn't refused, AITER's would."""
    whole = deploy(**changes)
    for use in (False, True):
        switches = Switches(use_aiter=use)
        (aiters,) = (peer for peer in peers("sparse_mla") if peer.name == "AITER MLA")
        serves = not aiters.reasons(whole.model.layers[0], whole, switches, lambda names: ())
        environment = {SPARSE: "1"} | ({AITER: "1"} if use else {})
        assert serves == (not found(whole, **environment)[1])


def test_open_names_every_switch_at_fault(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Device("fake", "torch on the host", "gfx950", "cpu")
    monkeypatch.setenv(AITER, "1")
    monkeypatch.setenv(SIZE, "much")
    config = {"rocm": {"use_aitre": True}, "tpu": {}}
    with pytest.raises(Refused) as refused:
        RocmBackend().open(deploy(device=fake, additional_config=config))
    assert {refusal.subject for refusal in refused.value.refusals} == {
        AITER,
        SIZE,
        "--additional-config rocm.use_aitre",
        "--additional-config tpu",
    }


def test_a_session_tells_what_is_in_force(deploy: Deploy) -> None:
    fake = Device("fake", "torch on the host", "gfx950", "cpu")
    config = {"rocm": {"custom_ar_max_size": 0}}
    session = RocmBackend().open(deploy(device=fake, additional_config=config))
    told: Any = session.switches  # type: ignore[attr-defined]
    assert told["custom_ar_max_size"] == "0 (--additional-config rocm.custom_ar_max_size)"


def test_activations_of_converted_experts(deploy: Deploy) -> None:
    """Stated ones are taken; the default goes by what the device declares."""
    config = {"fp8_moe_requant": "mxfp4"}
    declared = capabilities(REFERENCE)
    default, _ = read(deploy(additional_config=config), declared, {})
    assert default.expert_act == ("a8w4" if "act:fp8_block" in declared else "")
    stated, _ = read(
        deploy(additional_config=config | {"fp8_moe_requant_act": "a4w4"}), declared, {}
    )
    assert stated.expert_act == "a4w4"
    assert stated.told["experts in MXFP4"] == "a4w4"
    assert read(deploy(), declared, {})[0].expert_act == ""


KEY = "--additional-config rocm.sparse_mla_precision"
FP8 = {"rocm": {"sparse_mla_precision": "fp8"}}


def test_queries_in_fp8(deploy: Deploy) -> None:
    switches, refused = found(deploy(additional_config=FP8))
    assert not refused
    assert switches.sparse_mla_precision == "fp8"
    assert switches.told["sparse_mla_precision"] == f"fp8 ({KEY})"
    assert found(deploy())[0].sparse_mla_precision == "bf16"
    both, refused = found(deploy(additional_config=FP8), **{AITER: "1", SPARSE: "1"})
    assert not refused
    assert both.sparse_mla_precision == "fp8"


@pytest.mark.parametrize(
    ("changes", "environment", "told"),
    [
        ({"kv_layout": "bf16"}, {}, "a cache of bf16 has no FP8"),
        ({"dtype": "float32"}, {}, "queries of float32 meet keys in float32"),
        ({}, {AITER: "1"}, "has queries in FP8 on such a cache already"),
        ({"device": Device("fake", "torch", "gfx950", "cpu")}, {}, "has no kernels"),
        ({"additional_config": {"rocm": {"sparse_mla_precision": "fp4"}}}, {}, "bf16 or fp8"),
        ({"additional_config": {"rocm": {"sparse_mla_precision": True}}}, {}, "True is no value"),
    ],
)
def test_queries_in_fp8_need_keys_of_ours_in_fp8(
    deploy: Deploy, changes: dict[str, Any], environment: dict[str, str], told: str
) -> None:
    _, refused = found(deploy(**{"additional_config": FP8} | changes), **environment)
    assert set(refused) == {KEY}
    assert told in refused[KEY]


def test_a_session_attends_in_the_precision_that_is_asked_for(deploy: Deploy) -> None:
    from ml4core_rocm.ops import load_ops

    assert load_ops(mla_precision="fp8")["sparse_mla"].keywords == {"precision": "fp8"}
    assert not hasattr(load_ops()["sparse_mla"], "keywords")
