"""The drafter's tensors: what must be there, and reading them as weights, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ml4core.api import DraftSpec, LayerSpec, ModelSpec
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark_names import PREFIX, draft_name
from ml4core.models.errors import CheckpointError
from ml4core.models.matrix_formats import PLAIN_DTYPES
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.tensor_names import TensorName, canonical
from ml4core.models.tensor_table import Expected, Kind, expected_tensors
from ml4core.models.tensors import TensorReport, compare
from ml4core.models.weight_reader import Progress, WeightReader
from ml4core.models.weights import Loader, Weights

_FREQUENCIES = "rope_freqs"


def expected_draft_tensors(draft: DraftSpec, own_frequencies: bool = True) -> dict[str, Expected]:
    """The drafter's tensors by canonical name, in the order in which they are loaded.

    `own_frequencies`: whether learned frequencies that all draft layers share are the drafter's.
    """
    return {entry.name: entry for entry in _entries(draft, own_frequencies)}


def _entries(draft: DraftSpec, own_frequencies: bool) -> Iterator[Expected]:
    hidden, vocab, rank = draft.hidden_size, draft.vocab_size, draft.markov_rank

    def entry(name: str, role: str, meaning: str, kind: Kind, *shape: int) -> Expected:
        return Expected(PREFIX + name, role, (shape,), meaning, kind)

    taps = len(draft.taps)
    yield entry(
        "fc.weight", "fc", f"dim x {taps} target layers * dim", "matrix", hidden, taps * hidden
    )
    yield entry("context_norm.weight", "context_norm", "dim", "vector", hidden)
    if draft.mask_rows:
        name, role = "mask_embeddings.weight", "mask_embeddings"
        yield entry(name, role, "mask_rows x dim", "plain", draft.mask_rows, hidden)
    head = "markov_head."
    table = "vocab_size x markov_rank"
    yield entry(f"{head}w1.weight", "markov_w1", table, "plain", vocab, rank)
    yield entry(
        f"{head}joint_proj.weight",
        "markov_joint",
        "3 * markov_rank x (2 * markov_rank + dim)",
        "matrix",
        3 * rank,
        2 * rank + hidden,
    )
    meaning = "3 * markov_rank"
    yield entry(f"{head}joint_proj.bias", "markov_joint_bias", meaning, "vector", 3 * rank)
    yield entry(f"{head}w2.weight", "markov_w2", table, "matrix", vocab, rank)
    shared = (
        {"tok_embeddings.weight"} if own_frequencies else {"tok_embeddings.weight", _FREQUENCIES}
    )
    for inner in expected_tensors(_as_decoder(draft)).values():
        if inner.name not in shared:
            role = "norm" if inner.role == "final_norm" else inner.role
            yield replace(inner, name=PREFIX + inner.name, role=role)


def _as_decoder(draft: DraftSpec) -> ModelSpec:
    """The drafter's layers as those of a decoder, whose tensors are named alike."""
    return ModelSpec(
        name=PREFIX,
        vocab_size=draft.vocab_size,
        hidden_size=draft.hidden_size,
        norm_eps=draft.norm_eps,
        max_position=0,
        tied_embeddings=True,
        layers=draft.layers,
    )


def validate_draft(checkpoint: Checkpoint, draft: DraftSpec) -> TensorReport:
    """Hold the checkpoint's drafter against `draft`. Reads no data; looks at no other tensor.

    Raises one CheckpointError that lists every tensor that is missing, unknown, misshapen, there
    under two names, or in a form that can't be loaded.
    """
    tensors = {name: info for name, info in checkpoint.tensors.items() if name.startswith(PREFIX)}
    own = any(draft_name(name) == TensorName(PREFIX + _FREQUENCIES, "") for name in tensors)
    if _shares_frequencies(draft) and not own and _target_frequencies(checkpoint) is None:
        own = True  # so that it is listed as missing
    expected = expected_draft_tensors(draft, own)
    return compare(f"{checkpoint.path}: drafter", tensors, expected, naming=draft_name)


def load_draft(
    checkpoint: Checkpoint,
    draft: DraftSpec,
    dtype: torch.dtype = torch.bfloat16,
    *,
    progress: Progress | None = None,
    report: TensorReport | None = None,
) -> Iterator[tuple[LayerSpec | None, Weights]]:
    """The weights of `DRAFT_WEIGHTS` with layer None, then `LAYER_WEIGHTS` of each draft layer.

    `embedding` and `output` are not among them: they are the target's, loaded already. All tensors
    are compared with `draft` first, at the call; `report` is what `validate_draft` gave, if that is
    known already. Matrices keep the checkpoint's format; FP8 that can't stay FP8 is decoded to
    `dtype`, float32 or bfloat16. `progress(done, total)` counts bytes. Raises CheckpointError.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype {dtype}; weights are decoded to torch.float32 or torch.bfloat16")
    report = validate_draft(checkpoint, draft) if report is None else report
    learned = _frequencies(checkpoint, draft, report)
    reader = WeightReader(checkpoint, report, dtype, progress)
    return _load(draft, Loader(_as_decoder(draft), reader, PREFIX, learned))


def _load(draft: DraftSpec, loader: Loader) -> Iterator[tuple[LayerSpec | None, Weights]]:
    # No local name for what is yielded: it would keep one layer alive while the next is read.
    yield None, _top(draft, loader.reader)
    for layer in draft.layers:
        yield layer, loader.layer(layer)


def _top(draft: DraftSpec, read: WeightReader) -> Weights:
    weights: Weights = {
        "fc": read.matrix(f"{PREFIX}fc"),
        "context_norm": read.vector(f"{PREFIX}context_norm.weight"),
        "norm": read.vector(f"{PREFIX}norm.weight"),
        "markov_w1": read.matrix(f"{PREFIX}markov_head.w1").data,
        "markov_joint": read.matrix(f"{PREFIX}markov_head.joint_proj"),
        "markov_joint_bias": read.vector(f"{PREFIX}markov_head.joint_proj.bias"),
        "markov_w2": read.matrix(f"{PREFIX}markov_head.w2"),
    }
    if draft.mask_rows:
        weights["mask_embeddings"] = read.matrix(f"{PREFIX}mask_embeddings").data
    return weights


def _shares_frequencies(draft: DraftSpec) -> bool:
    """Whether all draft layers have learned frequencies in common."""
    ropes = [layer.rope for layer in draft.layers]
    return any(rope and rope.lerope != "none" and rope.lerope_scope == "global" for rope in ropes)


def _target_frequencies(checkpoint: Checkpoint) -> TensorInfo | None:
    names = (name for name in checkpoint.tensors if canonical(name) == (_FREQUENCIES, ""))
    name = next(names, None)
    return None if name is None else checkpoint.tensors[name]


def _frequencies(checkpoint: Checkpoint, draft: DraftSpec, report: TensorReport) -> Tensor | None:
    """The drafter's frequencies fp32 [R/2], or if it has none of its own, the target's."""
    if not _shares_frequencies(draft):
        return None
    vectors: Mapping[str, TensorInfo] = report.vectors
    info = vectors.get(PREFIX + _FREQUENCIES) or _target_frequencies(checkpoint)
    if info is None or info.dtype not in PLAIN_DTYPES:
        found = "missing" if info is None else f"dtype {info.dtype}"
        raise CheckpointError(
            f"{checkpoint.path}: {_FREQUENCIES}: {found}; the drafter uses the target's learned "
            f"frequencies, one of {', '.join(PLAIN_DTYPES)}"
        )
    return checkpoint.read(info.name).to(torch.float32)
