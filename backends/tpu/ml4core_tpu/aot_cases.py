"""Programs to compile ahead: each kernel at the shapes that a device meets in the published layout.

Mistral Large 4 on 16 chips of tpu7x, which are 32 devices: 64 heads over the 8 devices of a host,
128 experts over all, latents whole on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ml4core_tpu.aot import Case

HIDDEN, HEADS, LATENT, ROPE = 6144, 64, 512, 64
INDEX_HEADS, TOPK, EXPERTS, EXPERT_WIDTH = 32, 2048, 128, 6144
TENSOR, DEVICES = 8, 32
PAGE, PAGES, CONTEXT_PAGES = 256, 1024, 128
"""Tokens a page, pages of a pool, and pages of a request: 32,768 tokens."""
SCALE = (LATENT + ROPE) ** -0.5
_WINDOW = 2048
_DRAFT_PAGE = 64


def all_cases() -> Iterator[Case]:
    """Every kernel, at the smallest, a middle and the largest count of rows."""
    for rows in (16, 64, 128):
        yield _sparse(rows, LATENT + ROPE)
        yield _scores(rows, rows, 1)
        yield _topk(rows)
        yield _product(rows)
        yield _experts(rows, "fp8")
        yield _experts(rows, "nvfp4")
    yield _sparse(16, LATENT)
    yield _scores(64, 16, 4)
    yield _scores(256, 1, 256)
    yield _sparse(1024, LATENT + ROPE)
    yield _topk(1024)
    yield _product(1024)
    yield _experts(64, "mxfp4")
    yield _window(64, 16, 4)
    yield _window(256, 1, 256, draft=False)
    yield from (_write(rows, rope) for rows in (16, 1024) for rope in (True, False))
    yield from (_index_write(rows) for rows in (16, 1024))
    yield from map(_router, (64, 4096))


def array(shape: tuple[int, ...], dtype: str) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _pool() -> tuple[Any, Any]:
    latents = array((PAGES, PAGE, LATENT // 128, 128), "uint8")
    return latents, array((PAGES, PAGE // 4, 4, 128), "uint8")


def _tables(requests: int, rows: int, pages: int) -> tuple[Any, Any, Any]:
    return (
        array((requests, pages), "int32"),
        array((requests + 1,), "int32"),
        array((rows,), "int32"),
    )


def _sparse(rows: int, width: int) -> Case:
    from ml4core_tpu.kernels.sparse_mla import sparse_mla

    heads = HEADS // TENSOR
    latents, ropes = _pool()
    row = LATENT + (4 * 128 if width > LATENT else 0)  # a rope part comes with its whole tile
    return Case(
        f"sparse_mla/{rows} rows/{'rope' if width > LATENT else 'nope'}",
        sparse_mla,
        (
            array((rows, heads, width), "bfloat16"),
            latents,
            ropes if width > LATENT else None,
            array((1,), "float32"),
            array((rows, TOPK), "int32"),
            array((rows,), "int32"),
        ),
        {"scale": SCALE, "target": "tpu"},
        rows * (TOPK * row + heads * (width + LATENT) * 2),
        2 * rows * heads * TOPK * (width + LATENT),
    )


def _window(rows: int, requests: int, each: int, draft: bool = True) -> Case:
    from ml4core_tpu.kernels.rows import Rows
    from ml4core_tpu.kernels.window_mla import window_mla

    heads = HEADS // TENSOR
    width = LATENT + ROPE
    if draft:
        parts: tuple[Any, ...] = (array((PAGES, _DRAFT_PAGE, width), "bfloat16"),)
        page, token = _DRAFT_PAGE, 2 * width
    else:
        parts, page, token = _pool(), PAGE, LATENT + 128
    pages = -(-_WINDOW // page) + 1
    return Case(
        f"window_mla/{requests} x {each} rows/{'bf16' if draft else 'tiles'}",
        window_mla,
        (
            array((rows, heads, width), "bfloat16"),
            parts,
            array((1,), "float32"),
            *_tables(requests, rows, pages),
        ),
        {
            "rows": Rows("wide" if draft else "tiles", LATENT, ROPE),
            "max_rows": each,
            "scale": SCALE,
            "window": _WINDOW,
            "target": "tpu",
        },
        requests * pages * page * token + rows * heads * (width + LATENT) * 2,
        2 * rows * heads * _WINDOW * (width + LATENT),
    )


def _scores(rows: int, requests: int, each: int) -> Case:
    from ml4core_tpu.kernels.index_scores import index_scores

    keys = CONTEXT_PAGES * PAGE
    return Case(
        f"index_scores/{requests} x {each} rows",
        index_scores,
        (
            array((rows, INDEX_HEADS, 128), "bfloat16"),
            array((rows, INDEX_HEADS), "float32"),
            array((PAGES, 33, 4, PAGE), "uint8"),
            *_tables(requests, rows, CONTEXT_PAGES),
        ),
        {"max_rows": each, "scale": 128**-0.5, "target": "tpu"},
        requests * keys * 132 + rows * keys * 4,
        2 * rows * INDEX_HEADS * 128 * keys,
    )


def _topk(rows: int) -> Case:
    from ml4core_tpu.kernels.topk import topk

    keys = CONTEXT_PAGES * PAGE
    return Case(
        f"topk/{rows} rows",
        topk,
        (array((rows, keys), "float32"), array((rows,), "int32")),
        {"k": TOPK, "target": "tpu"},
        rows * (keys + TOPK) * 4,
    )


def _product(rows: int) -> Case:
    from ml4core_tpu.kernels.fp8_matmul import fp8_matmul

    columns = 2 * EXPERT_WIDTH // TENSOR  # gate and up of the shared expert
    return Case(
        f"fp8_matmul/{rows} rows",
        fp8_matmul,
        (
            array((rows, HIDDEN), "bfloat16"),
            array((columns, HIDDEN), "uint8"),
            array((columns // 128, HIDDEN // 128), "float32"),
        ),
        {"out_dtype": "bfloat16", "quantize": True, "target": "tpu"},
        columns * HIDDEN + rows * (HIDDEN + columns) * 2,
        2 * rows * columns * HIDDEN,
        fp8=True,
    )


def _experts(rows: int, format: str) -> Case:
    """Of the whole slice's rows, in which a device's experts have their share of the choices."""
    from ml4core_tpu.kernels import moe
    from ml4core_tpu.kernels.fp4_experts import MXFP4, NVFP4

    experts, topk = EXPERTS // DEVICES, 4
    fp4 = {"nvfp4": NVFP4, "mxfp4": MXFP4}.get(format)

    def stack(columns: int, width: int) -> tuple[Any, ...]:
        if fp4 is None:
            scale = array((experts, columns // 128, width // 128), "float32")
            return array((experts, columns, width), "uint8"), scale
        return (
            array((experts, width // 2, columns), "uint8"),
            array((experts, width // fp4.group, columns), "uint8"),
            array((experts, 1, columns), "float32"),
        )

    w13, w2 = stack(2 * EXPERT_WIDTH, HIDDEN), stack(HIDDEN, EXPERT_WIDTH)
    held = sum(part.size * part.dtype.itemsize for part in (*w13, *w2))
    # Experts that some row chooses, on average.
    touched = 1 - (1 - topk / EXPERTS) ** rows
    options = {"target": "tpu", "total": EXPERTS} | ({} if fp4 is None else {"fp4": fp4})
    return Case(
        f"fp8_experts/{rows} rows" if fp4 is None else f"fp4_experts/{rows} rows/{format}",
        moe.fp8_moe if fp4 is None else moe.fp4_moe,
        (
            array((rows, HIDDEN), "bfloat16"),
            w13,
            w2,
            array((rows, topk), "float32"),
            array((rows, topk), "int32"),
            array((), "int32"),
        ),
        options,
        int(held * touched) + rows * HIDDEN * 4,
        2 * rows * topk * 3 * HIDDEN * EXPERT_WIDTH // DEVICES,
    )


def _router(rows: int) -> Case:
    from ml4core_tpu.kernels.moe import router

    return Case(
        f"router/{rows} rows",
        router,
        (array((rows, HIDDEN), "bfloat16"), array((EXPERTS, HIDDEN), "float32")),
        {"topk": 4, "renormalize": True, "routed_scale": 1.0},
        EXPERTS * HIDDEN * 4 + rows * HIDDEN * 2,
        2 * rows * EXPERTS * HIDDEN,
    )


def _write(rows: int, rope: bool) -> Case:
    import jax

    from ml4core_tpu.kernels.cache_write import write_latents

    latents, ropes = _pool()
    return Case(
        f"write_latents/{rows} rows/{'rope' if rope else 'nope'}",
        jax.jit(
            lambda *given: write_latents(*given, target="tpu"),
            donate_argnums=(0, 1) if rope else (0,),
        ),
        (
            latents,
            ropes if rope else None,
            array((1,), "float32"),
            array((rows,), "int32"),
            array((rows, LATENT), "bfloat16"),
            array((rows, ROPE), "bfloat16") if rope else None,
        ),
    )


def _index_write(rows: int) -> Case:
    import jax

    from ml4core_tpu.kernels.cache_write import write_index_keys

    return Case(
        f"write_index_keys/{rows} rows",
        jax.jit(lambda *given: write_index_keys(*given, target="tpu"), donate_argnums=0),
        (
            array((PAGES, 33, 4, PAGE), "uint8"),
            array((rows,), "int32"),
            array((rows, 128), "float32"),
        ),
    )
