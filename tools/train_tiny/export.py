"""Trained weights as a checkpoint in the consolidated Mistral format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ml4core.api import LayerSpec
from ml4core.formats import fp8_block
from ml4core.models.checkpoint_writer import CheckpointWriter
from ml4core.models.dspark_weights import expected_draft_tensors
from ml4core.models.tensor_table import Expected, expected_tensors
from tools.train_tiny.config import Shape
from tools.train_tiny.draft import Drafter
from tools.train_tiny.model import TinyModel

DRAFT = "mtp_dspark."
FORMATS = ("fp32", "bf16", "fp8_block")
_PLAIN_IN_FP8 = ("weights_proj",)
"""Matrices that stay bf16 beside FP8 ones: their rows are no whole blocks."""


def export(
    model: TinyModel,
    drafter: Drafter | None,
    shape: Shape,
    folder: Path,
    format: str = "bf16",
    tokenizer: Path | None = None,
) -> Path:
    """Write `folder`; with a drafter, its tensors and the `mtp` block too.

    `format`: `fp32` and `bf16` for all tensors, or `fp8_block` for matrices beside bf16.
    Raises ValueError, and CheckpointError if the folder is not empty.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r}; known are {', '.join(FORMATS)}")
    params: dict[str, Any] = dict(shape.params)
    expected = expected_tensors(shape.model)
    values = dict(decoder_tensors(model))
    if drafter is None:
        params.pop("mtp", None)
    else:
        expected |= expected_draft_tensors(shape.draft)
        values |= dict(draft_tensors(drafter))
    with CheckpointWriter(folder) as writer:
        for name, entry in expected.items():
            if not entry.used:
                continue
            value = values.pop(name).detach().cpu()
            if tuple(value.shape) not in entry.shapes:
                raise ValueError(f"{name}: {tuple(value.shape)}, wanted {entry.shapes}")
            _write(writer, entry, value, format)
        if values:
            raise ValueError(f"tensors that the format has no place for: {sorted(values)}")
        writer.add_json("params.json", params)
        if tokenizer is not None:
            writer.add_file("tekken.json", tokenizer.read_bytes())
    return folder


def _write(writer: CheckpointWriter, entry: Expected, value: Tensor, format: str) -> None:
    if format == "fp32":
        writer.add(entry.name, value.float().contiguous())
        return
    stem = entry.name.removesuffix(".weight")
    if format == "bf16" or entry.kind != "matrix" or stem.endswith(_PLAIN_IN_FP8):
        wide = entry.kind == "vector" or entry.role == "gate"
        writer.add(entry.name, value.to(torch.float32 if wide else torch.bfloat16).contiguous())
        return
    code, scale = fp8_block.quantize_weight(value.float())
    writer.add(entry.name, code.view(torch.float8_e4m3fn))
    writer.add(f"{stem}.weight_scale", scale)


def decoder_tensors(model: TinyModel) -> Iterator[tuple[str, Tensor]]:
    """Canonical name and value of every tensor of the decoder."""
    spec = model.spec
    yield "tok_embeddings.weight", model.embedding
    yield "norm.weight", model.norm
    yield "output.weight", model.output
    yield "rope_freqs", model.rope_freqs
    for layer in spec.layers:
        block = model.block(layer.index)
        prefix = f"layers.{layer.index}."
        yield from _layer(prefix, layer, block.attention_norm, block.attention, block.ffn_norm)
        attention = prefix + "attention."
        yield attention + "ssmax_scale", block.attention.ssmax_scale
        if block.attention.ssmax_bias is not None:
            yield attention + "ssmax_bias", block.attention.ssmax_bias
        if layer.owns_index:
            indexer = model.indexer(layer.index)
            stem = attention + "indexer."
            yield stem + "wq.weight", indexer.wq
            yield stem + "wk.weight", indexer.wk
            yield stem + "weights_proj.weight", indexer.weights_proj
            yield stem + "ssmax_scale", indexer.ssmax_scale
            for part in ("q_norm", "k_norm"):
                for kind in ("weight", "bias"):
                    yield f"{stem}{part}.{kind}", getattr(indexer, f"{part}_{kind}")
        ffn: Any = block.ffn
        if layer.moe is None:
            yield from _swiglu(prefix + "feed_forward.", ffn.w1, ffn.w2, ffn.w3)
            continue
        yield prefix + "gate.weight", ffn.gate
        for e in range(layer.moe.experts):
            yield from _swiglu(f"{prefix}experts.{e}.", ffn.w1[e], ffn.w2[e], ffn.w3[e])
        shared = ffn.shared
        yield from _swiglu(prefix + "shared_experts.", shared.w1, shared.w2, shared.w3)


def draft_tensors(drafter: Drafter) -> Iterator[tuple[str, Tensor]]:
    yield f"{DRAFT}fc.weight", drafter.fc
    yield f"{DRAFT}context_norm.weight", drafter.context_norm
    yield f"{DRAFT}mask_embeddings.weight", drafter.mask_embeddings
    yield f"{DRAFT}markov_head.w1.weight", drafter.markov_w1
    yield f"{DRAFT}markov_head.joint_proj.weight", drafter.markov_joint
    yield f"{DRAFT}markov_head.joint_proj.bias", drafter.markov_joint_bias
    yield f"{DRAFT}markov_head.w2.weight", drafter.markov_w2
    yield f"{DRAFT}norm.weight", drafter.norm
    for spec, module in zip(drafter.spec.layers, drafter.layers, strict=True):
        layer: Any = module
        prefix = f"{DRAFT}layers.{spec.index}."
        yield from _layer(prefix, spec, layer.attention_norm, layer, layer.ffn_norm)
        ffn = layer.ffn
        yield from _swiglu(prefix + "feed_forward.", ffn.w1, ffn.w2, ffn.w3)


def _layer(
    prefix: str, spec: LayerSpec, attention_norm: Tensor, attention: Any, ffn_norm: Tensor
) -> Iterator[tuple[str, Tensor]]:
    yield prefix + "attention_norm.weight", attention_norm
    yield prefix + "ffn_norm.weight", ffn_norm
    stem = prefix + "attention."
    yield stem + "wq.weight", attention.wq
    yield stem + "wo.weight", attention.wo
    # Of each head, the rows that make its keys, then those that make its values.
    up = torch.cat(
        (
            attention.w_uk.unflatten(0, (spec.heads, spec.nope_dim)),
            attention.w_uv.unflatten(0, (spec.heads, spec.v_dim)),
        ),
        dim=1,
    )
    yield stem + "wkv_b.weight", up.flatten(0, 1)
    if spec.owns_kv:
        yield stem + "wkv_a_with_mqa.weight", attention.wkv_a
        yield stem + "kv_a_norm.weight", attention.kv_a_norm


def _swiglu(prefix: str, w1: Tensor, w2: Tensor, w3: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{prefix}{name}.weight", w) for name, w in (("w1", w1), ("w2", w2), ("w3", w3)))
