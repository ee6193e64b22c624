"""Angular frequencies of rotary embedding: YaRN, and learned frequencies folded in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ml4core.api import RopeSpec, YarnSpec


def inv_freq(rope: RopeSpec, learned: Tensor | None = None) -> Tensor:
    """Radians a position, fp32 [R/2]: pair j turns by position * inv_freq[j].

    `learned` [R/2] is the tensor that `rope.lerope` speaks of: factors of the frequencies, their
    natural logarithms, or frequencies that stand in for theta^(-2j/R). YaRN's ramp depends on j
    alone, so it applies to a learned frequency as to any other, and the order has no influence.

    Computed in fp64, rounded once. ValueError if `learned` is missing, uncalled for, misshapen, or
    gives a frequency that is not finite.
    """
    half = rope.dim // 2
    if (learned is None) != (rope.lerope == "none"):
        given = "none was given" if learned is None else f"a tensor {list(learned.shape)} was given"
        raise ValueError(f"lerope is {rope.lerope!r}, but {given}")
    base = [rope.theta ** (-2.0 * j / rope.dim) for j in range(half)]
    stretch = [1.0] * half if rope.yarn is None else yarn_stretch(rope.yarn, rope.dim, rope.theta)
    frequencies = torch.tensor(base, dtype=torch.float64, device="cpu")
    if learned is not None:
        if tuple(learned.shape) != (half,):
            raise ValueError(f"learned frequencies are {list(learned.shape)}, wanted [{half}]")
        values = learned.to(torch.float64)
        if rope.lerope == "absolute":
            frequencies = values
        else:
            frequencies = frequencies * (values.exp() if rope.lerope == "log" else values)
    result = (frequencies * torch.tensor(stretch, dtype=torch.float64, device="cpu")).float()
    if not bool(result.isfinite().all()):
        bad = int((~result.isfinite()).nonzero()[0])
        raise ValueError(f"learned frequency {bad} of {half} gives {float(result[bad])}")
    return result


def yarn_range(yarn: YarnSpec, dim: int, theta: float) -> tuple[int, int]:
    """Pairs (low, high) between which YaRN's ramp runs."""
    low = math.floor(_pair_with_rotations(yarn.beta_fast, yarn, dim, theta))
    high = math.ceil(_pair_with_rotations(yarn.beta_slow, yarn, dim, theta))
    return max(low, 0), min(high, dim - 1)


def yarn_stretch(yarn: YarnSpec, dim: int, theta: float) -> list[float]:
    """What YaRN multiplies the frequency of each of the dim/2 pairs by: 1 down to 1/factor."""
    low, high = yarn_range(yarn, dim, theta)
    width = high - low or 0.001  # a step where the two meet
    ramp = [min(max((j - low) / width, 0.0), 1.0) for j in range(dim // 2)]
    return [(1.0 - r) + r / yarn.factor for r in ramp]


def _pair_with_rotations(rotations: float, yarn: YarnSpec, dim: int, theta: float) -> float:
    """The (fractional) pair that turns this often over the original context."""
    turns = yarn.original_max_position / (rotations * 2.0 * math.pi)
    return dim * math.log(turns) / (2.0 * math.log(theta))
