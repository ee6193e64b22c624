"""The names that tensors have in checkpoints, and the one canonical name for each.

A canonical name is a stem and a suffix: `layers.3.attention.wq` and `weight`. Mistral's own names
are canonical; Hugging Face's names, and spellings of what has no published name, are aliases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

DATA_SUFFIXES = ("weight", "bias")
SCALE_SUFFIXES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "qscale_weight")
OTHER_SUFFIXES = (
    "weight_packed",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
    "activation_scale",
    "qscale_act",
)


class TensorName(NamedTuple):
    """A canonical name. The suffix is empty for tensors that have none."""

    stem: str
    suffix: str

    def __str__(self) -> str:
        return f"{self.stem}.{self.suffix}" if self.suffix else self.stem


class Part(NamedTuple):
    """Tensors that belong to another part of the model than the decoder."""

    name: str
    blocks: tuple[str, ...]
    """The blocks of params.json, one of which must be there if the part is."""


_SUFFIX = re.compile(
    r"(.+)\.(" + "|".join((*DATA_SUFFIXES, *SCALE_SUFFIXES, *OTHER_SUFFIXES)) + ")"
)
_NUMBER = r"(0|[1-9]\d{0,4})"  # no leading zero: one spelling for each index
_ROOT = r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?"
_LAYER = re.compile(_ROOT + r"layers\." + _NUMBER + r"\.(.+)")
_OUTER = re.compile(_ROOT + r"(.+)")
_ATTENTION = r"(?:attention|self_attn)\."


def _patterns(table: Mapping[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), name) for pattern, name in table.items())


# Stems inside a layer, and outside of layers: pattern of the whole stem -> canonical stem.
_LAYER_STEMS = _patterns(
    {
        r"attention_norm|input_layernorm": "attention_norm",
        r"ffn_norm|post_attention_layernorm": "ffn_norm",
        _ATTENTION + r"(?:wq|q_proj)": "attention.wq",
        _ATTENTION + r"(?:wq_a|q_a_proj)": "attention.wq_a",
        _ATTENTION + r"(?:q_a_norm|q_a_layernorm)": "attention.q_a_norm",
        _ATTENTION + r"(?:wq_b|q_b_proj)": "attention.wq_b",
        _ATTENTION + r"(?:wkv_a_with_mqa|kv_a_proj_with_mqa)": "attention.wkv_a_with_mqa",
        _ATTENTION + r"(?:kv_a_norm|kv_a_layernorm)": "attention.kv_a_norm",
        _ATTENTION + r"(?:wkv_b|kv_b_proj)": "attention.wkv_b",
        _ATTENTION + r"(?:wo|o_proj)": "attention.wo",
        _ATTENTION + r"indexer\.(?:wq|wq_b)": "attention.indexer.wq",
        _ATTENTION + r"indexer\.(wk|q_norm|k_norm|weights_proj)": r"attention.indexer.\1",
        _ATTENTION + r"((?:k|v|kv|q|p)_fake_quantizer)": r"attention.\1",
        r"(?:feed_forward\.w1|mlp\.gate_proj)": "feed_forward.w1",
        r"(?:feed_forward\.w2|mlp\.down_proj)": "feed_forward.w2",
        r"(?:feed_forward\.w3|mlp\.up_proj)": "feed_forward.w3",
        r"(?:mlp\.)?gate": "gate",
        r"(?:mlp\.)?experts\." + _NUMBER + r"\.(?:w1|gate_proj)": r"experts.\1.w1",
        r"(?:mlp\.)?experts\." + _NUMBER + r"\.(?:w2|down_proj)": r"experts.\1.w2",
        r"(?:mlp\.)?experts\." + _NUMBER + r"\.(?:w3|up_proj)": r"experts.\1.w3",
        r"(?:mlp\.)?shared_experts\.(?:w1|gate_proj)": "shared_experts.w1",
        r"(?:mlp\.)?shared_experts\.(?:w2|down_proj)": "shared_experts.w2",
        r"(?:mlp\.)?shared_experts\.(?:w3|up_proj)": "shared_experts.w3",
    }
)
_OUTER_STEMS = _patterns(
    {
        r"tok_embeddings|embed_tokens": "tok_embeddings",
        r"norm": "norm",
        r"output|lm_head": "output",
    }
)
# Whole names inside a layer, with no suffix of their own.
_FUSED = r"(?:mlp\.)?experts\."
_SCALE = r"(?:ssmax|ssmax_scale|ssmax\.scale|ssmax\.weight|s)"
_BIAS = r"(?:ssmax_bias|ssmax\.bias|s_bias)"
_LAYER_WHOLES = _patterns(
    {
        _ATTENTION + _SCALE: "attention.ssmax_scale",
        _ATTENTION + _BIAS: "attention.ssmax_bias",
        _ATTENTION + r"indexer\." + _SCALE: "attention.indexer.ssmax_scale",
        _ATTENTION + r"indexer\." + _BIAS: "attention.indexer.ssmax_bias",
        _ATTENTION + r"rope_freqs[\w.]*": "attention.rope_freqs",
        r"mlp\.gate\.e_score_correction_bias": "gate.bias",
        # All experts in one tensor, gate above up; see `fused_experts`.
        _FUSED + r"gate_up_proj(?:\.weight)?": "experts.w13.weight",
        _FUSED + r"down_proj(?:\.weight)?": "experts.w2.weight",
        _FUSED + r"gate_up_proj_(scale_inv|scale)": r"experts.w13.weight_\1",
        _FUSED + r"down_proj_(scale_inv|scale)": r"experts.w2.weight_\1",
        _FUSED + r"gate_up_proj_activation_scale": "experts.w13.activation_scale",
        _FUSED + r"down_proj_activation_scale": "experts.w2.activation_scale",
    }
)
_OUTER_WHOLES = _patterns({r"rope_freqs[\w.]*": "rope_freqs"})

# The converter of Hugging Face permutes this encoder's wq and wk, so it is not Mistral's.
_HF_VISION = Part("Hugging Face vision encoder", ("vision_config",))

PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "mtp_dspark.": Part("drafter", ("mtp",)),
        "vision_encoder.": Part("vision encoder", ("vision_encoder", "multimodal")),
        "vision_language_adapter.": Part("vision encoder", ("vision_encoder", "multimodal")),
        "patch_merger.": Part("vision encoder", ("vision_encoder", "multimodal")),
        "pre_mm_projector_norm": Part("vision encoder", ("vision_encoder", "multimodal")),
        "vision_tower.": _HF_VISION,
        "multi_modal_projector.": _HF_VISION,
        "model.vision_tower.": _HF_VISION,
        "model.multi_modal_projector.": _HF_VISION,
    }
)
"""Prefixes of names that the decoder has no use for."""


@lru_cache(
    maxsize=1 << 17
)  # each name is asked for several times, and the largest model has 55,000
def canonical(name: str) -> TensorName | None:
    """The canonical name of a decoder's tensor; None for a name that is not known."""
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        prefix, inner = f"layers.{layer[1]}.", layer[2]
        stems, wholes = _LAYER_STEMS, _LAYER_WHOLES
    else:
        outer = _OUTER.fullmatch(name)
        prefix, inner = "", outer[1] if outer is not None else name
        stems, wholes = _OUTER_STEMS, _OUTER_WHOLES
    if (whole := _translate(inner, wholes)) is not None:
        return _split(prefix + whole)
    split = _SUFFIX.fullmatch(inner)
    if split is None or (stem := _translate(split[1], stems)) is None:
        return None
    return TensorName(prefix + stem, split[2])


def part_of(name: str) -> Part | None:
    """The other part of the model that a tensor belongs to, None for the decoder's own."""
    return next((part for prefix, part in PARTS.items() if name.startswith(prefix)), None)


def _translate(text: str, table: tuple[tuple[re.Pattern[str], str], ...]) -> str | None:
    for pattern, name in table:
        if (found := pattern.fullmatch(text)) is not None:
            return found.expand(name)
    return None


def _split(name: str) -> TensorName:
    split = _SUFFIX.fullmatch(name)
    return TensorName(split[1], split[2]) if split is not None else TensorName(name, "")
