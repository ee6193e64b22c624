"""Prompts through an engine's core: scheduler, forward and sampling, but no text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ml4core.api import FaultError
from ml4core.engine.core import EngineCore
from ml4core.engine.sampling_params import SamplingParams


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of uniformly drawn ids, other ones for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()  # type: ignore[no-any-return]


def greedy(tokens: int) -> SamplingParams:
    """The likeliest token each time, ``tokens`` of them whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def run(core: EngineCore, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """All prompts at once to their ends; the tokens of each."""
    made: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, greedy(tokens))
    while core.has_work:
        for output in core.step():
            made[int(output.request_id)] += output.token_ids
        check(core)
    return made


@contextmanager
def decoding(core: EngineCore, prompts: Sequence[Sequence[int]], steps: int) -> Iterator[None]:
    """All prompts computed, so that each of the next ``steps`` steps is one token of each."""
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, greedy(steps + 2))
    ready: set[str] = set()
    while len(ready) < len(prompts):
        ready |= {output.request_id for output in core.step() if output.token_ids}
        check(core)
    try:
        yield
    finally:
        for index in range(len(prompts)):
            core.abort(str(index))
        while core.has_work and core.fault is None:
            core.step()


def check(core: EngineCore) -> None:
    if core.fault is not None:
        raise FaultError(core.fault) from core.cause
