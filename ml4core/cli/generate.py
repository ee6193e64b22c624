"""``ml4 generate``: answers to prompts, as text or JSON."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ml4core.cli import answers, output, streams
from ml4core.cli import report as startup
from ml4core.cli.exits import UsageError
from ml4core.cli.prompts import Source, read_prompts, read_schema
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.errors import RequestError
from ml4core.engine.intake import check_prompt
from ml4core.engine.resolve import step_limits
from ml4core.engine.sampling_params import SamplingParams
from ml4core.registry import Choice
from ml4core.serving.batch_run import OnDone, OnText, run_jobs
from ml4core.serving.grammars import LLGrammars
from ml4core.serving.inputs import Job, Prompt, read_chat
from ml4core.serving.opening import open_tokenizer
from ml4core.serving.outputs import RequestOutput
from ml4core.serving.progress import request_bar
from ml4core.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ml4core.engine.llm import Engine

Shape = Literal["stream", "lines", "object"]
"""Text as it is made; each prompt's answers once they are whole; one JSON object at the end."""


def generate(
    args: EngineArgs,
    params: SamplingParams,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be repeated.", metavar="TEXT")
    ] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(
            help="A file that is one prompt, or - for stdin; one newline at its end is dropped.",
            metavar="FILE",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A file with a prompt a line, or - for stdin; of a .jsonl file each line is "
            '{"prompt": ...} or {"messages": ...}. Answers with --json are lines, too.',
            metavar="FILE",
        ),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print text as it is made; on for a single answer.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="A prompt is a user's message, or text to go on with."),
    ] = True,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One object, once all is done; with --prompts a line each."),
    ] = False,
    json_schema: Annotated[
        str | None,
        typer.Option(
            help="A JSON schema that the answers are to follow: its text, or a file.",
            metavar="JSON|FILE",
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option("--report", help="Tell what runs where, and why: on stderr, or in the JSON."),
    ] = False,
) -> None:
    """Answer prompts.

    MODEL: left out, it is ml4-tiny.
    """
    if args.refusals() or args.data_parallel_size > 1:
        _refuse(args)
    if params.logprobs is not None and not as_json:
        raise UsageError("--logprobs: works with --json")
    if json_schema is not None:
        params = replace(params, structured_outputs=read_schema(json_schema))
    found = read_prompts(prompt or [], prompt_file or [], prompts)
    single = len(found) == params.n == 1 and not as_json
    if stream and not single:
        raise UsageError("--stream: works for a single answer, without --json")
    choice = choose_backend(args)
    args, tokenizer, spec = open_tokenizer(args)
    for token in params.stop_token_ids:
        if token >= spec.vocab_size:
            raise RequestError("--stop-token-ids", token, f"ids from 0 to {spec.vocab_size - 1}")
    jobs = [Job(field, _prompt(tokenizer, field, source, chat), params) for field, source in found]
    # Whatever is wrong is told before all the weights are read.
    context = args.max_model_len or spec.max_position
    for job in jobs:
        check_prompt(job.name, job.prompt.token_ids, spec.vocab_size, context)
    params.check(spec.vocab_size, context)
    if params.structured_outputs is not None:
        LLGrammars(tokenizer).check(params.structured_outputs)
    sequences, _ = step_limits(args, choice.capabilities)
    if params.n > sequences:
        raise RequestError("n", params.n, f"at most {sequences}: --max-num-seqs")
    shape: Shape = "lines"
    if single and stream is not False:
        shape = "stream"
    elif as_json and prompts is None:
        shape = "object"
    _run(args, choice, tokenizer, jobs, shape, as_json=as_json, report=report)


def _run(
    args: EngineArgs,
    choice: Choice,
    tokenizer: Tokenizer,
    jobs: list[Job],
    shape: Shape,
    *,
    as_json: bool,
    report: bool,
) -> None:
    from ml4core.engine.llm import open_engine

    limit, n = jobs[0].params.max_tokens, jobs[0].params.n
    longest = max(len(job.prompt.token_ids) for job in jobs)
    with output.progress_bar("loading") as progress:
        engine = open_engine(
            args,
            choice=choice,
            sequences=len(jobs) * n,
            tokens_each=None if limit is None else longest + limit,
            eos_ids=frozenset({tokenizer.eos_id}),
            progress=progress,
            grammars=LLGrammars(tokenizer),
            starting=output.stage_line,
        )
    try:
        facts = engine.report() if report else None
        if facts is not None and shape != "object":
            output.note(startup.text(facts), rendered=True)
        on_text: OnText | None = None
        on_done: OnDone | None = None
        if shape == "stream":
            on_text = _write_text
        elif shape == "lines":
            on_done = answers.InOrder(len(jobs), as_json=as_json).take
        outputs = _run_jobs(engine, tokenizer, jobs, on_text, on_done)
    finally:
        engine.close()
    if shape == "stream":
        output.write("\n")
    elif shape == "object":
        records = [r for place, done in enumerate(outputs) for r in answers.records(place, done)]
        result: dict[str, Any] = {"model": args.model, "completions": records}
        output.write_json(result if facts is None else result | {"report": facts})


def _run_jobs(
    engine: Engine,
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    on_text: OnText | None,
    on_done: OnDone | None,
) -> list[RequestOutput]:
    """Of several jobs, says on stderr how far they are, and at the end how fast it went."""
    several = len(jobs) > 1
    # Answers that come on the terminal show how far it is, and a bar would stand among them.
    bar = several and not (on_done is not None and streams.results().isatty())
    with request_bar(len(jobs), bar) as ended:

        def done(place: int, one: RequestOutput) -> None:
            ended()
            if on_done is not None:
                on_done(place, one)

        numbers, started = itertools.count(), time.monotonic()
        outputs = run_jobs(engine, tokenizer, jobs, numbers, on_text=on_text, on_done=done)
        seconds = time.monotonic() - started
    if several:
        output.note(answers.throughput(outputs, seconds))
    return outputs


def _write_text(place: int, index: int, text: str) -> None:
    output.write(text)


def _refuse(args: EngineArgs) -> None:
    """Ends the run before a prompt is waited for, with all else that is against it."""
    choose_backend(args)
    from ml4core.engine.llm import open_engine  # imports torch

    open_engine(args)


def _prompt(tokenizer: Tokenizer, field: str, source: Source, chat: bool) -> Prompt:
    if not isinstance(source, str):
        return read_chat(source, tokenizer, field)
    if chat:
        return read_chat([{"role": "user", "content": source}], tokenizer, field)
    return Prompt(source, tokenizer.encode(source, field))
