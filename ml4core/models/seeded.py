"""Writes a small checkpoint with seeded random weights: same seed, same bytes, on every machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from ml4core.api import ModelSpec
from ml4core.models import seeded_formats
from ml4core.models.checkpoint_files import DEFAULT_SHARD_BYTES
from ml4core.models.checkpoint_writer import CheckpointWriter
from ml4core.models.embedded import embedded_folder
from ml4core.models.layer_table import build_model_spec
from ml4core.models.params_file import PARAMS_FILE
from ml4core.models.seeded_config import PRESETS, SeededFormat
from ml4core.models.seeded_values import normal
from ml4core.models.tensor_table import Expected, expected_tensors

TOKENIZER_FILE = "tekken.json"
FORMATS: tuple[str, ...] = get_args(SeededFormat)


def make_seeded(
    folder: Path | str,
    preset: str = "tiny",
    *,
    seed: int = 0,
    format: SeededFormat = "bf16",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    **overrides: Any,
) -> Path:
    """Write params.json, safetensors files and tekken.json into `folder`, and return it.

    `preset` is a name of `PRESETS`; `overrides` replace fields of its `SeededConfig`. `format` is
    that of the matrices, see `seed_checkpoint`. The vocabulary of tekken.json has 8192 ids.

    Raises ValueError for an unknown preset, format or field, or dimensions that contradict each
    other; CheckpointError if the folder is not empty (unless `overwrite`) or can't be written.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r}; known are {', '.join(PRESETS)}")
    names = [field.name for field in fields(PRESETS[preset])]
    if unknown := sorted(overrides.keys() - set(names)):
        raise ValueError(f"unknown dimensions {unknown}; known are {', '.join(names)}")
    params = replace(PRESETS[preset], **overrides).params()
    return seed_checkpoint(
        folder,
        params,
        seed=seed,
        format=format,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


def seed_checkpoint(
    folder: Path | str,
    params: Mapping[str, Any],
    *,
    seed: int = 0,
    format: SeededFormat = "bf16",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """As `make_seeded`, of the model that `params`, the content of a params.json, describes.

    Formats: `bf16`, `fp32`; `fp8_block`; `fp8_tensor`, Mistral's FP8 of one scale a matrix; and
    three whose routed experts have four bits and whose other matrices are `fp8_block`: `nvfp4_ct`
    (global scales divide, as compressed-tensors writes them), `nvfp4_modelopt` (they multiply),
    `mxfp4`. Norms, the router, embedding and output stay bf16 (fp32 with `fp32`), what is learned
    for positions is fp32.

    Raises as `make_seeded`, and CheckpointError for params that are wrong.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r}; known are {', '.join(FORMATS)}")
    params = {**params, **seeded_formats.params(format)}
    spec = build_model_spec(params)
    tokenizer = embedded_folder() / TOKENIZER_FILE
    folder = Path(folder)
    with CheckpointWriter(folder, max_shard_bytes, overwrite=overwrite) as writer:
        writer.add_json(PARAMS_FILE, json.loads(json.dumps(params)))
        for entry in expected_tensors(spec).values():
            if entry.used:
                _add(writer, entry, _values(entry, spec, seed), format)
        writer.add_file(TOKENIZER_FILE, tokenizer.read_bytes())
    return folder


def _add(writer: CheckpointWriter, entry: Expected, values: Tensor, format: SeededFormat) -> None:
    if _is_positional(entry):
        writer.add(entry.name, values)
        return
    own = "fp32" if format == "fp32" else "bf16"
    kind = seeded_formats.format_of(entry, format) if format not in ("fp32", "bf16") else own
    stem, _, suffix = entry.name.rpartition(".")
    for name, tensor in seeded_formats.tensors(values, kind, suffix).items():
        writer.add(f"{stem}.{name}", tensor)


def _is_positional(entry: Expected) -> bool:
    return entry.role == "inv_freq" or "ssmax" in entry.role


def _values(entry: Expected, spec: ModelSpec, seed: int) -> Tensor:
    """fp32 values that keep activations near 1 and give logits a spread of about 2."""
    shape = entry.shapes[0]
    # sqrt is exact everywhere; pow and log may differ in the last bit, so log is rounded.
    mean, std = 0.0, 1.0 / math.sqrt(shape[-1])
    if entry.role == "embedding":
        std = 1.0
    elif entry.role == "output":
        std *= 2.0
    elif entry.role in ("wo", "experts_w2", "shared_w2", "dense_w2"):
        # Into the residual: the sum over all layers is to be of the embedding's size.
        std *= math.sqrt(8.0 / len(spec.layers))
    elif entry.role == "inv_freq":
        mean, std = 1.0, 0.05
    elif entry.role == "ssmax_bias":
        mean, std = 0.5, 0.05
    elif "ssmax" in entry.role:
        # s ln(n) passes 1 where the selection begins to leave keys out, and so does the index's.
        topk = next((layer.indexer.topk for layer in spec.layers if layer.indexer), 256)
        mean = round(1.0 / math.log(topk + 1.0), 4)
        std = 0.15 * mean
    elif entry.role.endswith("norm_bias"):
        std = 0.1
    elif entry.kind == "vector":
        mean, std = 1.0, 0.1
    return normal(seed, entry.name, shape, std, mean)
