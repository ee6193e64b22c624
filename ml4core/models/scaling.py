"""Which SSMax a layer's query and its index query have."""

from __future__ import annotations

from ml4core.api import SSMaxKind, SSMaxSpec
from ml4core.models.assumptions import Choices, Evidence
from ml4core.models.evidence import Tensors
from ml4core.models.params import Indexer, Params, SSMax

DEFAULT_BETA = 0.1


def query_ssmax(p: Params, tensors: Tensors, choices: Choices) -> SSMaxSpec:
    """SSMax of the attention query, from `ssmax`, `llama_4_scaling` or the tensors."""
    block = p.ssmax or SSMax()
    if p.llama_4_scaling is not None:  # what both blocks state is equal, by the checks of the file
        block = block.model_copy(
            update={
                "kind": "llama4",
                "beta": p.llama_4_scaling.beta,
                "original_max_position_embeddings": (
                    p.llama_4_scaling.original_max_position_embeddings
                ),
            }
        )
    return _ssmax("ssmax", "attention.ssmax_", block, p, tensors, choices)


def index_ssmax(p: Params, indexer: Indexer, tensors: Tensors, choices: Choices) -> SSMaxSpec:
    """SSMax of the index query. One positive factor for all heads could not change a selection."""
    block = indexer.ssmax or SSMax()
    return _ssmax("indexer.ssmax", "attention.indexer.ssmax_", block, p, tensors, choices)


def _ssmax(
    key: str, stem: str, block: SSMax, p: Params, tensors: Tensors, choices: Choices
) -> SSMaxSpec:
    scales = bool(tensors.layers_with(stem + "scale"))
    biases = bool(tensors.layers_with(stem + "bias"))
    learned = Evidence("log", f"layers.*.{stem}scale being here") if scales else None
    kind: SSMaxKind = choices.take(f"{key}.kind", block.kind, seen=learned)
    if kind == "none":
        return SSMaxSpec()
    original = block.original_max_position_embeddings
    if kind == "llama4":
        original = choices.take("ssmax.original_max_position_embeddings", original)
    limited = kind != "llama4" and choices.take(f"{key}.n", block.n) == "topk"
    per_head = block.per_head
    if per_head is None:
        # Where no tensor is known, kind log is taken to be learned: it has no published constant.
        per_head = scales if tensors.known else kind == "log"
    scale = block.scale
    if kind == "log" and not per_head:
        scale = choices.take(f"{key}.scale", scale)
    return SSMaxSpec(
        kind=kind,
        beta=DEFAULT_BETA if block.beta is None else block.beta,
        original_max_position=original or 8192,
        scale=1.0 if scale is None else scale,
        per_head=per_head,
        bias=(biases and kind == "log") if block.bias is None else block.bias,
        n_limit=p.indexer.topk if limited and p.indexer is not None else None,
    )
