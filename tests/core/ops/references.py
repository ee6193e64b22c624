"""What each op means, in float64 and loops. Nothing here comes from the code under test."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NEG_INF = float("-inf")


def attention(
    q: Tensor, keys: Tensor, latent: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One row's heads ``q`` [N, W] over keys [n, width].

    Returns out [N, L], lse [N], and the sizes of the terms that a sum in fp32 would round.
    """
    q, keys = q.double(), keys.double()
    heads, width = q.shape
    if len(keys) == 0:
        zero = torch.zeros(heads, latent, dtype=torch.float64)
        none = torch.full((heads,), NEG_INF, dtype=torch.float64)
        return zero, none, zero, torch.zeros(heads, dtype=torch.float64)
    outs, lses, sizes, score_sizes = [], [], [], []
    for head in range(heads):
        products = q[head] * keys[:, :width]
        scores = products.sum(-1) * scale
        rounding = (products.abs().sum(-1) * abs(scale)).max()
        lse = torch.logsumexp(scores, 0)
        weights = torch.exp(scores - lse)
        outs.append(weights @ keys[:, :latent])
        sizes.append((weights @ keys[:, :latent].abs()) * (1 + rounding))
        lses.append(lse)
        score_sizes.append(1 + rounding)
    return torch.stack(outs), torch.stack(lses), torch.stack(sizes), torch.stack(score_sizes)


def top_positions(scores: Sequence[float], visible: int, k: int) -> list[int]:
    """The k largest of the first ``visible`` scores, ties to the lowest position, ascending."""
    seen = [i for i in range(min(visible, len(scores))) if not math.isnan(scores[i])]
    return sorted(sorted(seen, key=lambda i: (-scores[i], i))[:k])


def request_of(query_start: Sequence[int], row: int) -> int | None:
    for request in range(len(query_start) - 1):
        if query_start[request] <= row < query_start[request + 1]:
            return request
    return None


def e4m3_value(code: int, flavour: str) -> float:
    """The number of an E4M3 byte."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 15, code & 7
    if flavour == "e4m3fn":
        if code & 0x7F == 0x7F:
            return math.nan
        bias = 7
    else:
        if code == 0x80:
            return math.nan
        bias = 8
    if exponent == 0:
        return sign * fraction / 8 * 2.0 ** (1 - bias)
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - bias)


def e4m3_code(value: float, flavour: str) -> int:
    """The byte nearest to a number, ties to the even one; saturating."""
    if math.isnan(value):
        return 0x7F if flavour == "e4m3fn" else 0x80
    largest = 0x7E if flavour == "e4m3fn" else 0x7F
    magnitude = abs(value)
    codes = range(largest + 1)
    code = min(codes, key=lambda c: (abs(e4m3_value(c, flavour) - magnitude), c & 1))
    if magnitude > e4m3_value(largest, flavour):
        code = largest
    negative = math.copysign(1.0, value) < 0
    if flavour == "e4m3fnuz" and code == 0:
        return 0  # it has no minus zero
    return code | (0x80 if negative else 0)


def power_of_two_at_least(value: float) -> float:
    fraction, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if fraction == 0.5 else exponent)


def finite_amax(values: Sequence[float]) -> float:
    return max((abs(v) for v in values if math.isfinite(v)), default=0.0)


_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def noise_words(seed: int, position: int, purpose: int, count: int) -> list[int]:
    """The 64-bit words behind a row's noise, by Python's integers."""
    golden = 0x9E3779B97F4A7C15
    key = _mix((seed + golden) & _MASK)
    key = _mix((key + position * golden) & _MASK)
    key = _mix((key + purpose) & _MASK)
    return [_mix((key + (i + 1) * golden) & _MASK) for i in range(count)]
