"""The vision encoder's tensors: what must be there, and reading them as weights, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ml4core.api import VisionSpec, Weight
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.matrix_formats import PLAIN_DTYPES, Fault, Matrix, classify
from ml4core.models.params_file import refusal
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.tensor_names import part_of
from ml4core.models.tensor_table import Expected, Kind, Shape
from ml4core.models.tensors import MAX_LISTED, TensorReport
from ml4core.models.weight_reader import Progress, WeightReader
from ml4core.models.weights import Weights

PART = "vision encoder"
"""The part of `ml4core.models.tensor_names.PARTS` that is loaded here."""

_ENCODER = "vision_encoder."
_NORM = "pre_mm_projector_norm"
_MERGER = "patch_merger.merging_layer"
_ADAPTER = "vision_language_adapter."


def expected_vision_tensors(spec: VisionSpec) -> dict[str, Expected]:
    """The tensors of the encoder and its projector by name, in the order in which they are loaded.

    Shapes: d is hidden_size, H the decoder's dim. Matrices may be quantised, but for patch_conv.
    """
    entries = [*_outer(spec)]
    for layer in range(spec.layers):
        entries += _layer(spec, layer)
    return {entry.name: entry for entry in entries}


def _outer(spec: VisionSpec) -> Iterator[Expected]:
    width, output, p = spec.hidden_size, spec.output_size, spec.patch_size

    def entry(name: str, role: str, shape: Shape, meaning: str, kind: Kind = "matrix") -> Expected:
        return Expected(name, role, (shape,), meaning, kind)

    conv, meaning = (width, spec.channels, p, p), "hidden_size x num_channels x patch_size ^ 2"
    yield entry(f"{_ENCODER}patch_conv.weight", "patch_conv", conv, meaning, "vector")
    yield entry(f"{_ENCODER}ln_pre.weight", "ln_pre", (width,), "hidden_size", "vector")
    if spec.pre_projector_norm:
        yield entry(f"{_NORM}.weight", "pre_projector_norm", (width,), "hidden_size", "vector")
    if spec.patch_merger:
        merged = (width, width * spec.cell_patches)
        meaning = "hidden_size x hidden_size * spatial_merge_size ^ 2"
        yield entry(f"{_MERGER}.weight", "merging_layer", merged, meaning)
    for stem, role, shape, meaning in (
        ("w_in", "adapter_in", (output, width), "dim x hidden_size"),
        ("w_out", "adapter_out", (output, output), "dim x dim"),
    ):
        yield entry(f"{_ADAPTER}{stem}.weight", role, shape, meaning)
        if spec.adapter_bias:
            yield entry(f"{_ADAPTER}{stem}.bias", f"{role}_bias", (output,), "dim", "vector")


def _layer(spec: VisionSpec, layer: int) -> Iterator[Expected]:
    width, heads, ffn = spec.hidden_size, spec.heads * spec.head_dim, spec.ffn_width
    across = "hidden_size x hidden_size"
    up, down = "intermediate_size x hidden_size", "hidden_size x intermediate_size"
    table: tuple[tuple[str, str, Shape, str], ...] = (
        ("attention_norm", "attention_norm", (width,), "hidden_size"),
        ("attention.wq", "wqkv", (heads, width), across),
        ("attention.wk", "wqkv", (heads, width), across),
        ("attention.wv", "wqkv", (heads, width), across),
        ("attention.wo", "wo", (width, heads), across),
        ("ffn_norm", "ffn_norm", (width,), "hidden_size"),
        ("feed_forward.w1", "w13", (ffn, width), up),
        ("feed_forward.w3", "w13", (ffn, width), up),
        ("feed_forward.w2", "w2", (width, ffn), down),
    )
    for inner, role, shape, meaning in table:
        kind: Kind = "vector" if len(shape) == 1 else "matrix"
        name = f"{_prefix(layer)}{inner}.weight"
        yield Expected(name, role, (shape,), meaning, kind, layer)


def _prefix(layer: int) -> str:
    return f"{_ENCODER}transformer.layers.{layer}."


def validate_vision(checkpoint: Checkpoint, spec: VisionSpec) -> TensorReport:
    """Hold the checkpoint's vision tensors against those of `spec`. Reads no data.

    Other parts' tensors are not looked at. Raises one CheckpointError that lists every tensor that
    is missing, unknown, misshapen, or in a form that can't be loaded.
    """
    found: dict[str, dict[str, TensorInfo]] = defaultdict(dict)  # stem -> suffix -> tensor
    for name, info in checkpoint.tensors.items():
        part = part_of(name)
        if part is not None and part.name == PART:
            stem, _, suffix = name.rpartition(".")
            found[stem][suffix] = info
    problems: list[str] = []
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, TensorInfo] = {}
    for entry in expected_vision_tensors(spec).values():
        stem, _, suffix = entry.name.rpartition(".")
        parts = found.get(stem, {})
        if entry.kind == "vector":
            vector = parts.pop(suffix) if suffix in parts else None
            if (problem := _vector_problem(entry, vector)) is not None:
                problems.append(problem)
            elif vector is not None:
                vectors[entry.name] = vector
            continue
        own = {key: parts.pop(key) for key in [*parts] if key != "bias"}
        matrix = _matrix(entry, stem, own)
        if isinstance(matrix, Matrix):
            matrices[stem] = matrix
        else:
            problems.append(matrix)
    for parts in found.values():
        problems += [_unknown(spec, info) for info in parts.values()]
    if problems:
        more = len(problems) - MAX_LISTED
        rest = [f"and {more} more"] if more > 0 else []
        where = f"{checkpoint.path}: the vision encoder's tensors"
        raise refusal(problems[:MAX_LISTED] + rest, where)
    return TensorReport(matrices, vectors, {}, ())


def _wanted(entry: Expected) -> str:
    return f"{list(entry.shapes[0])} = {entry.meaning}"


def _vector_problem(entry: Expected, info: TensorInfo | None) -> str | None:
    if info is None:
        return f"{entry.name}: missing; wanted {_wanted(entry)}"
    if info.shape not in entry.shapes:
        return f"{info.name}: {list(info.shape)}, wanted {_wanted(entry)}"
    if info.dtype not in PLAIN_DTYPES:
        return f"{info.name}: dtype {info.dtype}; must be one of {', '.join(PLAIN_DTYPES)}"
    return None


def _matrix(entry: Expected, stem: str, parts: Mapping[str, TensorInfo]) -> Matrix | str:
    """The matrix of the tensors `parts`, by suffix; or what is wrong with them."""
    data = parts.get("weight")
    if not parts or (data is not None and data.shape not in entry.shapes):
        problem = _vector_problem(entry, data)
        assert problem is not None  # missing or misshapen
        return problem
    matrix = classify(stem, parts)
    return f"{matrix.kind}: {matrix.text}" if isinstance(matrix, Fault) else matrix


def _unknown(spec: VisionSpec, info: TensorInfo) -> str:
    reason = ""
    if info.name.startswith(_NORM) and not spec.pre_projector_norm:
        reason = ": params.json says no add_pre_mm_projector_layer_norm"
    elif info.name.startswith(_MERGER) and not spec.patch_merger:
        reason = ": params.json says no mm_projector_id 'patch_merge'"
    elif info.name.startswith(_ADAPTER) and info.name.endswith(".bias"):
        reason = ": params.json says adapter_bias false"
    elif info.name.startswith(f"{_ENCODER}transformer.layers."):
        reason = f": params.json has encoder layers 0 to {spec.layers - 1}, without biases"
    return f"{info.name} {list(info.shape)}: unknown or not called for{reason}"


def rope_2d_freqs(spec: VisionSpec) -> Tensor:
    """Radians a row, then radians a column: fp32 [A/2], see `VISION_WEIGHTS`.

    Of f_i = theta^(-2i/A), i = 0 .. A/2 - 1, rows have those of even i, columns those of odd i.
    Computed in fp64, rounded once.
    """
    dim = spec.head_dim
    all_of_them = [spec.rope_theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    values = [*all_of_them[0::2], *all_of_them[1::2]]
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.float32)


def load_vision(
    checkpoint: Checkpoint,
    spec: VisionSpec,
    dtype: torch.dtype = torch.bfloat16,
    *,
    progress: Progress | None = None,
    report: TensorReport | None = None,
) -> Iterator[tuple[int | None, Weights]]:
    """The weights of `VISION_WEIGHTS` with layer None, then `VISION_LAYER_WEIGHTS` of each layer.

    All tensors are compared with the spec first, at the call; `report` is what `validate_vision`
    gave, if that is known already. Matrices keep the checkpoint's format; FP8 that can't stay FP8
    is decoded to `dtype`, float32 or bfloat16.

    Nothing that was handed out is kept, so memory is what the caller holds plus one layer.
    `progress(done, total)` counts bytes. Raises CheckpointError.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype {dtype}; weights are decoded to torch.float32 or torch.bfloat16")
    report = validate_vision(checkpoint, spec) if report is None else report
    return _load(spec, WeightReader(checkpoint, report, dtype, progress))


def _load(spec: VisionSpec, read: WeightReader) -> Iterator[tuple[int | None, Weights]]:
    # No local name for what is yielded: it would keep one layer alive while the next is read.
    yield None, _read_outer(spec, read)
    for layer in range(spec.layers):
        yield layer, _read_layer(_prefix(layer), read)


def _read_outer(spec: VisionSpec, read: WeightReader) -> Weights:
    conv = read.vector(f"{_ENCODER}patch_conv.weight").flatten(1)
    format = "bf16" if conv.dtype == torch.bfloat16 else "fp32"
    data = conv if format == "bf16" else conv.to(torch.float32)
    weights: Weights = {
        "patch_conv": Weight(format, tuple(data.shape), {"data": data}),
        "ln_pre": read.vector(f"{_ENCODER}ln_pre.weight"),
        "inv_freq": rope_2d_freqs(spec),
    }
    if spec.pre_projector_norm:
        weights["pre_projector_norm"] = read.vector(f"{_NORM}.weight")
    if spec.patch_merger:
        weights["merging_layer"] = read.matrix(_MERGER)
    for role, stem in (("adapter_in", f"{_ADAPTER}w_in"), ("adapter_out", f"{_ADAPTER}w_out")):
        weights[role] = read.matrix(stem)
        if spec.adapter_bias:
            weights[f"{role}_bias"] = read.vector(f"{stem}.bias")
    return weights


def _read_layer(prefix: str, read: WeightReader) -> Weights:
    attention, feed_forward = f"{prefix}attention.", f"{prefix}feed_forward."
    return {
        "attention_norm": read.vector(f"{prefix}attention_norm.weight"),
        "ffn_norm": read.vector(f"{prefix}ffn_norm.weight"),
        "wqkv": read.stacked([f"{attention}{part}" for part in ("wq", "wk", "wv")]),
        "wo": read.matrix(f"{attention}wo"),
        "w13": read.stacked([f"{feed_forward}{part}" for part in ("w1", "w3")]),
        "w2": read.matrix(f"{feed_forward}w2"),
    }
