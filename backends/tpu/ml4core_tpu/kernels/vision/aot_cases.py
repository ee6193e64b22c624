"""The encoder of images to compile ahead, for one device of a slice: each host runs all of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ml4core.api import VisionSpec
from ml4core_tpu.aot import Case
from ml4core_tpu.aot_cases import HIDDEN, array
from ml4core_tpu.buckets import image_buckets
from ml4core_tpu.kernels.layer.aot_cases import nbytes
from ml4core_tpu.kernels.layer.form import Matrix
from ml4core_tpu.kernels.vision.program import Encoder, VisionForm, vision_encoder
from ml4core_tpu.kernels.vision.stage import inputs

SPEC = VisionSpec(
    hidden_size=1664,
    layers=48,
    heads=16,
    head_dim=104,
    ffn_width=8192,
    patch_size=14,
    channels=3,
    image_size=1540,
    rope_theta=1e4,
    spatial_merge_size=2,
    patch_merger=True,
    pre_projector_norm=True,
    adapter_bias=False,
    norm_eps=1e-5,
    output_size=HIDDEN,
)
"""That of Mistral Large 3: what the published one has isn't known."""
PATCHES = (image_buckets(SPEC)[0], image_buckets(SPEC)[4], image_buckets(SPEC)[-1])
"""The smallest bucket, a middle one, and the largest image."""


def image_cases(device: Any) -> Iterator[Case]:
    for patches in PATCHES:
        yield image_case(device, patches)


def image_case(device: Any, patches: int) -> Case:
    """An image of so many patches, with weights in bfloat16."""
    placed = SingleDeviceSharding(device)
    weights = encoder()
    arguments = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=placed),
        (weights, *inputs(SPEC, patches)),
    )
    form = VisionForm(SPEC, "bfloat16", target="tpu")
    cells = patches // SPEC.cell_patches
    return Case(
        f"images/{patches} patches",
        jax.jit(partial(vision_encoder, form)),
        arguments,
        least_bytes=nbytes(weights) + 4 * patches * SPEC.patch_dim + 2 * cells * HIDDEN,
        flops=_flops(patches),
    )


def encoder() -> Encoder:
    """Shapes of the weights, layers in one stack."""
    width, layers = SPEC.hidden_size, SPEC.layers
    heads = SPEC.heads * SPEC.head_dim
    top = {
        "patch_conv": _matrix(width, SPEC.patch_dim),
        "ln_pre": array((width,), "bfloat16"),
        "freq": array((2, SPEC.head_dim // 2), "int32"),
        "pre_projector_norm": array((width,), "bfloat16"),
        "merging_layer": _matrix(width, width * SPEC.cell_patches),
        "adapter_in": _matrix(HIDDEN, width),
        "adapter_out": _matrix(HIDDEN, HIDDEN),
    }
    stack = {
        "attention_norm": array((layers, width), "bfloat16"),
        "ffn_norm": array((layers, width), "bfloat16"),
        "wqkv": _matrix(layers, 3 * heads, width),
        "wo": _matrix(layers, width, heads),
        "w13": _matrix(layers, 2 * SPEC.ffn_width, width),
        "w2": _matrix(layers, width, SPEC.ffn_width),
    }
    return Encoder(top, (stack,))


def _matrix(*shape: int) -> Matrix:
    return Matrix({"data": array(shape, "bfloat16")}, "bf16")


def _flops(patches: int) -> int:
    width, heads = SPEC.hidden_size, SPEC.heads * SPEC.head_dim
    layer = 4 * width * heads + 3 * width * SPEC.ffn_width + 2 * patches * heads
    ends = width * SPEC.patch_dim + width * width
    projector = HIDDEN * (width + HIDDEN) // SPEC.cell_patches
    return 2 * patches * (SPEC.layers * layer + ends + projector)
