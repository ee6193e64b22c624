"""A checkpoint's tensors held against the table of a model: all that does not fit, in one error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ml4core.api import ModelSpec
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError, shown
from ml4core.models.evidence import Shapes
from ml4core.models.layer_table import build_model_spec
from ml4core.models.matrix_formats import PLAIN_DTYPES, Fault, Matrix, classify
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.tensor_names import TensorName, canonical, part_of
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
    """

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, TensorInfo]
    unused_parts: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the decoder reads."""
        infos = list(self.vectors.values())
        for matrix in self.matrices.values():
            infos += [matrix.data] if matrix.scale is None else [matrix.data, matrix.scale]
        return sum(info.nbytes for info in infos)

    @property
    def formats(self) -> frozenset[str]:
        """Formats of the matrices."""
        return frozenset(matrix.format for matrix in self.matrices.values())


def shapes_of(checkpoint: Checkpoint) -> Shapes:
    """Name -> (dtype, shape) of every tensor, as `build_model_spec` takes them."""
    return {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}


def load_model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The table of an opened checkpoint, its tensors taken into account where there are any.

    Raises CheckpointError, as `build_model_spec`, and for a checkpoint without params.json.
    """
    where = f"{checkpoint.path}"
    if checkpoint.params is None:
        raise CheckpointError(
            f"{where}: no params.json; a checkpoint in Hugging Face format alone (config.json) "
            "can't be loaded yet, Mistral's format can"
        )
    shapes = shapes_of(checkpoint) or None
    folder = checkpoint.path if checkpoint.path.suffix != ".json" else checkpoint.path.parent
    return build_model_spec(checkpoint.params, shapes, name=folder.name, where=where)


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
            others = self.found[key.stem]
            if (other := others.get(key.suffix)) is not None:
                self.faults["duplicate"].append(f"{other.name} and {name}")
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
                if not self._called_for(stem, suffix):
                    reason = _why_not(self.spec, stem, suffix) if self.spec is not None else ""
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
        if (data := parts.get("weight")) is not None and len(data.shape) != 2:
            self._fits(entry, data)
            return
        matrix = classify(key.stem, parts, quantised=entry.kind == "matrix")
        if isinstance(matrix, Fault):
            self.faults[matrix.kind].append(matrix.text)
            if matrix.kind != "unsupported" and data is not None:
                self._fits(entry, data)
        elif self._fits(entry, matrix.data):
            self.matrices[key.stem] = matrix

    def _fits(self, entry: Expected, info: TensorInfo) -> bool:
        if info.shape in entry.shapes:
            return True
        wanted = " or ".join(str(list(shape)) for shape in entry.shapes)
        text = f"{info.name}: {list(info.shape)}, wanted {wanted} = {entry.meaning}"
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
        return TensorReport(self.matrices, self.vectors, unused, tuple(notes))


def _wanted(entry: Expected) -> str:
    return f"{entry.name} {list(entry.shapes[0])} = {entry.meaning}"


def _why_not(spec: ModelSpec, stem: str, suffix: str) -> str:
    """Why a tensor of a known name has no place in this model; empty where nothing can be said."""
    if stem == "output":
        return ": params.json says tied_embeddings"
    if stem == "rope_freqs":
        return ": no layer has learned frequencies of scope 'global'"
    if not stem.startswith("layers."):
        return ""
    number, inner = stem.split(".", 2)[1:]
    if int(number) >= len(spec.layers):
        return f": params.json has layers 0 to {len(spec.layers) - 1}"
    layer = spec.layers[int(number)]
    if inner.startswith("attention.indexer.") and layer.indexer is None:
        if layer.topk_source is None:
            return ": params.json has no indexer block"
        return f": layer {number} uses the selection of layer {layer.topk_source}"
    if inner == "attention.rope_freqs" and layer.rope is None:
        return f": layer {number} is a NoPE layer"
    if inner == "gate" and suffix == "bias":
        return ": a router with a load-balancing bias is not supported"
    if inner.endswith("_fake_quantizer"):
        return ": scales of a quantised KV cache are not supported by this loader yet"
    if inner.startswith("feed_forward.") and layer.moe is not None:
        return f": layer {number} is a MoE layer"
    if inner.startswith(("experts.", "shared_experts.", "gate")):
        if layer.moe is None:
            return f": layer {number} is dense"
        if inner.startswith("experts."):
            return f": moe.num_experts is {layer.moe.experts}"
        return ": moe.num_shared_experts is 0"
    return ""


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
        sizes[matrix.format] += matrix.data.nbytes + (matrix.scale.nbytes if matrix.scale else 0)
    return {name: (counts[name], sizes[name]) for name in sorted(counts)}
