"""``ml4 eval``: the chosen parts, one after the other, as JSON-able data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ml4core.api import Capabilities, ModelSpec, Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.errors import RequestError
from ml4core.evaluation import drafting, perplexity, retrieval, speed, texts, tool_calls
from ml4core.evaluation.opened import Tell, context_of
from ml4core.evaluation.parts import (
    CONVERTED_BYTES,
    DEFAULT_LENGTHS,
    DEFAULT_PARTS,
    DEFAULT_WEIGHTS,
    FULL_LENGTHS,
)
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark import with_drafter
from ml4core.models.errors import CheckpointError
from ml4core.serving.opening import open_tokenizer
from ml4core.serving.tokenizer import Tokenizer

KV_FLAGS = {"fp32": "float32", "bf16": "bfloat16", "fp8_ds_mla": "fp8_ds_mla"}
"""Open layouts that every backend may have, and the value of --kv-cache-dtype."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        text: a file that is foretold, and stands around the numbers, in place of the shipped texts.
        weights: forms of ``WEIGHTS`` to convert to; None for the default ones, if the checkpoint is
            small.
        lengths: of the prompts of ``retrieval``; empty for the default ones, as fits.
        limit: cases of each row at most.
        full: the longest prompts too.
    """

    parts: tuple[str, ...] = DEFAULT_PARTS
    text: Path | None = None
    weights: tuple[str, ...] | None = None
    lengths: tuple[int, ...] = ()
    limit: int | None = None
    full: bool = False


def measure(args: EngineArgs, options: Options, tell: Tell) -> dict[str, Any]:
    """Every chosen part. Raises what ``open_engine`` raises, and ``RequestError`` for lengths that
    the model can't have, before anything is measured.
    """
    named, started = args.model, (time.monotonic(), time.process_time())
    choice = choose_backend(args)
    if refusals := args.refusals():
        raise Refused(refusals)
    args, tokenizer, spec = open_tokenizer(args)
    checkpoint = Checkpoint.open(args.model)
    lengths = _lengths(args, options, spec)
    window = min(texts.WINDOW, context_of(args, spec))
    given = texts.shipped() if options.text is None else {"text": texts.read(options.text)}
    facts: dict[str, Any] = {
        "model": {"name": named, "parameters_bytes": checkpoint.nbytes},
        "backend": choice.backend.name,
    }
    if "ppl" in options.parts:
        weights = options.weights
        if weights is None:
            weights = DEFAULT_WEIGHTS if checkpoint.nbytes <= CONVERTED_BYTES else ()
        layouts = _layouts(args, choice.capabilities)
        scores = perplexity.measure(args, given, weights, layouts, window, options.limit, tell)
        facts["ppl"] = [asdict(score) | {"ppl": score.ppl} for score in scores]
    if "retrieval" in options.parts:
        found = retrieval.measure(args, tokenizer, given, lengths, options.limit, tell)
        facts["retrieval"] = [asdict(one) for one in found]
    if "tools" in options.parts:
        facts["tools"] = [
            asdict(rate) for rate in tool_calls.measure(args, tokenizer, options.limit, tell)
        ]
    if "draft" in options.parts:
        facts["draft"] = _drafts(args, options, checkpoint, spec, tokenizer, given, tell)
    if "speed" in options.parts:
        found_speed = speed.measure(args, tokenizer, given, options.limit, tell)
        facts["speed"] = [asdict(one) for one in found_speed]
    facts["seconds"] = round(time.monotonic() - started[0], 1)
    facts["cpu_seconds"] = round(time.process_time() - started[1], 1)
    return facts


def _drafts(
    args: EngineArgs,
    options: Options,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    given: Mapping[str, str],
    tell: Tell,
) -> list[dict[str, Any]] | None:
    """None for a checkpoint without a drafter, unless this part alone is asked for."""
    if options.parts != ("draft",):
        try:
            with_drafter(checkpoint, spec)
        except CheckpointError:
            return None
    found = drafting.measure(args, tokenizer, given, options.limit, tell)
    return [asdict(one) for one in found]


def _layouts(args: EngineArgs, capabilities: Capabilities) -> tuple[str, ...]:
    """The flag's layout alone, else the backend's own, then all of ``KV_FLAGS`` that it has."""
    if args.kv_cache_dtype != "auto":
        return (args.kv_cache_dtype,)
    own = capabilities.defaults.get("kv", "bf16")
    others = [f for id, f in KV_FLAGS.items() if id != own and f"kv:{id}" in capabilities]
    return ("auto", *others)


def _lengths(args: EngineArgs, options: Options, spec: ModelSpec) -> tuple[int, ...]:
    most = context_of(args, spec) - retrieval.ANSWER
    if not options.lengths:
        wanted = FULL_LENGTHS if options.full else DEFAULT_LENGTHS
        # The longest one takes the room that is left for an answer from its text.
        return tuple(min(length, most) for length in wanted if length - retrieval.ANSWER <= most)
    for length in options.lengths:
        if not 128 <= length <= most:
            raise RequestError(
                "--length",
                length,
                f"128 to {most}: {retrieval.ANSWER} tokens of an answer stand behind it, and the "
                f"longest context is {most + retrieval.ANSWER}",
            )
    return options.lengths
