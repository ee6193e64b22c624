"""Times of requests, and what is made of them. Definitions are those of vLLM's benchmark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

METRICS = ("ttft", "tpot", "itl", "e2el")
"""First token after sending; (last - first) over the tokens behind the first, of answers with more
than one; gaps between events that hold something, of all answers together; last token after
sending.
"""


@dataclass(slots=True)
class Outcome:
    """A request, on the clock of ``time.perf_counter``.

    Attributes:
        times: of events that hold something of the answer.
        error: why there is none.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ended(self) -> float | None:
        return self.times[-1] if self.times else None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        if self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        return [later - sooner for sooner, later in zip(self.times, self.times[1:], strict=False)]


def summary(
    outcomes: Sequence[Outcome],
    seconds: float,
    *,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Figures by vLLM's names; times in milliseconds.

    ``goodput``: limits in milliseconds, by metric; a request is good if it keeps them all.
    """
    good = [one for one in outcomes if one.error is None]
    prompt, output = (sum(getattr(o, f"{k}_tokens") for o in good) for k in ("prompt", "output"))
    events = sum(len(one.times) for one in good)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": sorted({one.error for one in outcomes if one.error is not None})[:5],
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "event_throughput": events / seconds,
    }
    for name in METRICS:
        found |= _spread(name, values(good, name), percentiles)
    if goodput:
        kept = sum(_keeps(one, goodput) for one in good)
        found["request_goodput"] = kept / seconds
    return found


def values(outcomes: Sequence[Outcome], metric: str) -> list[float]:
    """Milliseconds of a metric, over all requests."""
    found: list[float] = []
    for one in outcomes:
        value = getattr(one, metric)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return [1e3 * value for value in found]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By linear interpolation between the nearest two, as numpy's."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _spread(name: str, found: list[float], percentiles: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(found)
    if not ordered:
        return {}
    told: dict[str, Any] = {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": statistics.pstdev(ordered),
    }
    return told | {f"p{p:g}_{name}_ms": percentile(ordered, p) for p in percentiles}


def _keeps(one: Outcome, limits: Mapping[str, float]) -> bool:
    return all(
        value is None or 1e3 * value <= limit
        for value, limit in ((getattr(one, name), limit) for name, limit in limits.items())
    )
