"""What the sampler should do, one token at a time, in float64 and plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ml4core.engine.sampler import SamplerRow
from ml4core.engine.sampling_params import SamplingParams


def order(values: Sequence[float]) -> list[int]:
    """Ids, likeliest first, ties to the lowest id; NaN last of all."""
    return sorted(range(len(values)), key=lambda i: (math.isnan(values[i]), -values[i], i))


def edited(logits: Sequence[float], row: SamplerRow) -> list[float]:
    """Logits after masks, bias and penalties."""
    params, out = row.params, [float(x) for x in logits]
    allowed = params.allowed_token_ids
    for i in range(len(out)):
        if allowed is not None and i not in allowed:
            out[i] = -math.inf
        if params.logit_bias and i in params.logit_bias:
            out[i] += params.logit_bias[i]
        if len(row.output_ids) < params.min_tokens and i in row.stop_ids:
            out[i] = -math.inf
        times = list(row.output_ids).count(i)
        if times or i in row.prompt_ids:
            by = params.repetition_penalty
            out[i] = out[i] / by if out[i] > 0 else out[i] * by
        out[i] -= params.frequency_penalty * times
        if times:
            out[i] -= params.presence_penalty
    return out


def softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    weights = [math.exp(x - top) for x in values]
    return [w / sum(weights) for w in weights]


def law(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The probability of each id for edited logits without NaN."""
    if params.temperature == 0:
        best = order(logits)[0]
        return [float(i == best) for i in range(len(logits))]
    odds = softmax([x / params.temperature for x in logits])
    ids = order(logits)
    least = params.min_p * odds[ids[0]]
    ids = [i for i in ids if odds[i] >= least]
    if params.top_k > 0:
        ids = ids[: params.top_k]
    total = sum(odds[i] for i in ids)
    kept, mass = [], 0.0
    for i in ids:
        if kept and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += odds[i]
    return [odds[i] / mass if i in kept else 0.0 for i in range(len(logits))]


def logprobs(logits: Sequence[float], token: int, count: int) -> dict[int, tuple[float, int]]:
    """id -> (log probability, rank) of the token, then of the ``count`` likeliest."""
    usable = [-math.inf if math.isnan(x) else float(x) for x in logits]
    ids = order(usable)
    top = usable[ids[0]]
    scale = top + math.log(sum(math.exp(x - top) for x in usable))
    return {i: (usable[i] - scale, ids.index(i) + 1) for i in (token, *ids[:count])}


def cut_at_stop(
    pieces: Sequence[str], stops: Sequence[str], min_tokens: int, include: bool
) -> tuple[str, int | None]:
    """The text, and the number of tokens up to the stop if there is one."""
    text = ""
    for number, piece in enumerate(pieces, 1):
        for character in piece:
            text += character
            ended = [s for s in stops if text.endswith(s)]
            if ended and number > min_tokens:
                stop = max(ended, key=len)
                return (text if include else text[: -len(stop)]), number
    return text, None
