"""The one table of what a result may differ by. No backend can set a number in it.

A result x of exact value r may differ, element by element, by

    ulps * eps(dtype) * |r|  +  sums * eps(fp32) * sqrt(n) * size  +  slack

with n and size of the oracle: what the cast to the result's dtype rounds, and what an fp32 sum of n
terms may round whatever its order. Tests of the suite show honest sums in several orders well
inside, and what is slightly wrong outside: a gain of 1.2%, sums in bf16, operands of 10 bits,
truncation, a second cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

EPS: Mapping[str, float] = MappingProxyType({"float32": 2.0**-23, "bfloat16": 2.0**-7})
"""Distance from 1 to the next larger number. Rounding to nearest errs by half of it at most."""

STORED_EPS: Mapping[str, float] = MappingProxyType(
    {"float32": 2.0**-23, "bfloat16": 2.0**-7, "e4m3fn": 2.0**-3, "e4m3fnuz": 2.0**-3, "e2m1": 0.5}
)
"""The same of what caches store, by dtype of a layout's field. Scales don't count."""

STORING = 2.0
"""What an answer of an engine may differ by, in units of what its caches' rounding loses, where a
cache is coarser than activations and its rows can't be looked at. A value near the middle of two
stored numbers falls to either side, whatever the precision of what is computed; layer by layer that
moves further ones, until two honest passes round independently: sqrt(2) of what one loses.
"""

TINY = 2.0**-126
"""The least normal number of both dtypes: a device may flush what is smaller to zero."""


@dataclass(frozen=True)
class Tolerance:
    """What is allowed of one dtype.

    An fp32 sum in order reaches an eighth of ``sums`` = 4, and matrix units, which cut off what
    they shift out, a half.

    Attributes:
        ulps: rounding of an element, in units of eps(dtype).
        sums: rounding of sums; see above.
        rms: relative root mean square of the rounding in any slice: one row, one head, one expert.
        gain: of ``<x, r> / <r, r> - 1``; a few elements allow more, as rounding averages out less.
        cosine: of 1 - the cosine of the angle between x and r.
    """

    ulps: float
    sums: float
    rms: float
    gain: float
    cosine: float


_BY_DTYPE: Mapping[str, Tolerance] = MappingProxyType(
    {
        # One rounding to nearest gives 0.5 ulps, 0.0016 rms, 1.4e-6 cosine, and no gain.
        # Truncation gives a gain of 0.0025; a second rounding up to 1 ulp.
        "bfloat16": Tolerance(ulps=0.75, sums=4.0, rms=2.0**-8, gain=2.0**-9, cosine=5e-6),
        # Library functions (exp, rsqrt, log) are good to 2 ulps.
        "float32": Tolerance(ulps=4.0, sums=4.0, rms=2.0**-21, gain=2.0**-20, cosine=2.0**-40),
    }
)

_SPECIAL: Mapping[tuple[str, str], Tolerance] = MappingProxyType({})
"""By op and variant, where the number of the dtype does not fit; each with its reason."""

ALPHA = 1e-6
"""How often an honest sampler fails a test of its distribution, were seeds not fixed."""


def coarser(fields: Iterable[str], dtype: str) -> bool:
    """Whether a cache with fields of these dtypes stores less than activations of ``dtype`` hold.
    Fields of other dtypes are scales.
    """
    stored = [STORED_EPS[field] for field in fields if field in STORED_EPS]
    return max(stored, default=0.0) > EPS[dtype]


def tolerance(op: str, variant: str, dtype: str) -> Tolerance:
    """What a result of ``dtype`` of that op and variant is allowed."""
    return _SPECIAL.get((op, variant), _BY_DTYPE[dtype])
