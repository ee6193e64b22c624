"""Rotary embedding and softmax scale as config.json of Hugging Face states them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from ml4core.models.errors import shown
from ml4core.models.positions import mscale

_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "llama_4_scaling_beta",
        "partial_rotary_factor",
        "truncate",
    }
)


class Rope(NamedTuple):
    """Blocks of params.json, and what can't be expressed in them."""

    params: dict[str, Any]
    problems: list[str]


def read_rope(config: Mapping[str, Any], model_type: str) -> Rope:
    """`rope_theta`, `yarn`, `llama_4_scaling` and `ssmax` of `config`.

    Its widths, `qk_nope_head_dim` and `qk_rope_head_dim`, are there.
    """
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    block = dict(config.get(name) or {})
    problems = [
        f"{name}.{key}: {shown(block[key])}; unknown key, which may change the model"
        for key in sorted(block.keys() - _KEYS)
    ]
    kind = block.get("rope_type", block.get("type", "default"))
    if not block and model_type == "mistral4":
        problems.append("rope_parameters: missing; it says whether positions are scaled")
    params: dict[str, Any] = {"rope_theta": block.get("rope_theta", config.get("rope_theta"))}
    if params["rope_theta"] is None:
        problems.append(f"{name}.rope_theta: missing; it has no default")
    original = block.get("original_max_position_embeddings")
    if kind == "yarn":
        params["yarn"] = _yarn(block, config, name, problems)
    elif kind != "default":
        text = f"{name}.rope_type: {shown(kind)}; rotary embeddings are 'default' or 'yarn'"
        problems.append(text)
    if (beta := block.get("llama_4_scaling_beta")) is not None:
        params["llama_4_scaling"] = {"beta": beta, "original_max_position_embeddings": original}
    else:
        params["ssmax"] = {"kind": "none"}
    _partial(block, config, name, model_type, problems)
    return Rope(params, problems)


def _yarn(
    block: Mapping[str, Any], config: Mapping[str, Any], name: str, problems: list[str]
) -> dict[str, Any]:
    original, factor = block.get("original_max_position_embeddings"), block.get("factor")
    if not _is_number(original) or original <= 0:
        problems.append(
            f"{name}.original_max_position_embeddings: {shown(original)}; YaRN needs it"
        )
        return {}
    if factor is None and _is_number(config.get("max_position_embeddings")):
        factor = config["max_position_embeddings"] / original
    if not _is_number(factor):
        problems.append(f"{name}.factor: {shown(factor)}; YaRN needs it")
        return {}
    if block.get("truncate", True) is not True:
        problems.append(
            f"{name}.truncate: {shown(block['truncate'])}; YaRN's range is cut to whole pairs: true"
        )
    for key in ("mscale", "mscale_all_dim", "attention_factor", "beta_fast", "beta_slow"):
        if block.get(key) is not None and not _is_number(block[key]):
            problems.append(f"{name}.{key}: {shown(block[key])}; must be a number")
            return {}
    one: float | None = block.get("mscale")
    all_dims: float | None = block.get("mscale_all_dim")
    stated: float | None = block.get("attention_factor")
    # What cos and sin are multiplied by, and so the rotated share of the scores alone.
    magnitude = stated
    if stated is None:
        magnitude = mscale(factor)
        if one and all_dims:
            magnitude = _mscale(factor, one) / _mscale(factor, all_dims)
    if magnitude != 1.0:
        key = "attention_factor" if stated is not None else "mscale"
        value = stated if stated is not None else one
        problems.append(
            f"{name}.{key}: {shown(value)} makes cos and sin {magnitude:g} times as large, which "
            "can't be expressed; mscale equal to mscale_all_dim, or attention_factor 1.0, works"
        )
    if all_dims not in (None, 0, 1) and factor > 1:
        problems.append(
            f"{name}.mscale_all_dim: {shown(all_dims)}; the softmax scale is corrected by YaRN's "
            "whole magnitude or not at all: 1.0 or 0"
        )
    return {
        "original_max_position_embeddings": original,
        "factor": float(factor),
        "beta": float(block.get("beta_fast") or 32.0),
        "alpha": float(block.get("beta_slow") or 1.0),
        "apply_scale": bool(all_dims),
    }


def _mscale(factor: float, weight: float) -> float:
    return 1.0 + weight * (mscale(factor) - 1.0)


def _partial(
    block: Mapping[str, Any],
    config: Mapping[str, Any],
    name: str,
    model_type: str,
    problems: list[str],
) -> None:
    """The rotated share must be the rope dims: the frequencies are made for their number."""
    share, rope = block.get("partial_rotary_factor"), config["qk_rope_head_dim"]
    if share is None:
        return
    # Of the head in Mistral's models, of the rope dims in others.
    width = rope + config["qk_nope_head_dim"] if model_type == "mistral4" else rope
    if not _is_number(share) or int(width * share) != rope:
        problems.append(
            f"{name}.partial_rotary_factor: {shown(share)} of {width} dims; the rotated dims are "
            f"qk_rope_head_dim, {rope}"
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
