"""Ops that AITER serves nowhere, and why: told in the start-up report where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ALONE: Mapping[str, str] = MappingProxyType(
    {
        "embed": "no function of it gathers rows of a table",
        "layer_norm": "its LayerNorm gives 16 bits, and index queries and keys stay fp32",
        "rope": "it reads cos and sin from a table, and here they are made in fp32 by position",
        "ssmax": "no function of it scales queries by position",
        "head_gemm": "its batched product wants each head's rows together; a row's heads are here",
        "indexer_write": "its write takes keys of 16 bits, and these are fp32 until they are FP8",
        "gather_kv": "no function of it gives decoded rows of these caches",
        "to_slots": "no function of it makes slots of positions",
        "window_mla": "its decoding has no window, and its adapter is for chosen keys alone",
        "merge_lse": "only context parallelism merges, which this backend doesn't declare",
        "router": "its top-k of experts takes scores, and here they are made too, in fp32",
        "quantize": "weights are quantised as they are loaded, by the rule that is asked for",
        "sample": "its draws take a seed a call, and here each row has its own",
        "verify_draft": "no function of it judges drafts by the laws that are declared",
    }
)
"""Op -> why it is ours alone. Ops of a stage that it serves are told with the stage."""

IN_STAGES: Mapping[str, str] = MappingProxyType(
    {"indexer_logits": "select", "topk": "select", "sparse_mla": "sparse_mla"}
)
"""Op -> the stage in which AITER serves it."""
