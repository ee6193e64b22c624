"""Speed of a model on a backend, through the whole engine: prompts, tokens, and what a long context
costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from ml4core.bench import generation
from ml4core.bench.timing import Span, Spread, spread, timed
from ml4core.engine.core import EngineCore

CLOCKS = ("wall", "cpu")

WARM_UP = 2
"""Decodes before the clock starts: their programs are bound then."""

ROOM = WARM_UP + 4
"""Tokens behind a prompt beside those that are timed: a step in flight has some of them too."""


@dataclass(frozen=True)
class ContextCost:
    """One request.

    Attributes:
        prefill: seconds of a prompt of ``context`` tokens, to its first token.
        decode: seconds of a token behind it.
        prefill_cpu, decode_cpu: the same by the time of this process's threads: on a host that
            others use too, what one that nobody else uses would have taken.
    """

    context: int
    prefill: Spread
    decode: Spread
    prefill_cpu: Spread
    decode_cpu: Spread


@dataclass(frozen=True)
class BatchRate:
    """Several requests that run together.

    Attributes:
        context: tokens of each prompt.
        prefill, decode: tokens a second, of all requests together.
        prefill_cpu, decode_cpu: tokens a second of the time of this process's threads.
    """

    requests: int
    context: int
    prefill: Spread
    decode: Spread
    prefill_cpu: Spread
    decode_cpu: Spread


def contexts_up_to(limit: int, tokens: int, first: int = 128) -> list[int]:
    """Doubling from ``first`` as long as ``tokens`` more fit into ``limit``; at least one."""
    found = [min(first, max(1, limit - tokens))]
    while found[-1] * 2 + tokens <= limit:
        found.append(found[-1] * 2)
    return found


def context_costs(
    core: EngineCore, vocab_size: int, contexts: Sequence[int], tokens: int, repeats: int
) -> list[ContextCost]:
    """``tokens`` tokens behind a prompt of each length. The core has to be idle."""
    found = []
    for context in contexts:
        spans = _times(core, vocab_size, 1, context, tokens, repeats)
        seconds = [spread([getattr(s, c) for s in part]) for c in CLOCKS for part in spans]
        found.append(ContextCost(context, *seconds))
    return found


def batch_rates(
    core: EngineCore,
    vocab_size: int,
    batches: Sequence[int],
    context: int,
    tokens: int,
    repeats: int,
) -> list[BatchRate]:
    found = []
    for requests in batches:
        prefills, decodes = _times(core, vocab_size, requests, context, tokens, repeats)
        rates = [
            spread([made / getattr(span, clock) for span in part])
            for clock in CLOCKS
            for made, part in ((requests * context, prefills), (requests, decodes))
        ]
        found.append(BatchRate(requests, context, *rates))
    return found


def warm_up(core: EngineCore, vocab_size: int, length: int) -> None:
    """The first steps of a process touch memory and read code for the first time."""
    prompts = generation.random_prompts(1, length, vocab_size, seed=0)
    with generation.decoding(core, prompts, WARM_UP):
        for _ in range(WARM_UP):
            core.step()


def _times(
    core: EngineCore, vocab_size: int, requests: int, context: int, tokens: int, repeats: int
) -> tuple[list[Span], list[Span]]:
    """Of the prompts of a batch, and of a step of decodes, for each repeat."""
    prefills, decodes = [], []
    for repeat in range(repeats):
        # Other prompts each time: the prefix cache may be on.
        prompts = generation.random_prompts(requests, context, vocab_size, seed=repeat + 1)
        batch = generation.decoding(core, prompts, tokens + WARM_UP)
        prefills.append(timed(batch.__enter__))
        with ExitStack() as stack:
            stack.push(batch)
            for _ in range(WARM_UP):
                core.step()
            steps = [timed(core.step) for _ in range(tokens)]
        decodes.append(Span(median(s.wall for s in steps), median(s.cpu for s in steps)))
    return prefills, decodes
