"""Scores of the lightning indexer, and the choice of the largest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ml4core_conformance.case import Arguments, Pages
from ml4core_conformance.oracle import kv_numbers as numbers
from ml4core_conformance.oracle.attention import row_requests
from ml4core_conformance.oracle.caches import all_rows
from ml4core_conformance.oracle.expected import Exact, Expected, Float, Selected

_FLAVOUR = "e4m3fn"  # of every open index layout with FP8


def stored_query(q: Tensor, cache: Pages) -> Tensor:
    """fp64 [T, Hi, D]: the queries as the scores see them, quantised as the layout's keys are."""
    if cache.layout == "fp32":
        return q.double()
    values = q.float().numpy()
    scale = 2.0 ** numbers.index_scale_exponents(values, _FLAVOUR)[..., None]
    code = numbers.e4m3_encode(values / scale, _FLAVOUR)
    return torch.from_numpy(numbers.e4m3_decode(code, _FLAVOUR) * scale)


def indexer_logits(options: Mapping[str, Any], args: Arguments) -> Expected:
    cache, table = args["cache"], args["block_table"].long()
    q = stored_query(args["q"], cache)
    factors = args["weights"].double() * float(args["scale"])  # [T, Hi]
    keys = all_rows(cache)
    offset = torch.arange(cache.block_size)
    requests = row_requests(args["query_start"], q.shape[0])
    columns = table.shape[1] * cache.block_size
    scores = torch.full((q.shape[0], columns), -math.inf, dtype=torch.float64)
    sizes = torch.zeros_like(scores)
    for t, visible in enumerate(args["visible"].tolist()):
        slots = (table[requests[t], :, None] * cache.block_size + offset).flatten()[:visible]
        key = keys[slots]
        scores[t, :visible] = factors[t] @ torch.relu(q[t] @ key.T)
        sizes[t, :visible] = factors[t].abs() @ (q[t].abs() @ key.abs().T)
    # A sum over D within a sum over heads: the two roots of their lengths add up.
    terms = math.ceil((q.shape[2] ** 0.5 + q.shape[1] ** 0.5) ** 2)
    return Expected({"scores": Float(scores, sizes, terms, "float32", ("T", "S"))})


def topk(options: Mapping[str, Any], args: Arguments) -> Expected:
    scores, visible, k = args["scores"].double(), args["visible"], int(args["k"])
    positions = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    lens = torch.zeros(scores.shape[0], dtype=torch.int32)
    has_nan = torch.zeros(scores.shape[0], dtype=torch.bool)
    for t, seen in enumerate(visible.tolist()):
        row = scores[t, :seen].tolist()
        has_nan[t] = any(map(math.isnan, row))
        numbered = [s for s, score in enumerate(row) if not math.isnan(score)]
        best = sorted(sorted(numbered, key=lambda s: (-row[s], s))[:k])
        positions[t, : len(best)] = torch.tensor(best, dtype=torch.int32)
        lens[t] = len(best)
    margin = torch.zeros(scores.shape[0], dtype=torch.float64)
    return Expected(
        {
            "positions": Selected(positions, scores, visible, margin, ("T", "k")),
            "lens": Exact(lens, ("T",)),
            "has_nan": Exact(has_nan, ("T",)),
        }
    )


ORACLE: Mapping[str, Callable[[Mapping[str, Any], Arguments], Expected]] = MappingProxyType(
    {"indexer_logits": indexer_logits, "topk": topk}
)
