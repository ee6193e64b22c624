"""The names that a drafter's tensors have in checkpoints."""

from __future__ import annotations

import re

from ml4core.models.tensor_names import TensorName, canonical

PREFIX = "mtp_dspark."

_SCALES = r"weight(?:_scale(?:_inv|_2)?|_packed|_global_scale)?|qscale_weight|input_scale"
_STEMS = tuple(
    (re.compile(pattern), stem)
    for pattern, stem in (
        (rf"(?:fc|context_proj|main_proj)\.({_SCALES})", "fc"),
        (r"(?:context_norm|hidden_norm|main_norm)\.(weight)", "context_norm"),
        (r"mask_embeddings?(?:\.(weight))?", "mask_embeddings"),
        (r"markov_head\.w1(?:\.(weight))?", "markov_head.w1"),
        (rf"markov_head\.w2(?:\.({_SCALES}))?", "markov_head.w2"),
        (rf"markov_head\.joint_proj\.({_SCALES})", "markov_head.joint_proj"),
    )
)
_BIAS = "markov_head.joint_proj.bias"  # a vector, and no part of the matrix beside it


def inner_name(name: str) -> TensorName | None:
    """The canonical name without the prefix; None for a name that is not known.

    Layers, and the norm behind them, are named as those of a decoder.
    """
    if not name.startswith(PREFIX):
        return None
    inner = name.removeprefix(PREFIX)
    for pattern, stem in _STEMS:
        if (found := pattern.fullmatch(inner)) is not None:
            return TensorName(stem, found[1] or "weight")
    if inner == _BIAS:
        return TensorName(_BIAS, "")
    return canonical(inner)


def draft_name(name: str) -> TensorName | None:
    """The canonical name; None for a name that is not known."""
    key = inner_name(name)
    return None if key is None else TensorName(PREFIX + key.stem, key.suffix)
