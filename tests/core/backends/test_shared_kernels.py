"""What the two backends of GPUs take from one library."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import ml4core_triton
from ml4core.api import OPS
from ml4core_cuda.capabilities import LATENTS
from ml4core_cuda.tuned import SOURCES, _files, source_of
from ml4core_triton.kernels.target import HOST, Target, ahead, target_of, units_of
from ml4core_triton.ops import load, served

BACKENDS = ("ml4core_cuda", "ml4core_rocm")


@pytest.mark.parametrize("package", BACKENDS)
def test_every_op_has_a_kernel(package: str) -> None:
    assert set(served(package)) == set(OPS)


@pytest.mark.parametrize("package", BACKENDS)
def test_finding_kernels_imports_none(package: str) -> None:
    code = (
        "import sys\n"
        "from ml4core_triton.ops import served\n"
        f"served({package!r})\n"
        "print(sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_file_of_the_backend_goes_before_the_shared_one() -> None:
    pytest.importorskip("triton")
    own, shared = load("topk", "ml4core_cuda"), load("topk", "ml4core_rocm")
    assert own.__module__ == "ml4core_cuda.kernels.topk"
    assert shared.__module__ == "ml4core_triton.kernels.topk"


def test_an_op_that_nothing_serves_is_named() -> None:
    with pytest.raises(KeyError, match=r"serves no conv3d; works: .*rms_norm"):
        load("conv3d", "ml4core_rocm")


def test_a_target_lasts_as_long_as_it_is_asked_for() -> None:
    meta, host = torch.device("meta"), torch.device("cpu")
    assert target_of(meta) == target_of(host) == HOST
    wanted = Target("gfx950", 256, lanes=64)
    with ahead(wanted):
        assert target_of(meta) == wanted
        # Interpreted kernels are made for the architecture, and few of their programs are enough.
        assert (target_of(host).arch, units_of(host)) == ("gfx950", HOST.units)
    assert target_of(meta) == HOST


def test_a_flavour_of_fp8_is_told_by_the_architecture() -> None:
    pytest.importorskip("triton")
    from ml4core_triton.kernels.latents import LAYOUTS, foreign

    assert {name for name in LAYOUTS if not foreign(name, "sm_90")} == set(LATENTS)
    assert not any(foreign(name, arch) for name in LAYOUTS for arch in ("gfx942", "gfx950", ""))


def test_sizes_depend_on_shared_sources_too() -> None:
    assert all(len(source_of(kernel)) == 12 for kernel in SOURCES)
    folders = [path.parts[-3] for path in _files("topk") if path.name == "topk.py"]
    assert folders == ["ml4core_cuda", "ml4core_triton"]


def test_it_is_no_plugin() -> None:
    assert not hasattr(ml4core_triton, "ml4core_backends")
