"""Whole layers of the published model to compile ahead, over the devices of a slice.

A host's 8 devices are tensor ranks, hosts are data ranks, and experts lie on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ml4core.api import IndexerSpec, LayerSpec, MoESpec, RopeSpec, SSMaxSpec
from ml4core_tpu.aot import Case
from ml4core_tpu.aot_cases import (
    EXPERT_WIDTH,
    EXPERTS,
    HEADS,
    HIDDEN,
    INDEX_HEADS,
    LATENT,
    ROPE,
    TOPK,
    array,
)
from ml4core_tpu.kernels.layer.form import Caches, Chosen, Matrix, Step, form_of
from ml4core_tpu.kernels.layer.mesh import (
    argument_specs,
    donated,
    donating_layer,
    end_specs,
    local_layer,
    mapped_ends,
)
from ml4core_tpu.kernels.rows import Rows

NOPE, VALUE, INDEX_DIM, ROUTED = 64, 128, 128, 4
DENSE_WIDTH = 16_384
REQUESTS = 128
PAGE, PAGES, CONTEXT_PAGES = 1024, 1024, 1024
"""Tokens a page, pages of a pool, and pages of a request, which is the published context: what a
session on a TPU takes by default, as with ``REQUESTS`` and the last of ``ROWS``.
"""
VOCABULARY = 131_072
WANTED = (8, 128)
"""Requests whose logits are wanted: the smallest bucket and the largest."""
ROWS = (16, 256, 8192)
"""Of a data rank: the smallest bucket, a middle one, and the largest."""
PUBLISHED_EXPERTS = "fp8_block"
"""Format of the published model's experts."""


@dataclass(frozen=True)
class Kind:
    """A kind of layer: whether it has rope, latents and an index of its own, and experts."""

    name: str
    rope: bool = True
    owns_latent: bool = True
    owns_index: bool = True
    moe: bool = True


KINDS = (
    Kind("owner"),
    Kind("sharer", owns_index=False),
    Kind("nope owner", rope=False),
    Kind("nope consumer", rope=False, owns_latent=False),
    Kind("dense", moe=False),
)
"""All five of the published model."""


def published_layer(kind: Kind) -> LayerSpec:
    """A layer of Mistral Large 4, as the model's table has it."""
    rope = ROPE if kind.rope else 0
    return LayerSpec(
        index=1,
        hidden_size=HIDDEN,
        heads=HEADS,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        nope_dim=NOPE,
        rope_dim=rope,
        v_dim=VALUE,
        norm_eps=1e-6,
        softmax_scale=float((NOPE + rope) ** -0.5),
        rope=RopeSpec(rope, 1e4) if rope else None,
        ssmax=SSMaxSpec("llama4"),
        kv_source=1 if kind.owns_latent else 0,
        topk_source=1 if kind.owns_index else 0,
        indexer=IndexerSpec(INDEX_HEADS, INDEX_DIM, TOPK, rope) if kind.owns_index else None,
        dense_width=None if kind.moe else DENSE_WIDTH,
        moe=MoESpec(EXPERTS, ROUTED, EXPERT_WIDTH, EXPERT_WIDTH) if kind.moe else None,
    )


def model_cases(mesh: Mesh) -> Iterator[Case]:
    """Each kind of layer at the smallest bucket, an owner at each and with NVFP4 experts, and what
    stands around layers: a step is the embedding, the layers in turn, and logits of wanted rows.
    """
    for kind in KINDS:
        for rows in ROWS if kind is KINDS[0] else ROWS[:1]:
            yield layer_case(mesh, kind, rows)
    yield layer_case(mesh, KINDS[0], ROWS[0], experts="nvfp4")
    yield ends_case(mesh, ROWS[0], WANTED[0])
    yield ends_case(mesh, ROWS[-1], WANTED[-1])


def ends_case(mesh: Mesh, rows: int, wanted: int) -> Case:
    """Embedding of ``rows`` rows of each data rank, and logits of ``wanted``."""
    data, tensor = mesh.devices.shape
    arguments = (
        array((VOCABULARY, HIDDEN), "bfloat16"),
        array((VOCABULARY, HIDDEN), "bfloat16"),
        array((data * rows,), "int32"),
        array((data * rows, HIDDEN), "bfloat16"),
        array((data * wanted,), "int32"),
    )
    cut = 2 * VOCABULARY // tensor * HIDDEN * 2
    # Of the embedding only the rows that stand for tokens are moved.
    least = cut // 2 + rows * HIDDEN * 2 * 2 + wanted * (HIDDEN * 2 + VOCABULARY * 4)
    return Case(
        f"embedding, logits/{rows} rows, {wanted}",
        jax.jit(mapped_ends(mesh)),
        _placed(mesh, arguments, end_specs()),
        least_bytes=least,
        flops=2 * wanted * HIDDEN * VOCABULARY // tensor,
    )


def _placed(mesh: Mesh, arguments: Any, specs: Any) -> Any:
    return jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec)
        ),
        arguments,
        specs,
    )


def layer_case(
    mesh: Mesh,
    kind: Kind,
    rows: int,
    pages: int = PAGES,
    experts: str = PUBLISHED_EXPERTS,
) -> Case:
    """One layer on ``rows`` rows of each data rank, in FP8 but for ``experts`` of another format
    (``nvfp4``), and pools of ``pages`` pages.
    """
    data, tensor = mesh.devices.shape
    layer = published_layer(kind)
    rope = ROPE if kind.rope else 0
    form = form_of(
        local_layer(layer, tensor), Rows("tiles", LATENT, rope), act="fp8_tensor", target="tpu"
    )
    residual = array((data * rows, HIDDEN), "bfloat16")
    norm = array((HIDDEN,), "bfloat16")
    chosen = None if kind.owns_index else _chosen(data * rows)
    arguments = (
        layer_weights(kind, data * tensor, experts),
        _step(data, rows),
        _caches(data * pages, kind),
        residual,
        residual,
        chosen,
        norm,
    )
    program = donating_layer(form, mesh, arguments)
    placed = donated(form.layer, _placed(mesh, arguments, argument_specs(arguments)))
    return Case(
        f"layer/{kind.name}/{rows} rows" + ("" if experts == PUBLISHED_EXPERTS else f"/{experts}"),
        program,
        placed,
        least_bytes=_least_bytes(arguments[0], kind, data, tensor, rows),
        flops=_flops(kind, data, tensor, rows),
        fp8=True,
    )


def layer_weights(kind: Kind, devices: int, experts: str = PUBLISHED_EXPERTS) -> dict[str, Any]:
    """Weights of a layer, those of all devices together."""
    rope = ROPE if kind.rope else 0
    weights: dict[str, Any] = {
        name: array((HIDDEN,), "bfloat16") for name in ("attention_norm", "ffn_norm")
    }
    weights |= {
        "wq": _fp8(HEADS * (NOPE + rope), HIDDEN),
        "w_uk": _bf16(HEADS, LATENT, NOPE),
        "w_uv": _bf16(HEADS, VALUE, LATENT),
        "wo": _fp8(HIDDEN, HEADS * VALUE),
        "first_expert": array((devices,), "int32"),
    }
    if kind.moe:
        stack = _nvfp4 if experts == "nvfp4" else _fp8
        weights |= {
            "gate": array((EXPERTS, HIDDEN), "float32"),
            "shared_w13": _fp8(2 * EXPERT_WIDTH, HIDDEN),
            "shared_w2": _fp8(HIDDEN, EXPERT_WIDTH),
            "experts_w13": stack(2 * EXPERT_WIDTH, HIDDEN, EXPERTS),
            "experts_w2": stack(HIDDEN, EXPERT_WIDTH, EXPERTS),
        }
    else:
        weights["dense_w13"] = _fp8(2 * DENSE_WIDTH, HIDDEN)
        weights["dense_w2"] = _fp8(HIDDEN, DENSE_WIDTH)
    if rope:
        weights["freq"] = array((2, rope // 2), "int32")
    if kind.owns_latent:
        weights["wkv_a"] = _fp8(LATENT + rope, HIDDEN)
        weights["kv_a_norm"] = array((LATENT,), "bfloat16")
    if kind.owns_index:
        weights["index_wq"] = _fp8(INDEX_HEADS * INDEX_DIM, HIDDEN)
        weights["index_wk"] = _fp8(INDEX_DIM, HIDDEN)
        weights["index_weights_proj"] = Matrix(
            {"data": array((INDEX_HEADS, HIDDEN), "float32")}, "fp32"
        )
        for part in ("q", "k"):
            weights[f"index_{part}_norm_weight"] = array((INDEX_DIM,), "float32")
            weights[f"index_{part}_norm_bias"] = array((INDEX_DIM,), "float32")
    return weights


def _fp8(rows: int, columns: int, *stack: int) -> Matrix:
    scale = array((*stack, -(-rows // 128), -(-columns // 128)), "float32")
    return Matrix({"data": array((*stack, rows, columns), "uint8"), "scale": scale}, "fp8_block")


def _bf16(*shape: int) -> Matrix:
    return Matrix({"data": array(shape, "bfloat16")}, "bf16")


def _nvfp4(rows: int, columns: int, *stack: int) -> Matrix:
    """Packed as ``expert_weights`` does."""
    parts = {
        "data": array((*stack, columns // 2, rows), "uint8"),
        "scale": array((*stack, columns // 16, rows), "uint8"),
        "row_scale": array((*stack, 1, rows), "float32"),
    }
    return Matrix(parts, "x-ml4core-tpu/nvfp4")


def _step(data: int, rows: int) -> Step:
    row = array((data * rows,), "int32")
    start = array((data * (REQUESTS + 1),), "int32")
    table = array((data * REQUESTS, CONTEXT_PAGES), "int32")
    return Step(row, row, start, row, table, table, row, row)


def _caches(pages: int, kind: Kind) -> Caches:
    latents = [array((pages, PAGE, LATENT // 128, 128), "uint8")]
    if kind.rope:
        latents.append(array((pages, PAGE // 4, 4, 128), "uint8"))
    keys = array((pages, 33, 4, PAGE), "uint8") if kind.owns_index else None
    return Caches(tuple(latents), array((1,), "float32"), keys)


def _chosen(rows: int) -> Chosen:
    table, row = array((rows, TOPK), "int32"), array((rows,), "int32")
    return Chosen(table, row, table, array((rows,), "bool"))


def _least_bytes(weights: Mapping[str, Any], kind: Kind, data: int, tensor: int, rows: int) -> int:
    """What one device has to move: its weights, the keys that each row looks at, and its rows."""
    experts = sum(nbytes(value) for name, value in weights.items() if name.startswith("experts_"))
    # Rows that meet its experts on average; of an expert without any nothing is moved.
    touched = 1 - (1 - ROUTED / EXPERTS) ** (data * rows)
    cut = sum(nbytes(weights[name]) for name in ("wq", "w_uk", "w_uv", "wo"))
    block = "shared" if kind.moe else "dense"
    cut += sum(nbytes(weights[f"{block}_{name}"]) for name in ("w13", "w2"))
    whole = sum(map(nbytes, weights.values())) - experts - cut
    latents = rows * TOPK * (LATENT + (4 * 128 if kind.rope else 0))
    requests = min(rows, REQUESTS)
    keys = requests * CONTEXT_PAGES * PAGE * 132 if kind.owns_index else 0
    return int(experts * touched / (data * tensor) + cut / tensor + whole + latents + keys) + (
        rows * HIDDEN * 2 * 4
    )


def _flops(kind: Kind, data: int, tensor: int, rows: int) -> int:
    """Of one device."""
    rope = ROPE if kind.rope else 0
    heads = HEADS // tensor
    cut = heads * (NOPE + rope + VALUE) * HIDDEN + heads * LATENT * (NOPE + VALUE)
    cut += 3 * HIDDEN * (EXPERT_WIDTH if kind.moe else DENSE_WIDTH) // tensor
    cut += (LATENT + rope) * HIDDEN if kind.owns_latent else 0
    cut += heads * TOPK * (2 * LATENT + rope)
    if kind.owns_index:
        cut += (INDEX_HEADS + 1) * INDEX_DIM * HIDDEN
        cut += INDEX_HEADS * INDEX_DIM * CONTEXT_PAGES * PAGE
    if kind.moe:
        cut += EXPERTS * HIDDEN * data + ROUTED * 3 * HIDDEN * EXPERT_WIDTH // tensor
    return 2 * rows * cut


def nbytes(value: Any) -> int:
    leaves = jax.tree.leaves(value)
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
