"""How well a model foretells held-out text, by form of the weights and layout of the cache."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ml4core.engine.args import EngineArgs
from ml4core.engine.sampling_params import SamplingParams
from ml4core.evaluation.opened import Tell, batches, opened
from ml4core.evaluation.texts import windows
from ml4core.models.quantize import quantize
from ml4core.models.quantize_options import QuantizeOptions
from ml4core.serving.llm import LLM

STORED = "as stored"


@dataclass(frozen=True)
class Score:
    """Of one text.

    Attributes:
        weights: ``STORED``, or what the checkpoint was converted to.
        formats: of the matrices as the engine reads them.
        weight_bytes: of all tensors that are read.
        kv: the layout of the latent cache; ``kv_bytes`` of a token, in all caches.
        tokens: that were foretold.
        nats: a token, on average.
        by_window: the same of each window.
    """

    text: str
    weights: str
    formats: tuple[str, ...]
    weight_bytes: int
    kv: str
    kv_bytes: int
    tokens: int
    nats: float
    by_window: tuple[float, ...]

    @property
    def ppl(self) -> float:
        return math.exp(self.nats)


def measure(
    args: EngineArgs,
    texts: Mapping[str, str],
    weights: Sequence[str],
    layouts: Sequence[str],
    window: int,
    limit: int | None,
    tell: Tell,
) -> list[Score]:
    """The checkpoint as it is stored with each of ``layouts``, values of --kv-cache-dtype; then
    each form of ``weights`` with the first layout. At most ``limit`` windows of each text.
    """
    runs = [(STORED, kv) for kv in layouts] + [(form, layouts[0]) for form in weights]
    scores: list[Score] = []
    for number, (form, kv) in enumerate(runs):
        tell("perplexity", number, len(runs))
        with converted(args, form) as changed, opened(changed, window, kv_cache_dtype=kv) as llm:
            scores += _scores(llm, form, texts, window, limit)
    tell("perplexity", len(runs), len(runs))
    return scores


@contextmanager
def converted(args: EngineArgs, form: str) -> Iterator[EngineArgs]:
    """``args`` with the model in another form, in a folder that goes again."""
    if form == STORED:
        yield args
        return
    with tempfile.TemporaryDirectory(prefix="ml4-eval-") as folder:
        target = Path(folder) / form
        quantize(args.model, target, options_of(form))
        yield replace(args, model=str(target))


def options_of(form: str) -> QuantizeOptions:
    """The conversion that a name of ``WEIGHTS`` stands for."""
    to, _, rule = form.partition("-")
    if to == "mxfp4":
        return QuantizeOptions("mxfp4", mxfp4_rule=rule or "even")  # type: ignore[arg-type]
    if to == "fp8_block":
        return QuantizeOptions("fp8_block", include_output=True, include_drafter=True)
    return QuantizeOptions(to)  # type: ignore[arg-type]


def _scores(
    llm: LLM, form: str, texts: Mapping[str, str], window: int, limit: int | None
) -> Iterator[Score]:
    deployment = llm.engine.deployment
    for name, text in texts.items():
        pieces = windows(text, llm.get_tokenizer(), window - 1)[:limit]  # a token is made behind
        sums = [_nats(llm, piece) for piece in pieces]
        counts = [len(piece) - 1 for piece in pieces]
        yield Score(
            name,
            form,
            tuple(sorted(deployment.weight_formats)),
            deployment.weight_bytes,
            deployment.kv_layout,
            llm.engine.kv_plan.bytes_per_token,
            sum(counts),
            sum(sums) / max(1, sum(counts)),
            tuple(total / max(1, count) for total, count in zip(sums, counts, strict=True)),
        )


def _nats(llm: LLM, ids: Sequence[int]) -> float:
    """Of all tokens but the first, in all."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (output,) = batches(llm, [ids], params, lambda done: None)
    entries = output.prompt_logprobs or []
    return -sum(
        entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, entries, strict=True)
        if entry is not None
    )
