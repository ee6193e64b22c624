"""What each weight is part of, and how ranks share it out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Cut = Literal["vocabulary", "rows", "columns", "expert_rows", "expert_columns", "whole"]

PARTS: tuple[str, ...] = (
    "embedding",
    "output",
    "attention",
    "indexer",
    "router",
    "routed experts",
    "shared experts",
    "dense",
    "norms",
    "drafter",
    "vision",
)
"""In the order in which they are shown."""

_NORMS = frozenset({"attention_norm", "ffn_norm", "kv_a_norm", "q_a_norm", "final_norm"})
_BY_PREFIX = (
    ("index_", "indexer"),
    ("experts_", "routed experts"),
    ("shared_", "shared experts"),
    ("dense_", "dense"),
)

_CUTS: Mapping[str, Cut] = MappingProxyType(
    {
        "embedding": "vocabulary",
        "output": "vocabulary",
        "wq": "rows",
        "wq_b": "rows",
        "w_uk, w_uv": "rows",
        "ssmax_scale": "rows",
        "ssmax_bias": "rows",
        "wo": "columns",
        "dense_w13": "rows",
        "dense_w2": "columns",
        "shared_w13": "rows",
        "shared_w2": "columns",
        "experts_w13": "expert_rows",
        "experts_w2": "expert_columns",
    }
)

CUT_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "by vocabulary over TP",
        "output": "by vocabulary over TP",
        "attention": "by heads over TP; the latent's projection on every rank",
        "indexer": "on every rank",
        "router": "on every rank",
        "shared experts": "by width over TP",
        "dense": "by width over TP",
        "norms": "on every rank",
        "drafter": "on every rank",
        "vision": "on every rank",
    }
)
"""How the parts are shared out, but for routed experts, where that depends on the flags. No weight
is shared out by context parallelism.
"""


def part_of_role(role: str) -> str:
    """The part of a decoder's weight, by its name among `LAYER_WEIGHTS` or `GLOBAL_WEIGHTS`."""
    if role in ("embedding", "output"):
        return role
    if role in _NORMS:
        return "norms"
    if role == "gate":
        return "router"
    return next((part for prefix, part in _BY_PREFIX if role.startswith(prefix)), "attention")


def cut_of(part: str, role: str) -> Cut:
    """How tensor and expert parallel ranks share a weight out.

    The indexer is whole everywhere: its scores are a sum over all its heads. So is the drafter,
    whose heads and blocks of scales need not divide.
    """
    return "whole" if part in ("drafter", "vision") else _CUTS.get(role, "whole")
