"""A checkpoint's tensors held against the table of a model: all that does not fit, in one error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ml4core.api import ModelSpec
from ml4core.models import fused_experts
from ml4core.models.checkpoint import PARAMS_FILE, Checkpoint
from ml4core.models.errors import CheckpointError, shown
from ml4core.models.evidence import Shapes
from ml4core.models.fused_experts import is_fused
from ml4core.models.hf_config import read_hf_config
from ml4core.models.layer_table import build_model_spec
from ml4core.models.matrix_formats import PLAIN_DTYPES, Fault, Matrix, classify
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.tensor_names import TensorName, canonical, part_of
from ml4core.models.tensor_notes import input_scales, is_cache_scale, matrix_notes, why_not
from ml4core.models.tensor_table import Expected, expected_tensors

Naming = Callable[[str], TensorName | None]
"""Name in a checkpoint -> the canonical one, None for a name that is not known."""

MAX_LISTED = 24
_SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "missing": "missing",
        "unknown": "unknown or not called for",
        "duplicate": "twice, under two names",
        "misshapen": "misshapen",
        "unsupported": "in a form that can't be loaded",
    }
)


@dataclass(frozen=True)
class TensorReport:
    """Which tensors of a checkpoint make up the decoder.

    Attributes:
        matrices: stem -> the matrix, for all that may be quantised or are used as matrices.
        vectors: canonical name -> the tensor, for the rest.
        unused_parts: part of the model -> (tensors, bytes) that the decoder leaves unread.
        notes: what an operator should know.
        input_scales: stem -> the fixed scale of its activation, for routed experts that all have
            one. Those of other matrices are left unread.
    """

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, TensorInfo]
    unused_parts: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...]
    input_scales: Mapping[str, TensorInfo] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the decoder reads."""
        matrices = sum(matrix.nbytes for matrix in self.matrices.values())
        others = (*self.vectors.values(), *self.input_scales.values())
        return matrices + sum(info.nbytes for info in others)

    @property
    def formats(self) -> frozenset[str]:
        """Formats of the matrices."""
        return frozenset(matrix.format for matrix in self.matrices.values())


def shapes_of(checkpoint: Checkpoint) -> Shapes:
    """Name -> (dtype, shape) of every tensor, as `build_model_spec` takes them."""
    return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}


def load_model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The table of an opened checkpoint, its tensors taken into account where there are any.

    params.json is read where there is one, else config.json, see `read_hf_config`.

    Raises CheckpointError, as `build_model_spec` and `read_hf_config`.
    """
    shapes = shapes_of(checkpoint) or None
    folder = checkpoint.path if checkpoint.path.suffix != ".json" else checkpoint.path.parent
    if checkpoint.params is not None:
        where = f"{folder / PARAMS_FILE}" if folder == checkpoint.path else f"{checkpoint.path}"
        return build_model_spec(checkpoint.params, shapes, name=folder.name, where=where)
    if checkpoint.hf_config is None:
        raise CheckpointError(f"{checkpoint.path}: neither params.json nor config.json")
    where = f"{checkpoint.path} (config.json)"
    params, vision = read_hf_config(checkpoint.hf_config, where)
    spec = build_model_spec(params, shapes, name=folder.name, where=where)
    return replace(spec, extras={**spec.extras, **vision})


def validate(checkpoint: Checkpoint, spec: ModelSpec) -> TensorReport:
    """Hold the checkpoint's tensors against the table of `spec`. Reads no data.

    Raises one CheckpointError that lists every tensor that is missing, unknown, misshapen, there
    under two names, or in a form that can't be loaded.
    """
    return compare(f"{checkpoint.path}", checkpoint.tensors, expected_tensors(spec), spec)


def compare(
    where: str,
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, Expected],
    spec: ModelSpec | None = None,
    naming: Naming = canonical,
) -> TensorReport:
    """Hold `tensors` against the `expected` ones, whose keys are names as `naming` gives them.

    With `spec`, of a decoder, tensors of its other parts are passed over. Raises as `validate`,
    naming `where` they are.
    """
    comparison = _Comparison(spec, expected, naming)
    comparison.sort(tensors)
    comparison.compare()
    if comparison.faults:
        raise _error(where, comparison.faults)
    return comparison.report()


class _Comparison:
    def __init__(
        self, spec: ModelSpec | None, expected: Mapping[str, Expected], naming: Naming
    ) -> None:
        self.spec = spec
        self.expected = expected
        self.naming = naming
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.found: dict[str, dict[str, TensorInfo]] = defaultdict(dict)  # stem -> suffix -> tensor
        self.parts: dict[str, list[int]] = defaultdict(list)  # part -> bytes of each tensor
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, TensorInfo] = {}
        self.unread: list[TensorInfo] = []
        self.cache_scales: list[TensorInfo] = []
        self.stems = {self._name(name).stem for name in expected}

    def sort(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Put each tensor where it belongs by its name."""
        for name, info in tensors.items():
            if self.spec is not None and (part := part_of(name)) is not None:
                if any(block in self.spec.extras for block in part.blocks):
                    self.parts[part.name].append(info.nbytes)
                else:
                    blocks = " or ".join(part.blocks)
                    text = f"{shown(name)}: of a {part.name}, but params.json has no {blocks} block"
                    self.faults["unknown"].append(text)
                continue
            key = self.naming(name)
            if key is None:
                self.faults["unknown"].append(f"{shown(name)} {list(info.shape)}")
                continue
            if not is_fused(key):
                self._put(key, info)
                continue
            try:
                views = list(fused_experts.split(key, info))
            except ValueError as error:
                self.faults["misshapen"].append(f"{name}: {error}")
                continue
            for single, view in views:
                self._put(single, view)

    def _put(self, key: TensorName, info: TensorInfo) -> None:
        others = self.found[key.stem]
        if (other := others.get(key.suffix)) is not None:
            self.faults["duplicate"].append(f"{other.name} and {info.name}")
        others.setdefault(key.suffix, info)

    def compare(self) -> None:
        for name, entry in self.expected.items():
            key = self._name(name)
            parts = self.found.get(key.stem, {})
            if not entry.used:
                self.unread += parts.values()
            elif entry.kind == "vector":
                self._vector(entry, key, parts)
            else:
                self._matrix(entry, key, parts)
        for stem, parts in self.found.items():
            for suffix, info in parts.items():
                if is_cache_scale(stem, suffix, info):
                    self.cache_scales.append(info)
                elif not self._called_for(stem, suffix):
                    reason = why_not(self.spec, stem, suffix) if self.spec is not None else ""
                    self.faults["unknown"].append(f"{info.name} {list(info.shape)}{reason}")

    def _called_for(self, stem: str, suffix: str) -> bool:
        if stem not in self.stems:
            return False
        if str(TensorName(stem, suffix)) in self.expected:
            return True
        entry = self.expected.get(f"{stem}.weight")
        # Scales belong to their matrix, which says what is wrong with them.
        return entry is not None and suffix != "bias" and (not entry.used or entry.kind != "vector")

    def _vector(self, entry: Expected, key: TensorName, parts: Mapping[str, TensorInfo]) -> None:
        info = parts.get(key.suffix)
        if info is None:
            self.faults["missing"].append(_wanted(entry))
        elif info.dtype not in PLAIN_DTYPES:
            dtypes = ", ".join(PLAIN_DTYPES)
            text = f"{info.name}: dtype {info.dtype}; must be one of {dtypes}"
            self.faults["unsupported"].append(text)
        elif self._fits(entry, info):
            self.vectors[entry.name] = info

    def _matrix(self, entry: Expected, key: TensorName, parts: Mapping[str, TensorInfo]) -> None:
        if not parts:
            self.faults["missing"].append(_wanted(entry))
            return
        data = parts.get("weight", parts.get("weight_packed"))
        if data is not None and len(data.shape) != 2:
            self._fits(entry, data)
            return
        matrix = classify(key.stem, parts, quantised=entry.kind == "matrix")
        if isinstance(matrix, Fault):
            self.faults[matrix.kind].append(matrix.text)
            if matrix.kind != "unsupported" and data is not None and data.dtype != "U8":
                self._fits(entry, data)
        elif self._fits(entry, matrix.data, matrix.shape):
            self.matrices[key.stem] = matrix

    def _fits(
        self, entry: Expected, info: TensorInfo, shape: tuple[int, ...] | None = None
    ) -> bool:
        """Whether `shape`, of the values, is right; without it, that of the tensor."""
        shape = info.shape if shape is None else shape
        if shape in entry.shapes:
            return True
        wanted = " or ".join(str(list(shape)) for shape in entry.shapes)
        packed = f" of {list(shape)} values" if shape != info.shape else ""
        text = f"{info.name}: {list(info.shape)}{packed}, wanted {wanted} = {entry.meaning}"
        self.faults["misshapen"].append(text)
        return False

    def _name(self, name: str) -> TensorName:
        key = self.naming(name)
        assert key is not None, name
        return key

    def report(self) -> TensorReport:
        notes = []
        if self.unread:
            names = ", ".join(info.name for info in self.unread[:4])
            more = f" and {len(self.unread) - 4} more" if len(self.unread) > 4 else ""
            notes.append(f"left unread: {names}{more}; these layers read another layer's latent")
        unused = {part: (len(sizes), sum(sizes)) for part, sizes in self.parts.items()}
        notes += [f"unused part: {part}, {count} tensors" for part, (count, _) in unused.items()]
        scales = input_scales(self.matrices)
        notes += matrix_notes(self.matrices, scales)
        if self.cache_scales:
            notes.append(
                f"left unread: {len(self.cache_scales)} scales of a quantised KV cache "
                f"({self.cache_scales[0].name}); each cache layout has its own"
            )
        return TensorReport(self.matrices, self.vectors, unused, tuple(notes), scales)


def _wanted(entry: Expected) -> str:
    return f"{entry.name} {list(entry.shapes[0])} = {entry.meaning}"


def _error(where: str, faults: Mapping[str, list[str]]) -> CheckpointError:
    counts = ", ".join(f"{len(faults[key])} {key}" for key in _SECTIONS if faults.get(key))
    lines = [f"{where}: the tensors are not those of the model in params.json: {counts}"]
    for key, title in _SECTIONS.items():
        if faults.get(key):
            lines.append(f"  {title} ({len(faults[key])}):")
            lines += _capped(faults[key])
    return CheckpointError("\n".join(lines))


def _capped(texts: list[str]) -> Iterable[str]:
    yield from (f"    {text}" for text in texts[:MAX_LISTED])
    if len(texts) > MAX_LISTED:
        yield f"    and {len(texts) - MAX_LISTED} more"


def format_counts(report: TensorReport) -> dict[str, tuple[int, int]]:
    """Format -> (matrices, bytes)."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for matrix in report.matrices.values():
        counts[matrix.format] += 1
        sizes[matrix.format] += matrix.nbytes
    return {name: (counts[name], sizes[name]) for name in sorted(counts)}
