"""``ml4 bench step``: the chosen parts, one after the other, as JSON-able data."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ml4core.api import Refused
from ml4core.bench import compare, environment, host, load, model, relative
from ml4core.bench.parts import DEFAULT_PARTS, SEEDED
from ml4core.bench.timing import Span
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.errors import RequestError
from ml4core.engine.llm import open_engine
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.hub import resolve_model
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec

LONGEST = 4096
"""Of the contexts that are measured if none is named: longer prompts take minutes on a CPU."""

Begin = Callable[[str], object]
"""Told what is measured next."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        contexts: prompt lengths; empty for a doubling row.
        batches: requests that run together.
        input_len, output_len: tokens of each of their prompts, and of decodes that are timed.
        repeats: of each timing; host costs take ``host_steps`` steps.
    """

    parts: tuple[str, ...] = DEFAULT_PARTS
    requests: tuple[int, ...] = tuple(host.TARGETS)
    contexts: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1, 16)
    input_len: int = 128
    output_len: int = 16
    repeats: int = 3
    host_steps: int = 300
    threads: int = 1


def measure(args: EngineArgs, options: Options, begin: Begin) -> dict[str, Any]:
    """Every chosen part. ``args.model`` may be ``SEEDED``.

    Raises what ``open_engine`` raises, and ``RequestError`` for lengths that the model can't have,
    before anything is measured.
    """
    named = args.model
    choice = choose_backend(args if args.model != SEEDED else replace(args, model="."))
    if refusals := args.refusals():
        raise Refused(refusals)
    before, start = torch.get_num_threads(), Span(time.perf_counter(), time.process_time())
    torch.set_num_threads(options.threads)
    facts: dict[str, Any] = {"environment": environment.environment(choice, options.threads)}
    try:
        with _model(args, options) as args:
            if {"model", "load"} & set(options.parts):
                spec = load_model_spec(
                    Checkpoint.open(resolve_model(args.model, args.revision, args.download_dir))
                )
                args, contexts = _lengths(args, options, spec.max_position)
            if "host" in options.parts:
                begin("host cost of a step")
                costs = host.measure(options.requests, options.host_steps)
                facts["host"] = [asdict(cost) for cost in costs]
            if "model" in options.parts:
                begin("speed of the model")
                facts["model"] = {
                    "name": named,
                    **_speeds(args, choice, options, contexts, spec.vocab_size),
                }
            if "load" in options.parts:
                begin("memory at loading")
                found = load.measure(args)
                facts["load"] = asdict(found) | {"beside": found.beside, "target": found.target}
        if "compare" in options.parts:
            begin(f"comparison with {relative.NAME}")
            compared = compare.measure(args, choice, max(options.repeats, 5))
            facts["compare"] = asdict(compared)
    finally:
        torch.set_num_threads(before)
    wall, cpu = time.perf_counter() - start.wall, time.process_time() - start.cpu
    facts["environment"] |= {
        "load_after": environment.load_average(),
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
    }
    return facts


def _speeds(
    args: EngineArgs, choice: Any, options: Options, contexts: tuple[int, ...], vocab_size: int
) -> dict[str, Any]:
    tokens, repeats = options.output_len, options.repeats
    longest = max(*contexts, options.input_len) + tokens + model.ROOM
    each = options.input_len + tokens + model.ROOM + (args.block_size or 64)
    sequences = max(1, math.ceil(max(options.batches) * each / longest))
    # Batches are known; where steps are captured they are for as many requests as may come.
    engine = open_engine(args, choice=choice, sequences=sequences, tokens_each=longest, fill=True)
    try:
        core = engine.core
        model.warm_up(core, vocab_size, min(contexts))
        costs = model.context_costs(core, vocab_size, contexts, tokens, repeats)
        rates = model.batch_rates(
            core, vocab_size, options.batches, options.input_len, tokens, repeats
        )
        deployment = engine.deployment
    finally:
        engine.close()
    return {
        "dtype": deployment.dtype,
        "kv_layout": deployment.kv_layout,
        "weight_bytes": deployment.weight_bytes,
        "contexts": [asdict(cost) for cost in costs],
        "batches": [asdict(rate) for rate in rates],
    }


def _lengths(
    args: EngineArgs, options: Options, max_position: int
) -> tuple[EngineArgs, tuple[int, ...]]:
    """Contexts to measure, and flags that admit the batches. Raises ``RequestError``."""
    limit = min(args.max_model_len or max_position, max_position)
    room = options.output_len + model.ROOM
    named = [("--context", value) for value in options.contexts]
    for flag, value in [*named, ("--input-len", options.input_len)]:
        if value + room > limit:
            raise RequestError(
                flag,
                value,
                f"at most {max(limit - room, 0)}: the longest context is {limit} tokens "
                f"(--max-model-len), and {room} are made behind the prompt (--output-len and "
                f"{model.ROOM})",
            )
    most, batch = args.max_num_seqs, max(options.batches)
    if most is not None and batch > most:
        raise RequestError("--batch-size", batch, f"at most {most}: --max-num-seqs")
    if most is None:
        args = replace(args, max_num_seqs=batch)
    contexts = options.contexts or tuple(model.contexts_up_to(min(limit, LONGEST + room), room))
    return args, contexts


@contextmanager
def _model(args: EngineArgs, options: Options) -> Iterator[EngineArgs]:
    """``args`` with a model that exists: one is made where none was named, and goes again."""
    if args.model != SEEDED or not {"model", "load"} & set(options.parts):
        yield args
        return
    with tempfile.TemporaryDirectory(prefix="ml4-bench-") as folder:
        yield replace(args, model=str(make_seeded(Path(folder) / "seeded")))
