"""The rocm backend on any machine: its devices, what it declares by architecture, its session."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ml4core.api import Capabilities, Deployment, Device, Refused, Weight
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_rocm import backend, libraries
from ml4core_rocm.backend import RocmBackend
from ml4core_rocm.capabilities import LATENT, capabilities
from ml4core_rocm.devices import FLAVOUR, REFERENCE, fp8_flavour
from ml4core_rocm.driver import Gpu
from ml4core_rocm.session import RocmSession

FAKE = Device("fake", "torch on the host", "gfx950", "cpu")
MI300X = replace(REFERENCE, arch="gfx942", name="AMD Instinct MI300X")


def found(
    monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, torch: str = "", triton: str = "", other: str = ""
) -> Any:
    monkeypatch.setattr(backend, "find_gpus", lambda: (gpus, ()))
    monkeypatch.setattr(backend, "find_torch", lambda: (torch, ()))
    monkeypatch.setattr(backend, "find_triton", lambda: (triton, ()))
    monkeypatch.setattr(backend, "hip_version", lambda: "7.2")
    monkeypatch.setattr(backend, "find_other_gpu", lambda: other)
    return RocmBackend().probe()


def test_each_gpu_is_a_device_and_others_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (
        Gpu(0, "gfx950", 288 << 30, 256),
        Gpu(1, "gfx90a", 64 << 30, 104),
        Gpu(2, "gfx942", 192 << 30),
    )
    answer = found(monkeypatch, *gpus, torch="torch 2.13", triton="triton 3.7.1")
    real = [device for device in answer.devices if device.kind == "real"]
    assert [(d.arch, d.torch_device, d.details.get("cus")) for d in real] == [
        ("gfx950", "cuda:0", "256"),
        ("gfx942", "cuda:2", None),
    ]
    assert {d.details["triton"] for d in real} == {"triton 3.7.1"}
    assert {d.details["hip"] for d in real} == {"7.2"}
    (refusal,) = answer.refusals
    assert refusal.subject == "GPU 1"
    assert "gfx90a" in refusal.reason
    assert refusal.remedy == "a GPU of gfx942, gfx950"


@pytest.mark.parametrize(
    ("torch", "triton", "kinds"),
    [
        ("torch 2.13", "triton 3.6", ["interpreted", "fake"]),
        ("torch 2.13", "", ["fake"]),
        ("", "triton 3.6", []),
    ],
)
def test_kinds_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, torch: str, triton: str, kinds: list[str]
) -> None:
    answer = found(monkeypatch, torch=torch, triton=triton)
    assert [device.kind for device in answer.devices] == kinds
    assert {device.torch_device for device in answer.devices} <= {"cpu"}


def test_a_gpu_of_another_maker_checks_sources_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, deploy: Callable[..., Deployment]
) -> None:
    monkeypatch.setattr(backend, "compiler_refusals", lambda name: ())
    answer = found(monkeypatch, torch="torch 2.13", triton="triton 3.6", other="a chip")
    *_, device = answer.devices
    assert (device.kind, device.arch, device.torch_device) == ("source", "gfx950", "cuda:0")
    assert device.name == "sources of gfx950's kernels, compiled for a chip"
    declared, interpreted = (capabilities(replace(device, kind=k)) for k in
                             ("source", "interpreted"))  # fmt: skip
    assert declared == interpreted
    assert list(backend._device_refusals(device)) == []
    monkeypatch.setattr(backend, "find_other_gpu", lambda: "")
    with pytest.raises(Refused, match="reaches no GPU beside AMD's"):
        RocmBackend().open(deploy(device=device))


def test_what_triton_fuses_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases differ in what they do where nothing is, and results with them."""
    variable = "TRITON_DEFAULT_FP_FUSION"
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
    assert libraries.find_triton()[0].startswith("triton ")
    assert os.environ[variable] == "1"
    stated = {variable: "0"}
    libraries.settle_fusion(stated)
    assert stated == {variable: "0"}


def test_the_flavour_of_fp8_goes_by_architecture_and_is_never_assumed() -> None:
    mi350, mi300 = capabilities(REFERENCE), capabilities(MI300X)
    assert (mi350.defaults["kv"], mi300.defaults["kv"]) == ("e4m3", "e4m3fnuz")
    assert (mi350.defaults["fp8"], mi300.defaults["fp8"]) == ("e4m3", "e4m3fnuz")
    assert "kv:e4m3fnuz" not in mi350
    assert "kv:e4m3" not in mi300
    assert capabilities(replace(REFERENCE, arch="gfx90a")) == Capabilities(frozenset())
    with pytest.raises(KeyError, match=r"gfx90a.*not known"):
        fp8_flavour("gfx90a")
    for arch, flavour in FLAVOUR.items():
        assert fp8_flavour(arch) == latent_layout(LATENT[flavour]).fp8


def test_each_default_is_declared_and_kinds_differ_in_what_a_device_does() -> None:
    real = capabilities(REFERENCE)
    assert all(f"{key}:{real.defaults[key]}" in real for key in ("kv", "index"))
    interpreted = capabilities(replace(FAKE, kind="interpreted"))
    assert real.features - interpreted.features == {
        "feature:async_scheduling",
        "feature:graph_capture",
    }
    acts = {"act:fp8_block", "act:mxfp4"}
    assert not acts & capabilities(FAKE).features  # torch on the host quantises no input
    assert acts <= real.features
    assert "act:mxfp4" not in capabilities(MI300X)  # no scaled matrix instruction there


def test_open_refuses_all_at_once(deploy: Callable[..., Deployment]) -> None:
    wanted = deploy(
        device=replace(REFERENCE, arch="gfx90a"),
        kv_layout="fp8_ds_mla",
        needs=frozenset({"kv:nvfp4_ds_mla", "parallel:dcp"}),
    )
    with pytest.raises(Refused) as refused:
        RocmBackend().open(wanted)
    subjects = [refusal.subject for refusal in refused.value.refusals]
    assert subjects == ["device", "kv:fp8_ds_mla", "kv:nvfp4_ds_mla", "parallel:dcp"]


@pytest.fixture
def session(deploy: Callable[..., Deployment]) -> RocmSession:
    opened = RocmBackend().open(deploy(device=FAKE))
    assert isinstance(opened, RocmSession)
    return opened


def test_bytes_of_caches(session: RocmSession) -> None:
    for id, size in (("e4m3", 576), ("bf16", 1152)):
        cache = session.alloc_kv(latent_layout(id), 3, 64)
        assert cache.nbytes == 3 * 64 * size
        assert (cache.scale is not None) == (id == "e4m3")
    assert session.alloc_kv(index_layout("tiled16_f32"), 3, 64).nbytes == 3 * 64 * 132
    with pytest.raises(ValueError, match="multiple of 16"):
        session.alloc_kv(index_layout("tiled16_f32"), 3, 24)


def test_weights_are_brought_once_and_quantised_ones_stay_so(session: RocmSession) -> None:
    table = torch.ones(8, 4)
    tied = Weight("fp32", (8, 4), {"data": table})
    codes = torch.zeros(8, 16, dtype=torch.uint8)
    packed = Weight("mxfp4", (8, 32), {"data": codes, "scale": codes[:, :1]})
    prepared = session.prepare_weights({"embedding": table, "output": tied, "wo": packed}, None)
    output, wo = prepared["output"], prepared["wo"]
    assert isinstance(output, Weight)
    assert isinstance(wo, Weight)
    assert output.format == "bf16"
    assert output.data is prepared["embedding"]
    assert wo.format == "mxfp4"
    assert wo.data.data_ptr() == codes.data_ptr()  # where it lies already, it stays
    gate = session.prepare_weights({"gate": tied}, None)["gate"]
    assert isinstance(gate, Weight)
    assert gate.format == "fp32"
