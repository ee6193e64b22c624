"""Kernels compiled for tpu7x by libtpu, without one: what fits, and what is refused by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.aot import Case, Refused, compile_case, devices_of
from ml4core_tpu.aot_cases import all_cases, array

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="there is no libtpu: pip install libtpu==0.0.42.1"
)

QUICK = (
    "sparse_mla/16 rows/rope",
    "sparse_mla/16 rows/nope",
    "index_scores/16 x 1 rows",
    "topk/16 rows",
    "fp8_matmul/16 rows",
    "fp8_experts/64 rows",
    "fp4_experts/16 rows/nvfp4",
    "window_mla/16 x 4 rows/bf16",
    "write_latents/16 rows/rope",
    "write_latents/16 rows/nope",
    "write_index_keys/16 rows",
)


@pytest.fixture(scope="module")
def device() -> Any:
    return devices_of("tpu7x:2x2x1")[0]


CASES = {case.name: case for case in all_cases()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_compiles(name: str, device: Any) -> None:
    """The smallest sizes of each kernel; `ml4 tpu aot` prints all."""
    case = CASES[name]
    found = compile_case(case, device)
    assert 0 < found.hbm < 2**30
    if case.name.startswith("write"):
        caches = [one for one in case.arguments[:2] if one is not None and len(one.shape) == 4]
        assert found.aliased == sum(one.size for one in caches)  # in place
    assert not found.collectives


def test_a_router_moves_its_rows_and_little_else(device: Any) -> None:
    """To look odds up by a gather moved forty times as much."""
    case = CASES["router/4096 rows"]
    assert compile_case(case, device).counted < 2 * case.least_bytes


def test_the_published_slice_has_32_devices() -> None:
    devices = devices_of("tpu7x:2x2x4")
    assert len(devices) == 32
    assert [device.process_index for device in devices] == sorted([0, 1, 2, 3] * 8)


def test_an_unknown_slice_is_named() -> None:
    with pytest.raises(ValueError, match="knows no slice 'v7x:2x2x1'"):
        devices_of("v7x:2x2x1")


def copying(source: Any, out: Any, *scratch: Any) -> None:
    out[...] = source[...]


def pallas(shape: tuple[int, int], **options: Any) -> Any:
    call = pl.pallas_call(copying, out_shape=jax.ShapeDtypeStruct(shape, jnp.float32), **options)
    return jax.jit(call)


def smem_table() -> Any:
    block = pl.BlockSpec((8, 128), lambda i, table: (0, 0))

    def kernel(table: Any, source: Any, out: Any) -> None:
        out[...] = source[...] + table[0, 0].astype(jnp.float32)

    return jax.jit(
        pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(1,), in_specs=[block], out_specs=block
            ),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        )
    )


NEGATIVE = {
    "VMEM": lambda: Case(
        "scratch",
        pallas(
            (8, 128),
            scratch_shapes=[pltpu.VMEM((70 << 11, 128), jnp.float32)],
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=100 << 20),
        ),
        (array((8, 128), "float32"),),
    ),
    "SMEM": lambda: Case(
        "table", smem_table(), (array((130, 2048), "int32"), array((8, 128), "float32"))
    ),
    "HBM": lambda: Case(
        "product", jax.jit(lambda x: x @ x.T), (array((200_000, 65_536), "float32"),)
    ),
    "divisible by 8 and 128": lambda: Case(
        "blocks",
        pallas(
            (12, 200),
            grid=(4,),
            in_specs=[pl.BlockSpec((3, 100), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((3, 100), lambda i: (i, 0)),
        ),
        (array((12, 200), "float32"),),
    ),
}


@pytest.mark.parametrize("what", NEGATIVE)
def test_what_does_not_fit_is_refused_by_name(what: str, device: Any) -> None:
    with pytest.raises(Refused, match=what) as refused:
        compile_case(NEGATIVE[what](), device)
    assert refused.value.refusal.source == "tpu"


def test_a_fitting_table_compiles(device: Any) -> None:
    table = array((64, 2048), "int32")
    case = Case("table", smem_table(), (table, array((8, 128), "float32")))
    assert compile_case(case, device).seconds > 0
