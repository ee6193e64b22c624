"""A launch judged without weights: what is known, what is not, and every reason at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ml4core import registry
from ml4core.api import Refusal, Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.planning.launch import judge
from ml4core.serving.dry_run import dry_run

pytestmark = pytest.mark.usefixtures("probed_once")

PUBLISHED = "mistralai/Mistral-Large-4-1T-A52B"
WHY = Refusal("cpu", "device", "it is not there", "another")


@pytest.fixture(scope="module")
def choice() -> registry.Choice:
    return registry.select("cpu")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, choice: registry.Choice) -> None:
    monkeypatch.setattr(registry, "select", lambda name, **more: choice)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(name: str, **more: Any) -> Any:
        raise Refused([WHY], what=f"--backend {name}")

    monkeypatch.setattr(registry, "select", select)


@pytest.mark.usefixtures("here")
def test_a_model_that_is_here_is_judged_by_its_headers() -> None:
    launch = judge(EngineArgs("ml4-tiny", backend="cpu"), {})
    launch.check()
    assert launch.refusals == ()
    assert launch.plan is not None
    assert launch.plan.fits
    assert launch.deployment is not None
    assert launch.deployment.model.draft is None  # nothing asks for it
    assert {"bf16", "fp8_block"} <= launch.deployment.weight_formats


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "format"),
    [(PUBLISHED, "fp8_block"), (f"{PUBLISHED}-NVFP4", "nvfp4"), (f"{PUBLISHED}-Quark", "mxfp4")],
)
def test_a_published_model_is_judged_by_its_shape(name: str, format: str) -> None:
    launch = judge(EngineArgs(name, backend="cpu", max_model_len=4096), {})
    assert launch.deployment is not None
    assert format in launch.deployment.weight_formats
    assert launch.refusals == ()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("images", [0, 1])
def test_an_encoder_is_needed_where_images_are_taken(images: int) -> None:
    limits: dict[str, Any] = {"limit_mm_per_prompt": {"image": images}} if images else {}
    launch = judge(EngineArgs(PUBLISHED, backend="cpu", max_model_len=4096, **limits), {})
    assert launch.deployment is not None
    assert ("stage:vision_encoder" in launch.deployment.needs) == bool(images)
    assert (launch.deployment.model.vision is not None) == bool(images)


@pytest.mark.usefixtures("here")
def test_another_model_would_have_to_be_downloaded_first() -> None:
    launch = judge(EngineArgs("someone/Something", backend="cpu"), {})
    assert (launch.deployment, launch.plan, launch.refusals) == (None, None, ())


@pytest.mark.usefixtures("here")
def test_reasons_of_every_part_stand_together() -> None:
    """Flags that no engine serves, a plan that can't be, a switch, and what the backend lacks."""
    config = {
        "decode_backend": "latency_specialized",
        "fp8_moe_requant": "mxfp4",
        "fp8_moe_requant_act": "a4w4",
    }
    args = EngineArgs(
        PUBLISHED,
        backend="cpu",
        pipeline_parallel_size=2,
        max_model_len=4096,
        additional_config=config,
    )
    launch = judge(args, {})
    assert launch.plan is None
    subjects = [refusal.subject for refusal in launch.refusals]
    assert set(subjects) == {
        "--pipeline-parallel-size",
        "parallel:pp",
        "VLLM_FP8_MOE_REQUANT_ACT a4w4",
        "feature:latency_decode",
    }
    with pytest.raises(Refused) as refused:
        launch.check()
    assert refused.value.refusals == launch.refusals


@pytest.mark.parametrize("room", [900, 4096])
@pytest.mark.parametrize(
    "place", [{"torch_device": "cuda:0"}, {"arch": "tpu7x"}], ids=["torch's", "not torch's"]
)
def test_a_devices_own_memory_is_planned(
    monkeypatch: pytest.MonkeyPatch, choice: registry.Choice, room: int, place: dict[str, str]
) -> None:
    """Weights that don't fit are a reason against the launch where that device is here. One that
    isn't torch's has its tensors as the host's, and memory of its own all the same.
    """
    device = replace(choice.device, name="A GPU", memory_bytes=room << 30, **place)
    found = replace(choice, devices=(replace(choice.devices[0], device=device),))
    monkeypatch.setattr(registry, "select", lambda name, **more: found)
    launch = judge(EngineArgs(PUBLISHED, backend="cpu", max_model_len=4096), {})
    assert launch.plan is not None
    assert launch.plan.options.memory == room << 30
    (refusal,) = launch.refusals or (None,)
    if room == 900:
        assert refusal is not None
        assert refusal.reason.startswith("weights take ")
        assert refusal.reason.endswith("and A GPU has 810.00 GiB to use")
        assert refusal.remedy.startswith("--tensor-parallel-size ")
        assert "--memory" not in refusal.remedy
    else:
        assert launch.plan.fits
        assert refusal is None


def test_the_hosts_memory_is_not_shared_out(choice: registry.Choice) -> None:
    launch = judge(EngineArgs(PUBLISHED, backend="cpu", max_model_len=4096), {})
    assert choice.device.memory_bytes > 0
    assert launch.plan is not None
    assert launch.plan.options.memory is None


@pytest.mark.usefixtures("missing")
def test_a_device_that_stands_in_refuses_nothing_by_its_memory(
    monkeypatch: pytest.MonkeyPatch, choice: registry.Choice
) -> None:
    device = replace(choice.device, torch_device="cuda:0", memory_bytes=64 << 30)
    monkeypatch.setattr(type(choice.backend), "reference_device", device, raising=False)
    launch = judge(EngineArgs(PUBLISHED, backend="cpu", max_model_len=4096), {})
    assert launch.refusals == (WHY,)
    assert launch.plan is not None
    assert not launch.plan.fits


@pytest.mark.usefixtures("here")
def test_a_backend_tells_what_it_compiles_for(
    monkeypatch: pytest.MonkeyPatch, choice: registry.Choice
) -> None:
    args = EngineArgs("ml4-tiny", backend="cpu", max_model_len=64)
    assert dry_run(args)["programs"] is None
    sizes = {"rows": [16, 32]}
    monkeypatch.setattr(
        type(choice.backend), "programs_for", lambda self, deployment: sizes, raising=False
    )
    assert dry_run(args)["programs"] == sizes


@pytest.mark.usefixtures("missing")
def test_without_a_device_to_judge_by_the_backend_alone_is_told() -> None:
    launch = judge(EngineArgs(PUBLISHED, backend="cpu"), {})
    assert (launch.choice, launch.deployment, launch.refusals) == (None, None, (WHY,))
    with pytest.raises(Refused, match=r"^--backend cpu is refused for 1 reason"):
        launch.check()
    assert judge(EngineArgs(PUBLISHED), {}).refusals == (WHY,)  # auto names none


@pytest.mark.usefixtures("missing")
def test_a_backend_names_the_device_that_stands_in(
    monkeypatch: pytest.MonkeyPatch, choice: registry.Choice
) -> None:
    backend = type(choice.backend)
    monkeypatch.setattr(backend, "reference_device", choice.device, raising=False)
    launch = judge(EngineArgs(PUBLISHED, backend="cpu", max_model_len=4096), {})
    assert launch.refusals == (WHY,)
    assert launch.choice is None
    assert launch.plan is not None
    assert launch.deployment is not None
    assert launch.deployment.device == choice.device


@pytest.mark.usefixtures("here")
def test_the_environment_is_part_of_it() -> None:
    launch = judge(EngineArgs("ml4-tiny", backend="cpu"), {"VLLM_FP8_MOE_REQUANT": "mxfp4"})
    assert launch.deployment is not None
    assert "mxfp4" in launch.deployment.weight_formats
    with pytest.raises(ArgumentsError, match="VLLM_FP8_MOE_REQUANT: 'x'; works: mxfp4"):
        judge(EngineArgs("ml4-tiny", backend="cpu"), {"VLLM_FP8_MOE_REQUANT": "x"})


@pytest.mark.usefixtures("here")
def test_a_dry_run_plans_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs("ml4-tiny", backend="cpu", max_model_len=64)
    before = dry_run(args)["plan"]["weights"]["rank"]
    monkeypatch.setenv("VLLM_FP8_MOE_REQUANT", "mxfp4")
    assert dry_run(args)["plan"]["weights"]["rank"] < before


def test_a_private_layout_is_served_without_a_plan(
    monkeypatch: pytest.MonkeyPatch, choice: registry.Choice
) -> None:
    own = "x-cpu/rows"
    args = EngineArgs("ml4-tiny", backend="cpu", max_model_len=64, kv_cache_dtype=own)
    monkeypatch.setattr(registry, "select", lambda name, **more: choice)
    assert {refusal.subject for refusal in judge(args, {}).refusals} == {f"kv:{own}"}
    found = choice.devices[0]
    words = found.capabilities.features | {f"kv:{own}"}
    capabilities = replace(found.capabilities, features=words)
    declaring = replace(choice, devices=(replace(found, capabilities=capabilities),))
    monkeypatch.setattr(registry, "select", lambda name, **more: declaring)
    launch = judge(args, {})
    assert (launch.plan, launch.refusals) == (None, ())
    assert launch.deployment is not None
    assert launch.deployment.kv_layout == own
    assert dry_run(args)["plan"] is None
