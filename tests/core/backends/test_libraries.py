"""What each plugin says of its libraries, with stand-ins of them on the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ml4core_cuda.libraries
import ml4core_rocm.libraries
from ml4core_tpu import libraries as tpu
from ml4core_tpu.driver import Chip

TORCH = """\
import warnings
__version__ = "2.13.0+test"
class version:
    cuda, hip = {cuda!r}, {hip!r}
class cuda:
    @staticmethod
    def is_available():
        {available}
"""
TRITON = "__version__ = '3.7.1'\ndef jit(f): return f\n"

Plugin = tuple[ModuleType, str, dict[str, str | None]]
"""Its module, what it says of a torch built for another vendor, and what its torch is built for."""

GPU_PLUGINS: dict[str, Plugin] = {
    "cuda": (ml4core_cuda.libraries, "built without CUDA", {"cuda": "13.0", "hip": None}),
    "rocm": (ml4core_rocm.libraries, "built without ROCm", {"cuda": None, "hip": "7.2"}),
}


@pytest.fixture(params=GPU_PLUGINS)
def plugin(request: pytest.FixtureRequest) -> Plugin:
    return GPU_PLUGINS[request.param]


def package(folder: Path, name: str, source: str, version: str = "") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source, "utf-8")
    if version:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, "utf-8")


def torch(folder: Path, available: str, **built: str | None) -> None:
    package(folder, "torch", TORCH.format(available=available, **built))


def test_torch_that_reaches_a_gpu(libraries: Path, plugin: Plugin) -> None:
    module, _, built = plugin
    torch(libraries, "return True", **built)
    assert module.find_torch() == ("torch 2.13.0+test", ())


def test_torch_that_is_built_for_something_else(libraries: Path, plugin: Plugin) -> None:
    module, fault, built = plugin
    torch(libraries, "return True", cuda=built["hip"], hip=built["cuda"])
    name, (refusal,) = module.find_torch()
    assert name == "torch 2.13.0+test"
    assert refusal.reason == f"torch 2.13.0+test is {fault}"
    assert "build of torch" in refusal.remedy


def test_torch_that_reaches_none_keeps_its_warning(libraries: Path, plugin: Plugin) -> None:
    module, _, built = plugin
    torch(libraries, "warnings.warn('driver too old (found 12020)'); return False", **built)
    _, (refusal,) = module.find_torch()
    assert "reaches no GPU: driver too old (found 12020)" in refusal.reason


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise OSError('libc10.so: undefined symbol: x')", "OSError: libc10.so: undefined symbol"),
        ("", "AttributeError: module 'torch' has no attribute '__version__'"),
    ],
)
def test_torch_that_is_broken(libraries: Path, plugin: Plugin, source: str, text: str) -> None:
    package(libraries, "torch", source)
    name, (refusal,) = plugin[0].find_torch()
    assert name == ""
    assert f"can't be used: {text}" in refusal.reason


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise ImportError('libtriton.so: cannot open')", "ImportError: libtriton.so: cannot"),
        ("__version__ = '3.7.1'", "has no attribute 'jit'"),
    ],
)
def test_triton_without_what_it_should_hold(
    libraries: Path, plugin: Plugin, source: str, text: str
) -> None:
    """B124: what counts is the symbol, not that something of that name is installed."""
    package(libraries, "triton", source)
    name, (refusal,) = plugin[0].find_triton()
    assert (name, refusal.subject) == ("", "triton")
    assert text in refusal.reason


def test_triton(libraries: Path, plugin: Plugin) -> None:
    package(libraries, "triton", TRITON)
    assert plugin[0].find_triton() == ("triton 3.7.1", ())


def test_optional_libraries_are_listed_and_not_imported(libraries: Path) -> None:
    package(libraries, "flash_mla", "raise AssertionError('imported')", version="1.2")
    package(libraries, "deep_gemm", "raise AssertionError('imported')")
    found = list(ml4core_cuda.libraries.find_optional())
    assert found[0] == "flash_mla 1.2"
    assert found[2] == "deep_gemm of unknown version"
    package(libraries, "flydsl", "raise AssertionError('imported')", version="0.3.1")
    assert list(ml4core_rocm.libraries.find_optional())[1] == "flydsl 0.3.1"


def test_jax_is_imported_without_the_metadata_server(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os\nassert os.environ['TPU_SKIP_MDS_QUERY'] == '1'\n__version__ = '0.10.2'\n"
    package(libraries, "jax", source)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    assert tpu.find_runtime() == ("jax 0.10.2", ())
    assert "TPU_SKIP_MDS_QUERY" not in os.environ


def test_the_operators_own_setting_comes_back(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(libraries, "jax", "raise ImportError('jaxlib is too old')")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "0")
    _, (refusal,) = tpu.find_runtime()
    assert "ImportError: jaxlib is too old" in refusal.reason
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "0"


def test_another_runtime_serves_in_the_place_of_jax(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    package(libraries, "torch_xla", "raise AssertionError('imported')", version="2.9.0")
    assert tpu.find_runtime() == ("", ())
    assert "torch_xla 2.9.0" in list(tpu.find_optional())


@pytest.mark.parametrize(
    ("version", "arch", "served"),
    [
        ("0.0.24", "tpu7x", False),
        ("0.0.27", "tpu7x", True),
        ("0.0.42.1", "tpu7x", True),
        ("0.0.21", "tpu6e", True),
    ],
)
def test_libtpu_knows_the_chip(libraries: Path, version: str, arch: str, served: bool) -> None:
    package(libraries, "libtpu", "", version=version)
    name, refusals = tpu.find_libtpu((Chip(0, arch),))
    assert name == f"libtpu {version}"
    # Whether it goes with the JAX that is installed here is another matter.
    reasons = [refusal.reason for refusal in refusals if "know tpu" in refusal.reason]
    assert reasons == ([] if served else [f"libtpu {version} does not know tpu7x"])
