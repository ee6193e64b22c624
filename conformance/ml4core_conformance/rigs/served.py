"""Answers of an engine, and what they are in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.engine.llm import Engine
from ml4core.engine.outputs import SequenceOutput
from ml4core.engine.sampling_params import SamplingParams
from ml4core_conformance.check import CheckFailed, Measure, is_slow
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.stages import Rounding
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.engines import Log, Watched, engine, oracle_of
from ml4core_conformance.rigs.passes import is_coarse
from ml4core_conformance.rigs.rig import through
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import STORING

FLOOR = 2.0**-10
"""Of a log probability: what fp32 sums lose in eight layers."""


TOKENS = 8
"""That each answer has."""


SMOOTH: Mapping[str, Any] = MappingProxyType({"topk": 512, "experts": 4, "experts_per_token": 4})
"""Every key and expert is chosen: rounding moves logits a little, and never to another one."""


def smooth(subject: Subject) -> dict[str, Any]:
    """Fields of ``SeededConfig``: half as many layers where kernels are interpreted, the first of
    which are of each kind but for a reader of another's latents.
    """
    return {**SMOOTH, "layers": 4} if is_slow(subject.device) else dict(SMOOTH)


NAN_TOKEN = 3
"""An id that no prompt holds, unless a check wants it to."""


def prompts(vocab: int, block_size: int) -> list[list[int]]:
    """Of unlike lengths: beyond a page, at its edge, short, and of one token."""
    draw = Draw(0, "engine/prompts")
    lengths = (block_size + 9, block_size, 11, 1, block_size - 1)
    return [draw.integers(length, low=NAN_TOKEN + 1, high=vocab).tolist() for length in lengths]


@dataclass
class Answer:
    """Token ids and their log probabilities."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0


def served(
    opened: Engine, asked: Sequence[tuple[str, list[int], SamplingParams]], **options: Any
) -> dict[str, Answer]:
    """Every answer of requests that are asked at once."""
    answers = {name: Answer() for name, _, _ in asked}
    for name, ids, params in asked:
        opened.core.add_request(name, ids, params, **options)
    left = set(answers)
    while left:
        for output in opened.core.step():
            answer = answers[output.request_id]
            _take(answer, output)
            if output.finish_reason is not None:
                left.discard(output.request_id)
                if output.finish_reason not in ("length", "stop"):
                    raise CheckFailed(
                        f"request {output.request_id} ends with {output.finish_reason}: "
                        f"{opened.core.fault}"
                    )
    return answers


def _take(answer: Answer, output: SequenceOutput) -> None:
    answer.ids += output.token_ids
    answer.cached = output.cached_tokens
    for token, entry in zip(output.token_ids, output.logprobs or (), strict=False):
        answer.logprobs.append(entry[token].logprob)


GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)


class Truth:
    """The model of a folder in fp64, with its twin, through the caches that an engine has; and as
    it would be without those where they are coarser than activations.
    """

    def __init__(self, folder: Path, opened: Engine, log: Log) -> None:
        by_role: dict[str, KVCache] = {}
        for cache in log.caches:  # the target's come before the drafter's
            by_role.setdefault(cache.layout.role, cache)
        keys = by_role.get("index", by_role["latent"])
        dtype = getattr(torch, opened.deployment.dtype)
        make = partial(
            oracle_of,
            folder,
            store_key=partial(through, keys),
            index_fp8=keys.layout.fp8 is not None,
        )
        stored = partial(through, by_role["latent"])
        self.exact = make(store_row=stored)
        self.twin = make(store_row=stored, rounding=Rounding(dtype))
        coarse = is_coarse(by_role["latent"].layout, dtype)
        self.kept = make() if coarse else None

    def judge(self, subject: Subject, ids: list[int], answer: Answer, where: str) -> None:
        """Each token's log probability, and that no other token was clearly likelier."""
        if len(answer.ids) != TOKENS or len(answer.logprobs) != TOKENS:
            count = f"{len(answer.ids)} tokens and {len(answer.logprobs)} log probabilities"
            raise CheckFailed(f"{where}: {count} were answered, {TOKENS} of each are due")
        every = [*ids, *answer.ids[:-1]]
        exact, twin = (_law(one.run(every).logits, len(ids)) for one in (self.exact, self.twin))
        loss = errors.FACTOR * float((exact - twin).abs().max())
        if self.kept is not None:
            kept = _law(self.kept.run(every).logits, len(ids))
            loss = max(loss, STORING * float((exact - kept).abs().max()))
        bound = loss + FLOOR
        own = exact.gather(1, torch.tensor(answer.ids).unsqueeze(1)).squeeze(1)
        error = (torch.tensor(answer.logprobs, dtype=torch.float64) - own).abs()
        at = int(error.argmax())
        subject.measure(
            Measure("log probability", float(error[at]), bound, f"{where}, answer token {at}")
        )
        short = exact.amax(1) - own
        at = int(short.argmax())
        subject.measure(
            Measure(
                "distance to the likeliest token", float(short[at]), 2 * bound,
                f"{where}, answer token {at}",
            )
        )  # fmt: skip


def _law(logits: Tensor, prompt: int) -> Tensor:
    return torch.log_softmax(logits[prompt - 1 :], -1)


def page_tokens(subject: Subject, folder: Path) -> int:
    """Tokens of a page of an engine that is told nothing of them."""
    with engine(subject, folder, sequences=1) as opened:
        return opened.deployment.block_size


def page_bytes(subject: Subject, folder: Path) -> int:
    """Bytes of a page over all caches that an engine makes for a folder's model."""
    log = Log()
    with engine(subject, folder, partial(Watched, log=log), sequences=1):
        return sum(cache.nbytes // cache.blocks for cache in log.caches)
