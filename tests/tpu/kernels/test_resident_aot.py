"""What a session asks of TPUs beside its layers, compiled for tpu7x without one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ml4core_tpu.aot import devices_of
from ml4core_tpu.aot_cases import HEADS, HIDDEN, INDEX_HEADS, LATENT, ROPE, SCALE, TENSOR, TOPK
from ml4core_tpu.compilation import without_cache
from ml4core_tpu.kernels.layer.form import Matrix
from ml4core_tpu.kernels.layer.mesh import mesh_of
from ml4core_tpu.kernels.resident import between, op_programs
from ml4core_tpu.kernels.resident.devices import Devices
from ml4core_tpu.kernels.rows import Rows

pytestmark = [
    pytest.mark.skipif(find_spec("libtpu") is None, reason="there is no libtpu"),
    pytest.mark.timeout(600),
]
ROWS, REQUESTS, PAGES, PAGE, NEAR, VOCABULARY = 32, 8, 64, 1024, 4, 131_072
FORM = op_programs.ProductForm("fp8_tensor", "tpu")
BF16 = Rows("wide", LATENT, ROPE)
"""Of the drafter's caches: bits of bfloat16."""
TILES = Rows("tiles", LATENT, ROPE)


@pytest.fixture(scope="module")
def devices() -> Devices:
    return Devices(mesh_of(devices_of("tpu7x:2x2x1"), 1, TENSOR), "tpu")


class Shapes:
    """Arrays of the first device, or of all."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def __call__(self, dtype: str, *shape: int, place: Any = None) -> Any:
        placed = place or self._devices.first
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=placed)

    def local(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self._devices.local, PartitionSpec(*spec))


def compiled(program: Any, *arguments: Any, **static: Any) -> Any:
    with without_cache():
        return program.trace(*arguments, **static).lower(lowering_platforms=("tpu",)).compile()


def in_place(program: Any) -> int:
    return int(program.memory_analysis().alias_size_in_bytes)


def test_logits_are_made_by_all_devices_of_a_host(devices: Devices) -> None:
    """Each from its rows of the output, and none sends anything."""
    of = Shapes(devices)
    weight = Matrix({"data": of("bfloat16", VOCABULARY, HIDDEN, place=of.local("tensor"))}, "bf16")
    rows = of("bfloat16", ROWS, HIDDEN, place=of.local())
    found = compiled(op_programs.cut_gemm, FORM, devices.local, rows, weight, "float32")
    assert found.memory_analysis().argument_size_in_bytes < 1.1 * VOCABULARY * HIDDEN * 2 / TENSOR
    assert not any(one in found.as_text() for one in ("all-gather", "all-reduce"))


def test_a_drafters_writes_are_in_place(devices: Devices) -> None:
    of = Shapes(devices)
    cache = (of("int16", PAGES, PAGE, LATENT + ROPE),)
    row = (of("float32", 1), of("int32", ROWS), of("bfloat16", ROWS, LATENT))
    tail = of("bfloat16", ROWS, ROPE)
    found = compiled(op_programs.kv_write, cache, *row, tail, rows=BF16, target="tpu")
    assert in_place(found) >= PAGES * PAGE * (LATENT + ROPE) * 2


def test_eager_writes_are_in_place(devices: Devices) -> None:
    of = Shapes(devices)
    tiles = of("uint8", PAGES, PAGE, 4, 128), of("uint8", PAGES, PAGE // 4, 4, 128)
    row = (of("float32", 1), of("int32", ROWS), of("bfloat16", ROWS, LATENT))
    tail = of("bfloat16", ROWS, ROPE)
    found = compiled(op_programs.kv_write, tiles, *row, tail, rows=TILES, target="tpu")
    assert in_place(found) == PAGES * PAGE * 640
    keys = (of("uint8", PAGES, 33, 4, PAGE),)
    given = (keys, of("int32", ROWS), of("float32", ROWS, 128))
    assert in_place(compiled(op_programs.indexer_write, *given, target="tpu")) == PAGES * PAGE * 132


def test_a_drafters_window_is_looked_at(devices: Devices) -> None:
    of = Shapes(devices)
    given = (
        of("bfloat16", ROWS, HEADS, LATENT + ROPE),
        (of("int16", PAGES, PAGE, LATENT + ROPE),),
        of("float32", 1),
        of("int32", REQUESTS, NEAR),
        of("int32", REQUESTS + 1),
        of("int32", ROWS),
    )
    static = {"rows": BF16, "max_rows": 4, "scale": SCALE, "window": 2051, "target": "tpu"}
    assert "tpu_custom_call" in compiled(op_programs.window_mla, *given, **static).as_text()


def test_eager_attention_compiles(devices: Devices) -> None:
    of = Shapes(devices)
    tiles = of("uint8", PAGES, PAGE, 4, 128), of("uint8", PAGES, PAGE // 4, 4, 128)
    given = (of("bfloat16", ROWS, HEADS, LATENT + ROPE), tiles, of("float32", 1))
    chosen = (of("int32", ROWS, TOPK), of("int32", ROWS))
    static = {"rows": TILES, "scale": SCALE, "target": "tpu"}
    assert (
        "tpu_custom_call" in compiled(op_programs.sparse_mla, *given, *chosen, **static).as_text()
    )
    paged = (of("int32", REQUESTS, NEAR), of("int32", REQUESTS + 1), of("int32", ROWS))
    asked = (of("float32", ROWS, INDEX_HEADS, 128), of("float32", ROWS, INDEX_HEADS))
    keys = of("uint8", PAGES, 33, 4, PAGE)
    more = {"max_rows": 4, "scale": 0.1, "target": "tpu"}
    assert compiled(op_programs.indexer_logits, *asked, keys, *paged, **more)
    assert compiled(op_programs.gather_kv, tiles, of("float32", 1), of("int32", ROWS), rows=TILES)


def test_what_core_asks_between_layers_compiles(devices: Devices) -> None:
    of = Shapes(devices)
    rows, flags = of("bfloat16", 8192, HIDDEN), of("bool", 8192)
    assert compiled(between.taken, rows, of("int32", ROWS))
    assert compiled(between.any_of, flags, of("int32"))
    assert compiled(between.side_by_side, (rows, rows))
    for function in (between.both, between.either):
        assert compiled(function, flags, flags)
