"""A small encoder, its params.json block, random tensors under Mistral's names, and how it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ml4core.api import Deployment, ModelSpec, VisionShape, VisionSpec, VisionWeights
from ml4core.compose.bind import bind_global_stage
from ml4core.compose.context import StageContext
from ml4core.compose.ops import COMPOSED
from ml4core.cpu.backend import CpuBackend
from ml4core.engine.collectives import SingleRank
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.pixtral import vision_spec
from ml4core.models.pixtral_images import ImageBatch, patch_images
from ml4core.models.pixtral_weights import expected_vision_tensors, load_vision

WIDTH = 40
"""Of the decoder."""
CELLS = ((3, 5), (1, 2), (4, 1))
"""Cells (rows, columns) of the images that most tests use."""

# No matrix of the encoder is square but for wq to wo, and no head dim is a power of two.
BLOCK: Mapping[str, Any] = {
    "hidden_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 112,
    "num_channels": 3,
    "image_size": 48,
    "max_image_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "rope_theta": 10000.0,
    "adapter_bias": True,
    "add_pre_mm_projector_layer_norm": True,
    "mm_projector_id": "patch_merge",
    "image_token_id": 10,
    "image_break_token_id": 12,
    "image_end_token_id": 13,
}


def spec_of(**changes: Any) -> VisionSpec:
    """The encoder of `BLOCK` with some keys replaced."""
    spec = vision_spec({"vision_encoder": {**BLOCK, **changes}}, WIDTH)
    assert spec is not None
    return spec


def random_tensors(spec: VisionSpec, seed: int = 0) -> dict[str, Tensor]:
    """fp32 tensors that keep activations near 1; attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, entry in expected_vision_tensors(spec).items():
        noise = torch.randn(entry.shapes[0], generator=generator)
        if entry.role.endswith("bias"):
            tensors[name] = 0.3 * noise
        elif noise.dim() == 1:
            tensors[name] = 1.0 + 0.3 * noise
        else:
            gain = 2.0 if name.endswith(("wq.weight", "wk.weight")) else 1.0
            tensors[name] = gain * noise * noise[0].numel() ** -0.5
    return tensors


def random_images(
    spec: VisionSpec, cells: Sequence[tuple[int, int]], seed: int = 0
) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    size = spec.cell_size
    return [
        generator.standard_normal((spec.channels, rows * size, columns * size)).astype(np.float32)
        for rows, columns in cells
    ]


def write(folder: Path, tensors: Mapping[str, Tensor], block: Mapping[str, Any] = BLOCK) -> Path:
    """A checkpoint of vision tensors alone."""
    with CheckpointWriter(folder) as writer:
        writer.add_json("params.json", {"dim": WIDTH, "vision_encoder": dict(block)})
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return folder


def read(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[VisionSpec, VisionWeights]:
    """The encoder of a checkpoint, its weights laid out by the cpu backend."""
    checkpoint = Checkpoint.open(folder)
    spec = vision_spec(checkpoint.params or {}, WIDTH)
    assert spec is not None
    session = open_session(spec, dtype)
    (_, top), *layers = [
        (layer, session.prepare_weights(weights, None, "vision"))
        for layer, weights in load_vision(checkpoint, spec, dtype)
    ]
    return spec, VisionWeights(top, tuple(weights for _, weights in layers))


def model_of(spec: VisionSpec | None) -> ModelSpec:
    """A model of which only the encoder matters."""
    return ModelSpec("images", 8, WIDTH, 1e-6, 8, False, (), vision=spec)


def open_session(spec: VisionSpec, dtype: torch.dtype = torch.float32) -> Any:
    backend = CpuBackend()
    device = backend.probe().devices[0]
    return backend.open(Deployment(model_of(spec), device, dtype=str(dtype).removeprefix("torch.")))


def context_of(spec: VisionSpec | None, dtype: torch.dtype = torch.float32) -> StageContext:
    return StageContext(model_of(spec), None, COMPOSED, SingleRank(), dtype)


def bind(spec: VisionSpec, patches: int, dtype: torch.dtype = torch.float32) -> Any:
    """The stage's callable, as the cpu backend binds it."""
    call, _ = bind_global_stage(
        "vision_encoder",
        open_session(spec, dtype),
        context_of(spec, dtype),
        VisionShape(patches),
    )
    return call


def encode(
    spec: VisionSpec,
    weights: VisionWeights,
    batch: ImageBatch,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Embeddings of the whole batch, those of padding included."""
    call = bind(spec, len(batch.patches), dtype)
    with torch.inference_mode():
        return call(weights, batch.patches, batch.positions, batch.image_ids)


def encode_images(
    spec: VisionSpec, weights: VisionWeights, images: Sequence[np.ndarray]
) -> list[Tensor]:
    """Embeddings [cells, H] of each image."""
    batch = patch_images(spec, images)
    return list(encode(spec, weights, batch).split(batch.counts))


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, over the largest value of its row; rows [.., H]."""
    assert ours.shape == theirs.shape
    return float(((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max())
