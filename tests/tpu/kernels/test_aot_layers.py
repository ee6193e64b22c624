"""Whole layers of the published model compiled for the 32 devices of its slice, without one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest

from ml4core.api import ModelSpec
from ml4core_tpu.aot import (
    Case,
    Compiled,
    Refused,
    compile_case,
    compile_program,
    devices_of,
)
from ml4core_tpu.aot_cases import HEADS, LATENT, ROPE, TENSOR, all_cases, array
from ml4core_tpu.aot_kernels import kernels_of
from ml4core_tpu.backend import HBM_BYTES
from ml4core_tpu.kernels.layer.aot_cases import (
    KINDS,
    PAGE,
    PAGES,
    REQUESTS,
    ROWS,
    WANTED,
    ends_case,
    layer_case,
    published_layer,
)
from ml4core_tpu.kernels.layer.attention import attend
from ml4core_tpu.kernels.layer.form import Caches, Form, Step, form_of
from ml4core_tpu.kernels.layer.mesh import mesh_of
from ml4core_tpu.kernels.rows import Rows

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="there is no libtpu: pip install libtpu==0.0.42.1"
)

SUMS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
"""Attention's sum over tensor ranks; rows of all hosts to the experts, back, and that sum."""
VMEM, SMEM = 64 << 20, 1 << 20
TEMPORARIES = 3 << 30
"""Of any bucket: plans reserve more for a step of 8,192 rows."""
OWNER, SHARER = KINDS[:2]
CHILD = Path(__file__).parents[1] / "compile_child.py"


@pytest.fixture(scope="module")
def mesh() -> Any:
    return mesh_of(devices_of("tpu7x:2x2x4"), 4, 8)


def compiled(case: Any) -> Compiled:
    return compile_program(case, case.arguments)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (OWNER, ROWS[0]),
        *((SHARER, rows) for rows in ROWS),
        *(pytest.param(OWNER, rows, marks=pytest.mark.slow) for rows in ROWS[1:]),
        *(pytest.param(kind, ROWS[0], marks=pytest.mark.slow) for kind in KINDS[2:]),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_layer_compiles_for_32_devices(mesh: Any, kind: Any, rows: int) -> None:
    found = compiled(layer_case(mesh, kind, rows))
    assert dict(found.collectives) == (SUMS if kind.moe else {"all-reduce": 2})
    assert not found.too_large
    assert found.temporaries < TEMPORARIES
    assert 0 < found.vmem < VMEM
    assert 0 < found.smem < SMEM
    token = (512 + 128 * kind.rope) * kind.owns_latent + 132 * kind.owns_index
    # Caches are written in place, and no other; the compiler rounds up to tiles.
    assert 0 <= found.aliased - PAGES * PAGE * token < 4096
    names = [kernel.name for kernel in found.kernels]
    assert names.count("sparse_mla") == 1
    assert names.count("fp8_experts") == 2 * kind.moe
    assert names.count("index_scores") == names.count("topk") == kind.owns_index
    assert names.count("write_latents") == kind.owns_latent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_layer_of_fp4_experts_compiles(mesh: Any) -> None:
    found = compiled(layer_case(mesh, KINDS[1], ROWS[0], experts="nvfp4"))
    assert [kernel.name for kernel in found.kernels].count("fp4_experts") == 2


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1500)
def test_large_sizes_compile_two_at_a_time() -> None:
    """On its own stacks libtpu's compiler ended the process at the second two of these."""
    sizes = ["8320", "8192", "4096", "2048"]
    command = [sys.executable, str(CHILD), *sizes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert set(ended.stdout.split()) == set(sizes)


def attends(rows: int, pages: int) -> Case:
    """Rows of a layer without an indexer over all that they see, with tables of ``pages`` pages."""
    layer = replace(published_layer(KINDS[1]), heads=HEADS // TENSOR, topk_source=None)
    form: Form = form_of(layer, Rows("tiles", LATENT, ROPE), target="tpu")
    row, table = array((rows,), "int32"), array((REQUESTS, pages), "int32")
    start = array((REQUESTS + 1,), "int32")
    pool = array((64, PAGE, LATENT // 128, 128), "uint8"), array((64, PAGE // 4, 4, 128), "uint8")
    return Case(
        f"attend/{rows} rows, {pages} pages",
        jax.jit(lambda step, caches, q: attend(form, step, caches, q, None)),
        (
            Step(row, row, start, row, table, table, row, row),
            Caches(pool, array((1,), "float32"), None),
            array((rows, layer.heads, LATENT + ROPE), "bfloat16"),
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rows", "pages"), [(16, 1024), (1024, 1024), (8192, 256)])
def test_attention_over_all_keys_fits_scalar_memory(mesh: Any, rows: int, pages: int) -> None:
    found = compile_case(attends(rows, pages), mesh.devices.flat[0])
    assert [kernel.name for kernel in found.kernels] == ["window_mla"]
    assert found.temporaries < 1 << 30


@pytest.mark.timeout(600)
def test_what_stands_around_layers_compiles(mesh: Any) -> None:
    found = compiled(ends_case(mesh, ROWS[0], WANTED[0]))
    assert dict(found.collectives) == {"all-reduce": 1, "all-gather": 1}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pools_that_no_device_holds_are_refused_by_the_memory(mesh: Any) -> None:
    pages = int(HBM_BYTES // (PAGE * 772)) + 1
    with pytest.raises(Refused, match="HBM"):
        compiled(layer_case(mesh, KINDS[0], ROWS[0], pages))


def test_layers_are_those_of_the_published_model(published: ModelSpec) -> None:
    """All but the scale of queries, which the published table leaves out."""
    for kind in KINDS:
        like = next(
            layer
            for layer in published.layers
            if bool(layer.moe) == kind.moe
            and (bool(layer.rope_dim), layer.owns_kv, layer.owns_index)
            == (kind.rope, kind.owns_latent, kind.owns_index)
        )
        mine = published_layer(kind)
        for name in ("hidden_size", "heads", "kv_lora_rank", "nope_dim", "rope_dim", "v_dim",
                     "softmax_scale", "moe", "dense_width"):  # fmt: skip
            assert getattr(mine, name) == getattr(like, name), name
        assert mine.kind == like.kind


def test_kernels_of_a_program_are_told() -> None:
    """One copy of a latent and one of a rope tile for the first block, and for the next."""
    case = next(case for case in all_cases() if case.name == "sparse_mla/16 rows/rope")
    (kernel,) = kernels_of(case.program.trace(*case.arguments, **case.options))
    assert (kernel.name, kernel.programs, kernel.copies) == ("sparse_mla", 16, 4)
    assert kernel.smem == 4 * 16 + 2 * 4 * 2048 + 2 * 4 * 2
    assert 2 * 2 * 128 * 4 * 128 < kernel.vmem < 1 << 20
