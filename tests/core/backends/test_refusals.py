"""What the hardware rules out, whatever kernels a version has."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

import ml4core_cuda
import ml4core_rocm
import ml4core_tpu
from ml4core.api import Capabilities, Deployment, Device, ModelSpec

PLUGINS = {"cuda": ml4core_cuda, "rocm": ml4core_rocm, "tpu": ml4core_tpu}
NOTHING = Capabilities(frozenset())


def subjects(backend: str, arch: str, **options: object) -> list[str]:
    device = Device("real", "a device", arch, "cpu")
    deployment = Deployment(
        cast(ModelSpec, None), device, kv_layout="bf16", index_layout="planar_f32"
    )
    deployment = replace(deployment, **options)  # type: ignore[arg-type]
    refusals = PLUGINS[backend].ml4core_refusals(deployment, NOTHING)
    assert all(refusal.source == backend and refusal.remedy for refusal in refusals)
    return [refusal.subject for refusal in refusals]


@pytest.mark.parametrize(
    ("backend", "arch", "layout", "served"),
    [
        ("cuda", "sm_90", "fp8_ds_mla", True),
        ("cuda", "sm_90", "e4m3", True),
        ("cuda", "sm_90", "e4m3fnuz", False),
        ("cuda", "sm_100", "e4m3fnuz", False),
        ("cuda", "sm_90", "nvfp4_ds_mla", False),
        ("cuda", "sm_100", "nvfp4_ds_mla", True),
        ("rocm", "gfx950", "e4m3", True),
        ("rocm", "gfx950", "e4m3fnuz", False),
        ("rocm", "gfx942", "e4m3", False),
        ("rocm", "gfx942", "e4m3fnuz", True),
        ("rocm", "gfx950", "fp8_ds_mla", False),
        ("rocm", "gfx942", "bf16", True),
        ("tpu", "tpu7x", "e4m3", True),
        ("tpu", "tpu7x", "e4m3fnuz", False),
        ("tpu", "tpu7x", "fp8_ds_mla", False),
        ("tpu", "tpu7x", "bf16", True),
    ],
)
def test_latent_layout(backend: str, arch: str, layout: str, served: bool) -> None:
    expected = [] if served else [f"kv:{layout}"]
    assert subjects(backend, arch, kv_layout=layout) == expected


@pytest.mark.parametrize(("arch", "served"), [("sm_90", False), ("sm_100", True)])
def test_packed_index_scales(arch: str, served: bool) -> None:
    expected = [] if served else ["index:planar_ue8m0x4"]
    assert subjects("cuda", arch, index_layout="planar_ue8m0x4") == expected


@pytest.mark.parametrize(("size", "served"), [(64, False), (128, True), (192, False), (1024, True)])
def test_index_pages_fill_the_lanes(size: int, served: bool) -> None:
    expected = [] if served else ["index:lane33_ue8m0"]
    assert subjects("tpu", "tpu7x", index_layout="lane33_ue8m0", block_size=size) == expected


def test_all_reasons_at_once() -> None:
    wrong = {"kv_layout": "e4m3fnuz", "index_layout": "planar_ue8m0x4"}
    assert subjects("cuda", "sm_90", **wrong) == ["kv:e4m3fnuz", "index:planar_ue8m0x4"]
