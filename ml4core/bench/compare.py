"""The engine beside Hugging Face transformers: one model, one folder, one process, in turns."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ml4core.bench import generation, relative
from ml4core.bench.timing import Span, Spread, in_turns, ratio, spread, timed
from ml4core.engine.args import EngineArgs
from ml4core.engine.core import EngineCore
from ml4core.engine.llm import open_engine
from ml4core.registry import Choice

REQUESTS = 16
QUEUED = 4
"""Of those, how many are run one by one: each takes as long as any other."""


class Workload(NamedTuple):
    """Tokens: of the one prompt; of each of the 16 prompts; behind each prompt."""

    prompt: int = 512
    each: int = 128
    output: int = 32

    @property
    def longest(self) -> int:
        return max(self.prompt, self.each) + self.output + 2


DEFAULT_WORK = Workload()


@dataclass(frozen=True)
class Comparison:
    """What one way of running gave on each side.

    Attributes:
        ours, theirs: tokens a second: of the prompt where ``case`` is a prefill, else tokens made.
        ratio: ours over theirs by the clock on the wall, turn by turn.
        cpu_ratio: the same by the time of this process's threads, which other processes disturb
            less; it says nothing where a device computes, or several threads do.
        judged: ``cpu`` or ``wall``: the ratio that ``target`` is of.
    """

    case: str
    ours: Spread
    theirs: Spread
    ratio: Spread
    cpu_ratio: Spread
    target: float
    judged: str


@dataclass(frozen=True)
class Compared:
    """All comparisons, and the share of tokens that both sides made alike."""

    comparisons: list[Comparison]
    alike: float
    model: str
    versions: dict[str, str]


class Theirs:
    """A transformers model with its own cache, by its defaults. Timed is the forward and a greedy
    choice, without the bookkeeping of its ``generate``.
    """

    def __init__(self, model: Any, device: str, dtype: torch.dtype) -> None:
        self._model = model.to(device=device, dtype=dtype)
        self._device = device

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, torch.Tensor]:
        """Prompts of one length as a batch: the cache, and the ids [R] that follow."""
        ids = torch.tensor(list(prompts), device=self._device)
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        first = out.logits[:, -1].argmax(-1)
        first.tolist()  # waits for the device
        return out.past_key_values, first

    @torch.inference_mode()
    def go_on(self, cache: Any, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """The ids [R] of each of the next steps."""
        made = []
        for _ in range(steps):
            out = self._model(ids.unsqueeze(-1), past_key_values=cache, use_cache=True)
            ids = out.logits[:, -1].argmax(-1)
            ids.tolist()  # a caller sees each token, to stream it or to stop
            made.append(ids)
        return made

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        cache, ids = self.start(prompts)
        columns = [ids, *self.go_on(cache, ids, tokens - 1)]
        return torch.stack(columns, dim=-1).tolist()  # type: ignore[no-any-return]


def measure(
    args: EngineArgs, choice: Choice, repeats: int, work: Workload = DEFAULT_WORK
) -> Compared:
    """``args`` with a model of its own; ``args.model`` is not looked at.

    Raises ``ImportError`` without transformers; ask ``relative.check_installed`` first.
    """
    with tempfile.TemporaryDirectory(prefix="ml4-bench-") as folder, _quiet():
        model = relative.make_model()
        path = relative.save(model, Path(folder) / "model")
        ours = replace(args, model=str(path), max_model_len=None, max_num_seqs=REQUESTS)
        sequences = math.ceil(REQUESTS * (work.each + work.output + 64) / work.longest) + 1
        engine = open_engine(ours, choice=choice, sequences=sequences, tokens_each=work.longest)
        try:
            deployment = engine.deployment
            dtype = getattr(torch, deployment.dtype)
            theirs = Theirs(model, deployment.device.torch_device, dtype)
            alone = deployment.device.torch_device == "cpu" and torch.get_num_threads() == 1
            return _compared(engine.core, theirs, repeats, work, "cpu" if alone else "wall")
        finally:
            engine.close()


def _compared(
    core: EngineCore, theirs: Theirs, repeats: int, work: Workload, judged: str
) -> Compared:
    seeds = iter(range(10**6))

    def prompts(count: int, length: int) -> list[list[int]]:
        return generation.random_prompts(count, length, relative.VOCAB, next(seeds))

    def our_prefill() -> Span:
        made = prompts(1, work.prompt)
        return timed(lambda: generation.run(core, made, 1))

    def their_prefill() -> Span:
        made = prompts(1, work.prompt)
        return timed(lambda: theirs.start(made))

    def our_decode() -> Span:
        with generation.decoding(core, prompts(1, work.prompt), work.output):
            return timed(lambda: [core.step() for _ in range(work.output)])

    def their_decode() -> Span:
        cache, ids = theirs.start(prompts(1, work.prompt))
        return timed(lambda: theirs.go_on(cache, ids, work.output))

    def our_requests() -> Span:
        made = prompts(REQUESTS, work.each)
        return timed(lambda: generation.run(core, made, work.output))

    def their_batch() -> Span:
        made = prompts(REQUESTS, work.each)
        return timed(lambda: theirs.run(made, work.output))

    def their_queue() -> Span:
        made = prompts(REQUESTS, work.each)
        return timed(lambda: [theirs.run([prompt], work.output) for prompt in made[:QUEUED]])

    alike = _alike(core, theirs, prompts(REQUESTS, work.each), min(work.output, 8))
    single: list[Callable[[], Span]] = [our_prefill, their_prefill, our_decode, their_decode]
    for call in single:
        call()
    one, two, three, four = in_turns(single, repeats)
    many = in_turns([our_requests, their_batch, their_queue], max(1, math.ceil(repeats / 2)))
    together, batch, queue = many
    made = REQUESTS * work.output
    share = QUEUED / REQUESTS
    return Compared(
        [
            _comparison("prefill, 1 request", work.prompt, one, two, 1.0, judged),
            _comparison("decode, 1 request", work.output, three, four, 1.0, judged),
            _comparison(
                f"{REQUESTS} requests, theirs alone", made, together, queue, 3.0, judged, share
            ),
            _comparison(f"{REQUESTS} requests, theirs a batch", made, together, batch, 1.2, judged),
        ],
        alike,
        relative.DESCRIPTION,
        {relative.NAME: relative.version()},
    )


def _comparison(
    case: str,
    tokens: int,
    ours: Sequence[Span],
    theirs: Sequence[Span],
    target: float,
    judged: str,
    share: float = 1.0,
) -> Comparison:
    """``share``: the part of the tokens that theirs made in its time."""
    return Comparison(
        case,
        spread([tokens / span.wall for span in ours]),
        spread([share * tokens / span.wall for span in theirs]),
        ratio(theirs, ours, "wall", 1 / share),
        ratio(theirs, ours, "cpu", 1 / share),
        target,
        judged,
    )


def _alike(core: EngineCore, theirs: Theirs, prompts: list[list[int]], tokens: int) -> float:
    """A ratio of speeds says something only if both sides compute the same."""
    ours = generation.run(core, prompts, tokens)
    both = zip(ours, theirs.run(prompts, tokens), strict=True)
    same = [a == b for x, y in both for a, b in zip(x, y, strict=True)]
    return sum(same) / len(same)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings and progress bars."""
    with warnings.catch_warnings(), relative.silent():
        warnings.simplefilter("ignore")
        yield
