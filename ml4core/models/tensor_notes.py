"""What of a checkpoint is not used as it lies there, and why, in words for an operator."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ml4core.api import ModelSpec
from ml4core.models.matrix_formats import Matrix
from ml4core.models.safetensors_file import TensorInfo

_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.w([123])")


def is_cache_scale(stem: str, suffix: str, info: TensorInfo) -> bool:
    """Whether this is the scale of a quantised KV cache, which Mistral's FP8 checkpoints have."""
    single = info.shape in ((), (1,))
    return stem.endswith("_fake_quantizer") and suffix == "qscale_act" and single


def input_scales(matrices: Mapping[str, Matrix]) -> dict[str, TensorInfo]:
    """Stem -> fixed activation scale, of the stacks of routed experts that have all of theirs."""
    return {
        stem: scale
        for stems in _stacks(matrices).values()
        for stem in stems
        if all(matrices[other].input_scale is not None for other in stems)
        and (scale := matrices[stem].input_scale) is not None
    }


def matrix_notes(
    matrices: Mapping[str, Matrix], used_scales: Mapping[str, TensorInfo]
) -> Iterator[str]:
    """Notes on stacks of several formats, and on activation scales beside `used_scales`."""
    mixed = [
        (name, formats)
        for name, stems in _stacks(matrices).items()
        if len(formats := sorted({matrices[stem].format for stem in stems})) > 1
    ]
    if mixed:
        (name, formats), more = mixed[0], len(mixed) - 1
        alike = f" and {more} more stacks" if more else ""
        yield (
            f"{name}{alike}: experts in {', '.join(formats)}; one stack has one format, so all "
            "of them are decoded"
        )
    unread = [
        stem
        for stem, matrix in matrices.items()
        if matrix.input_scale is not None and stem not in used_scales
    ]
    if unread:
        first = matrices[unread[0]].input_scale
        assert first is not None
        yield (
            f"left unread: {len(unread)} fixed activation scales ({first.name}); activations are "
            "scaled by what they are"
        )


def why_not(spec: ModelSpec, stem: str, suffix: str) -> str:
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
        return ": of a fake quantizer only a single number, qscale_act, is known"
    if inner.startswith("feed_forward.") and layer.moe is not None:
        return f": layer {number} is a MoE layer"
    if inner.startswith(("experts.", "shared_experts.", "gate")):
        if layer.moe is None:
            return f": layer {number} is dense"
        if inner.startswith("experts."):
            return f": moe.num_experts is {layer.moe.experts}"
        return ": moe.num_shared_experts is 0"
    return ""


def _stacks(matrices: Mapping[str, Matrix]) -> dict[str, list[str]]:
    """The stems that are loaded as one stack of routed experts."""
    stacks: dict[str, list[str]] = defaultdict(list)
    for stem in matrices:
        if (found := _EXPERT.fullmatch(stem)) is not None:
            stacks[f"{found[1]}.*.{'w2' if found[2] == '2' else 'w1, w3'}"].append(stem)
    return stacks
