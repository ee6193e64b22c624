"""What is compiled is kept under keys that don't depend on where the source lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.experimental.compilation_cache.compilation_cache
import jax.numpy as jnp
import pytest

from ml4core.api import Deployment, Device, ModelSpec
from ml4core_tpu import compilation
from ml4core_tpu.aot import SLICE, compile_case, devices_of
from ml4core_tpu.aot_cases import all_cases
from ml4core_tpu.compilation import SETTINGS, compilation_cache

SOURCE = """
import jax
import jax.experimental.compilation_cache.compilation_cache
import jax.numpy as jnp
from jax.experimental import pallas as pl

def kernel(source, out):
    out[...] = source[...] * 2.0

def program(interpret):
    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = pl.pallas_call(kernel, out_shape=shape, interpret=interpret, name="doubled")
    return jax.jit(call)
"""
SHAPE = jax.ShapeDtypeStruct((8, 128), jnp.float32)


@pytest.fixture
def folder(tmp_path: Path, device: Device, published: ModelSpec) -> Iterator[Path]:
    names = ("jax_compilation_cache_dir", *SETTINGS)
    before = {name: getattr(jax.config, name) for name in names}
    deployment = Deployment(published, device)
    own = {"tpu": {"compilation_cache": str(tmp_path)}}
    compilation_cache(replace(deployment, additional_config=own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def from_(path: str, lines_before: int) -> Callable[[bool], Any]:
    """The program of a module that lies there."""
    space: dict[str, Any] = {"__name__": "kernels"}
    exec(compile("\n" * lines_before + SOURCE, path, "exec"), space)
    made: Callable[[bool], Any] = space["program"]
    return made


def test_programs_of_the_host_are_found_again(folder: Path) -> None:
    for path, lines in (("/one/kernels.py", 0), ("/two/kernels.py", 30)):
        from_(path, lines)(True).trace(SHAPE).lower().compile()
    assert len(list(folder.glob("*-cache"))) == 1


def test_kernels_for_tpus_hold_no_lines_of_their_source(folder: Path) -> None:
    first, second = (
        from_(path, lines)(False).trace(SHAPE).lower(lowering_platforms=("tpu",)).as_text()
        for path, lines in (("/one/kernels.py", 0), ("/two/kernels.py", 30))
    )
    assert "tpu_custom_call" in first
    assert first == second


def test_another_folder_is_used_from_then_on_and_none_is_none(
    folder: Path, device: Device, published: ModelSpec
) -> None:
    def compiled(name: str, factor: int) -> int:
        own = {"tpu": {"compilation_cache": name}}
        compilation_cache(Deployment(published, device, additional_config=own))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.jit(lambda x: x * factor).trace(SHAPE).lower().compile()
        return len(list(folder.rglob("*-cache")))

    other = folder / "other"
    assert compiled(str(folder), 3) == 1
    assert compiled(str(other), 5) == 2
    assert len(list(other.glob("*-cache"))) == 1
    assert compiled("", 7) == 2
    assert compiled(str(folder), 7) == 3


def test_a_folder_that_jax_was_told_of_stays(
    folder: Path, device: Device, published: ModelSpec
) -> None:
    compilation_cache(Deployment(published, device))
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_programs_for_a_slice_that_is_not_there_are_not_kept(folder: Path) -> None:
    """JAX could store them, and fails when it reads them back."""
    pytest.importorskip("libtpu")
    case = next(case for case in all_cases() if case.name == "router/64 rows")
    (chip, *_) = devices_of(SLICE)
    for _ in range(2):
        compile_case(case, chip)
    assert not list(folder.glob("*-cache"))
    from_("/one/kernels.py", 0)(True).trace(SHAPE).lower().compile()
    assert len(list(folder.glob("*-cache"))) == 1, "the host's are kept again"


def test_a_process_does_not_keep_programs_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory mappings, of which a process has 65,530: a closed session gives them
    back once they are many.
    """
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system doesn't tell of a process's mappings")
    dropped: list[bool] = []
    monkeypatch.setattr(compilation, "MOST_MAPPINGS", 2**31)
    monkeypatch.setattr(jax, "clear_caches", lambda: dropped.append(True))
    compilation.release_programs()
    assert not dropped
    monkeypatch.setattr(compilation, "MOST_MAPPINGS", 0)
    compilation.release_programs()
    assert dropped == [True]
