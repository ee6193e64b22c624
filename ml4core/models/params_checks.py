"""Contradictions between keys of params.json. A check runs if the keys that it reads are right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from ml4core.models import schedules
from ml4core.models.errors import shown
from ml4core.models.params import Params, SSMax
from ml4core.models.schedules import nope_layers, pattern_problems, stated_full

_NUMBER = re.compile(r"0|[1-9]\d{0,5}", re.ASCII)
_SSMAX_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "none": frozenset(),
        "llama4": frozenset({"beta", "original_max_position_embeddings", "per_head"}),
        "log": frozenset({"scale", "n", "per_head", "bias"}),
        "pow": frozenset({"beta", "original_max_position_embeddings", "n", "per_head"}),
        "floor": frozenset({"beta", "original_max_position_embeddings", "n", "per_head"}),
    }
)
"""What each kind of SSMax depends on."""


def _head_dim(p: Params) -> Iterator[str]:
    if p.head_dim is not None and p.qk_nope_head_dim is not None:
        yield from head_dim_problems(p, p.qk_nope_head_dim)


def head_dim_problems(p: Params, nope_dim: int) -> list[str]:
    wanted = nope_dim + p.qk_rope_head_dim
    if p.head_dim in (None, wanted):
        return []
    return [
        f"head_dim: {p.head_dim}; qk_nope_head_dim {nope_dim} + qk_rope_head_dim "
        f"{p.qk_rope_head_dim} is {wanted}; state that, or leave head_dim out"
    ]


def _rope_dim(p: Params) -> Iterator[str]:
    if p.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim: {p.qk_rope_head_dim} is odd; rotation works on pairs"
    if p.qk_rope_head_dim == 0 and nope_layers(p) != frozenset(range(p.n_layers)):
        yield "qk_rope_head_dim: 0 needs every layer in nope_layers; others are rotated"


def _kv_heads(p: Params) -> Iterator[str]:
    if p.n_kv_heads not in (None, 1, p.n_heads):
        yield (
            f"n_kv_heads: {p.n_kv_heads}; latent attention has one latent for all heads: "
            f"{p.n_heads} (n_heads), 1, or left out"
        )


def _window(p: Params) -> Iterator[str]:
    window = p.sliding_window
    if window is not None and not (isinstance(window, list) and set(window) == {None}):
        yield f"sliding_window: {shown(window)}; no decoder layer has a window yet: null"


def _positions(p: Params) -> Iterator[str]:
    if p.max_position_embeddings is p.max_seq_len is p.yarn is None:
        yield "max_position_embeddings: missing; state it, max_seq_len, or yarn"


def _yarn(p: Params) -> Iterator[str]:
    if p.yarn is None:
        return
    fast, slow = p.yarn.beta or 32.0, p.yarn.alpha or 1.0
    if fast <= slow:
        yield f"yarn.beta: {fast}; must be above yarn.alpha, {slow}"


def _nope(p: Params) -> Iterator[str]:
    layers = p.nope_layers
    if layers is not None and (outside := [layer for layer in layers if layer >= p.n_layers]):
        yield f"nope_layers: {outside}; layers are 0 to {p.n_layers - 1}"
    if layers is not None and len(set(layers)) < len(layers):
        yield f"nope_layers: {shown(layers)} names a layer twice"
    if layers is not None and p.nope_every is not None:
        every = schedules.every_nth(p.nope_every, p.n_layers)
        if every != frozenset(layers):
            yield (
                f"nope_every: {p.nope_every} gives layers {shown(sorted(every))}, nope_layers "
                f"says {shown(layers)}; leave one out"
            )


def _kv_sharing(p: Params) -> Iterator[str]:
    consumers = p.kv_sharing or {}
    nope = nope_layers(p)
    for name, owner in consumers.items():
        key = f"kv_sharing.{name}"
        if not _NUMBER.fullmatch(name):
            yield f"kv_sharing: the key {shown(name)} must be the number of a layer"
            continue
        layer = int(name)
        if layer >= p.n_layers or owner >= p.n_layers:
            yield f"{key}: {owner}; layers are 0 to {p.n_layers - 1}"
            continue
        if owner >= layer:
            yield f"{key}: {owner}; a consumer reads an earlier layer: 0 to {layer - 1}"
        if str(owner) in consumers:
            yield (
                f"{key}: {owner} is itself a consumer, of {consumers[str(owner)]}; name the layer "
                "that owns the latent"
            )
        if (layer in nope) != (owner in nope):
            kinds = {True: "NoPE", False: "rope"}
            yield (
                f"{key}: {owner}; layer {layer} is a {kinds[layer in nope]} layer, {owner} a "
                f"{kinds[owner in nope]} layer, whose rows differ; kinds must be equal"
            )
    if p.kv_sharing_own_wkv_b is False:
        yield "kv_sharing_own_wkv_b: false is not supported; each consumer needs its own wkv_b"


def _pattern(p: Params) -> Iterator[str]:
    if p.indexer is None:
        return
    stated = stated_full(p.indexer, p.n_layers)
    for key, full in stated.items():
        yield from pattern_problems(
            full, p.n_layers, nope_layers(p), p.indexer.nope_owners is not False, key
        )
    if len(set(stated.values())) > 1:
        yield "indexer.topk_pattern: differs from indexer.types; leave one out"


def _indexer(p: Params) -> Iterator[str]:
    if (indexer := p.indexer) is None:
        return
    if indexer.head_dim < p.qk_rope_head_dim:
        yield (
            f"indexer.head_dim: {indexer.head_dim}; must be at least qk_rope_head_dim, "
            f"{p.qk_rope_head_dim}: these dims are rotated"
        )
    if indexer.hadamard and indexer.head_dim & (indexer.head_dim - 1):
        yield f"indexer.head_dim: {indexer.head_dim}; with hadamard it must be a power of two"
    if indexer.query_input == "q_lora" and p.q_lora_rank is None:
        yield "indexer.query_input: 'q_lora' needs q_lora_rank, which is null; 'hidden' works"


def _ssmax(p: Params) -> Iterator[str]:
    blocks = {"ssmax": p.ssmax, "indexer.ssmax": p.indexer.ssmax if p.indexer else None}
    for key, block in blocks.items():
        if block is None:
            continue
        if block.kind is not None:
            for name in sorted(block.model_fields_set - {"kind"} - _SSMAX_KEYS[block.kind]):
                if (value := getattr(block, name)) not in (None, False):
                    accepted = ", ".join(sorted(_SSMAX_KEYS[block.kind])) or "no other key"
                    yield (
                        f"{key}.{name}: {shown(value)} has no meaning for kind {block.kind!r}, "
                        f"which takes {accepted}"
                    )
        for name in ("beta", "original_max_position_embeddings"):
            if block.kind in ("pow", "floor") and getattr(block, name) is None:
                yield f"{key}.{name}: missing; kind {block.kind!r} has no default for it"
        if block.n == "topk" and p.indexer is None:
            yield f"{key}.n: 'topk' needs an indexer block; 'context' works"
    if p.ssmax is not None and p.llama_4_scaling is not None:
        yield from _llama_4(p, p.ssmax)


def _llama_4(p: Params, ssmax: SSMax) -> Iterator[str]:
    assert p.llama_4_scaling is not None
    if ssmax.kind not in (None, "llama4"):
        yield (
            f"ssmax.kind: {ssmax.kind!r}, but llama_4_scaling is there, which is kind 'llama4'; "
            "leave one out"
        )
        return
    for name in ("beta", "original_max_position_embeddings"):
        ours, theirs = getattr(ssmax, name), getattr(p.llama_4_scaling, name)
        if ours not in (None, theirs):
            yield f"ssmax.{name}: {ours}, but llama_4_scaling.{name} is {theirs}; leave one out"


def _moe(p: Params) -> Iterator[str]:
    if (moe := p.moe) is None:
        return
    if moe.num_experts_per_tok > moe.num_experts:
        yield (
            f"moe.num_experts_per_tok: {moe.num_experts_per_tok}; at most moe.num_experts, "
            f"{moe.num_experts}"
        )
    for name in ("num_expert_groups", "num_expert_groups_per_tok"):
        if (groups := getattr(moe, name)) not in (None, 1):
            yield f"moe.{name}: {groups}; routing within groups of experts is not supported: 1"
    if moe.use_load_balancing_bias:
        yield "moe.use_load_balancing_bias: true; the router has no bias: false"
    if moe.shared_expert_hidden_dim is not None and moe.num_shared_experts == 0:
        yield "moe.shared_expert_hidden_dim: stated, but moe.num_shared_experts is 0"
    if moe.first_k_dense_replace > p.n_layers:
        yield f"moe.first_k_dense_replace: {moe.first_k_dense_replace}; n_layers is {p.n_layers}"


def _taps(p: Params) -> Iterator[str]:
    mtp = p.mtp or {}
    stated = {key: mtp[key] for key in ("target_layers", "taps") if mtp.get(key) is not None}
    for key, taps in stated.items():
        if not isinstance(taps, list) or not all(
            type(tap) is int and 0 <= tap < p.n_layers for tap in taps
        ):
            yield f"mtp.{key}: {shown(taps)}; must be a list of layers, 0 to {p.n_layers - 1}"
        elif len(set(taps)) < len(taps):
            yield f"mtp.{key}: {shown(taps)} names a layer twice"
    if len(stated) == 2 and stated["target_layers"] != stated["taps"]:
        yield "mtp.taps: differs from mtp.target_layers; leave one out"


def _check(fields: str, check: Callable[[Params], Iterator[str]]) -> Check:
    return frozenset(fields.split()), check


Check = tuple[frozenset[str], Callable[[Params], Iterator[str]]]

CHECKS: tuple[Check, ...] = (
    _check("head_dim qk_nope_head_dim qk_rope_head_dim", _head_dim),
    _check("qk_rope_head_dim n_layers nope_layers nope_every", _rope_dim),
    _check("n_kv_heads n_heads", _kv_heads),
    _check("sliding_window", _window),
    _check("max_position_embeddings max_seq_len yarn", _positions),
    _check("yarn", _yarn),
    _check("nope_layers nope_every n_layers", _nope),
    _check("kv_sharing kv_sharing_own_wkv_b n_layers nope_layers nope_every", _kv_sharing),
    _check("indexer n_layers nope_layers nope_every", _pattern),
    _check("indexer qk_rope_head_dim q_lora_rank", _indexer),
    _check("ssmax indexer llama_4_scaling", _ssmax),
    _check("moe n_layers", _moe),
    _check("mtp n_layers", _taps),
)
"""The top-level keys that a check reads, and the check: Params to one text for each fault."""
