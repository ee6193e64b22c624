"""What a plan is made of: a table of layers and a table of weights, from a checkpoint's headers, a
params.json alone, or the published shape.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

from ml4core.api import LayerSpec, ModelSpec, VisionSpec
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark import draft_spec, with_drafter
from ml4core.models.dspark_names import draft_name
from ml4core.models.dspark_weights import expected_draft_tensors, validate_draft
from ml4core.models.layer_table import DROPPED_ROPE_ROWS, build_model_spec
from ml4core.models.pixtral import vision_spec
from ml4core.models.pixtral_weights import expected_vision_tensors, validate_vision
from ml4core.models.seeded_formats import NEVER_QUANTISED
from ml4core.models.tensor_names import TensorName, canonical
from ml4core.models.tensor_table import Expected, expected_tensors
from ml4core.models.tensors import Naming, TensorReport, load_model_spec, validate
from ml4core.planning.formats import stored_bytes
from ml4core.planning.parts import cut_of, part_of_role
from ml4core.planning.variants import PUBLISHED, VARIANTS
from ml4core.planning.weights import STORED_ONLY, Lot, WeightTable

_STACKED = {"wqkv": 3, "w13": 2, "experts_w13": 2, "shared_w13": 2, "dense_w13": 2}
_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
        variant: one of ``VARIANTS``, or None where the checkpoint's own tensors tell the formats.
    """

    name: str
    spec: ModelSpec
    table: WeightTable
    variant: str | None = None

    def as_variant(self, variant: str) -> PlannedModel:
        """The same shape in another form. Raises ``ValueError`` if tensors tell the form."""
        if self.variant is None:
            raise ValueError(f"{self.name}: its tensors tell the formats of its weights")
        return _by_shape(self.name, self.spec, variant)


def published_model(variant: str = "fp8") -> PlannedModel:
    """Mistral Large 4 as it is published; what is not published has the defaults of the loader."""
    file = resources.files("ml4core") / "assets" / "published" / "params.json"
    spec = build_model_spec(json.loads(file.read_text("utf-8")))
    return _by_shape(PUBLISHED, _with_parts(spec), variant)


def checkpoint_model(checkpoint: Checkpoint, variant: str | None = None) -> PlannedModel:
    """The model of an opened checkpoint, which may be a params.json alone. Reads no data.

    Raises CheckpointError as the loader does, and ``ValueError`` for a ``variant`` of a checkpoint
    that has tensors: they tell the formats.
    """
    spec = load_model_spec(checkpoint)
    name = f"{checkpoint.path}"
    if not checkpoint.tensors:
        return _by_shape(name, _with_parts(spec), variant or "fp8")
    if variant is not None:
        raise ValueError(f"{name}: its tensors tell the formats of its weights")
    report = validate(checkpoint, spec)
    lots = [*_stored(expected_tensors(spec), report, canonical, read=_rows_read(spec))]
    lots += _frequencies(spec.layers)
    if _has(checkpoint, spec, "mtp"):
        spec = with_drafter(checkpoint, spec)
        assert spec.draft is not None
        report = validate_draft(checkpoint, spec.draft)
        expected = expected_draft_tensors(spec.draft)
        lots += _stored(expected, report, draft_name, "drafter")
        lots += _frequencies(spec.draft.layers, "drafter")
    vision = vision_spec(spec.extras, spec.hidden_size, name)
    if vision is not None and _has(checkpoint, spec, "vision_encoder"):
        spec = replace(spec, vision=vision)
        expected = expected_vision_tensors(vision)
        report = validate_vision(checkpoint, vision)
        lots += _stored(expected, report, _own_name, "vision")
        lots.append(_vision_frequencies(vision))
    return PlannedModel(name, spec, _table(lots))


def _has(checkpoint: Checkpoint, spec: ModelSpec, part: str) -> bool:
    if part == "mtp":
        return "mtp" in spec.extras and any(draft_name(name) for name in checkpoint.tensors)
    return any(name.startswith("vision_") for name in checkpoint.tensors)


def _with_parts(spec: ModelSpec) -> ModelSpec:
    """The model with the drafter and the encoder that its params.json describes."""
    if "mtp" in spec.extras:
        draft = draft_spec(spec)
        spec = replace(spec, draft=draft, taps=draft.taps)
    return replace(spec, vision=vision_spec(spec.extras, spec.hidden_size))


def _by_shape(name: str, spec: ModelSpec, variant: str) -> PlannedModel:
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r}; known are {', '.join(VARIANTS)}")
    read = _rows_read(spec)
    lots = [
        _shaped(entry, _format_in(variant, entry), rows_read=read.get(entry.name))
        for entry in _used(expected_tensors(spec))
    ]
    lots += _frequencies(spec.layers)
    if spec.draft is not None:
        entries = _used(expected_draft_tensors(spec.draft, own_frequencies=False))
        lots += [_shaped(entry, "bf16", "drafter") for entry in entries]
        lots += _frequencies(spec.draft.layers, "drafter")
    if spec.vision is not None:
        entries = _used(expected_vision_tensors(spec.vision))
        lots += [_shaped(entry, "bf16", "vision") for entry in entries]
        lots.append(_vision_frequencies(spec.vision))
    return PlannedModel(name, spec, _table(lots), variant)


def _format_in(variant: str, entry: Expected) -> str:
    if entry.role == "inv_freq" or entry.role.startswith(("ssmax_", "index_ssmax_")):
        return "fp32"
    if entry.kind != "matrix" or entry.role in NEVER_QUANTISED or variant == "bf16":
        return "bf16"
    if entry.role.startswith("experts_") and variant != "fp8":
        return variant
    return "fp8_block"


def _used(table: Mapping[str, Expected]) -> Iterator[Expected]:
    return (entry for entry in table.values() if entry.used)


class _One(NamedTuple):
    """One tensor, with its scales."""

    part: str
    role: str
    rows: int
    columns: int
    format: str
    kind: str
    mixed: bool
    stored: int


def _shaped(
    entry: Expected, format: str, part: str | None = None, rows_read: int | None = None
) -> _One:
    part = part or part_of_role(entry.role)
    rows, columns = _matrix_shape(part, entry.role, entry.shapes[0])
    size = stored_bytes(format, rows, columns)
    return _one(entry, part, (rows_read or rows, columns), format, size)


def _one(
    entry: Expected, part: str, shape: tuple[int, int], format: str, size: int, mixed: bool = False
) -> _One:
    kind: str = "plain" if entry.role == "patch_conv" else entry.kind
    if entry.role == "inv_freq":
        kind = STORED_ONLY  # what is held is computed from it, see _frequencies
    return _One(part, entry.role, *shape, format, kind, mixed, size)


def _matrix_shape(part: str, role: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """[rows, columns]; a vector lies along the side by which it is shared out."""
    size = 1
    for one in shape[1:]:
        size *= one
    return (shape[0], size) if len(shape) > 1 or cut_of(part, role) != "whole" else (1, shape[0])


def _stored(
    expected: Mapping[str, Expected],
    report: TensorReport,
    naming: Naming,
    part: str | None = None,
    read: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[_One]:
    """The tensors that ``report`` names, each with the bytes of its scales."""
    found = []
    formats = defaultdict(set)
    for entry in _used(expected):
        stem = _stem(naming, entry.name)
        if (vector := report.vectors.get(entry.name)) is not None:
            found.append((entry, _DTYPES[vector.dtype], vector.shape, vector.nbytes))
        elif (matrix := report.matrices.get(stem)) is not None:
            size = matrix.nbytes + (matrix.input_scale.nbytes if matrix.input_scale else 0)
            found.append((entry, matrix.format, entry.shapes[0], size))
            formats[entry.layer, entry.role].add(matrix.format)
    for entry, format, shape, size in found:
        of = part or part_of_role(entry.role)
        rows, columns = _matrix_shape(of, entry.role, shape)
        mixed = len(formats[entry.layer, entry.role]) > 1 and entry.role in _STACKED
        rows = read.get(entry.name, rows)
        yield _one(entry, of, (rows, columns), format, size, mixed)


def _stem(naming: Naming, name: str) -> str:
    key = naming(name)
    assert key is not None, name
    return key.stem


def _own_name(name: str) -> TensorName:
    stem, _, suffix = name.rpartition(".")
    return TensorName(stem, suffix)


def _rows_read(spec: ModelSpec) -> dict[str, int]:
    """Name -> rows of wkv_a that are read, where layers without rope have rows for one."""
    if DROPPED_ROPE_ROWS not in spec.extras:
        return {}
    return {
        f"layers.{layer.index}.attention.wkv_a_with_mqa.weight": layer.kv_lora_rank
        for layer in spec.layers
        if not layer.rope_dim
    }


def _frequencies(layers: Iterable[LayerSpec], part: str = "attention") -> Iterator[_One]:
    """Rotary frequencies: computed, not stored; each rope layer holds its own."""
    for layer in layers:
        if layer.rope is not None:
            half = layer.rope.dim // 2
            yield _One(part, "inv_freq", 1, half, "fp32", "vector", False, 0)


def _vision_frequencies(spec: VisionSpec) -> _One:
    return _One("vision", "inv_freq", 1, spec.head_dim // 2, "fp32", "vector", False, 0)


def _table(ones: Iterable[_One]) -> WeightTable:
    counts: Counter[_One] = Counter(ones)
    return WeightTable(
        Lot(
            part=one.part,
            role=one.role,
            rows=one.rows,
            columns=one.columns,
            format=one.format,
            kind=one.kind,
            stacked=_STACKED.get(one.role, 1),
            count=count,
            stored=count * one.stored,
            mixed=one.mixed,
        )
        for one, count in counts.items()
    )
