"""``ml4 generate``: answers to prompts, as text or JSON."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from ml4core.cli import output
from ml4core.cli import report as startup
from ml4core.cli.exits import UsageError
from ml4core.cli.prompts import read_prompts
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import SamplingParams
from ml4core.registry import Choice
from ml4core.serving.tokenizer import Tokenizer, find_tokenizer


def generate(
    args: EngineArgs,
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
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to make at most, for each prompt.", metavar="INTEGER")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token.", metavar="NUMBER")
    ] = 0.0,
    stop_token_ids: Annotated[
        list[str] | None,
        typer.Option(help="Ids that end an answer; may be repeated.", metavar="ID[,ID...]"),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the answer.")
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print text as it is made; on for a single prompt.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="A prompt is a user's message, or text to go on with."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One object, once all is done.")] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Tell what runs where, and why: on stderr, or in the JSON."),
    ] = False,
) -> None:
    """Answer prompts."""
    if args.refusals():
        _refuse(args)
    found = read_prompts(prompt or [], prompt_file or [])
    if stream and (as_json or len(found) > 1):
        raise UsageError("--stream: works for a single prompt, without --json")
    params = SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=tuple(_ids(stop_token_ids or [])),
        ignore_eos=ignore_eos,
    )
    choice = choose_backend(args)
    args, tokenizer, vocab_size = _open_tokenizer(args)
    for token in params.stop_token_ids:
        if token >= vocab_size:
            raise RequestError("--stop-token-ids", token, f"ids from 0 to {vocab_size - 1}")
    ids = [_encode(tokenizer, field, text, chat) for field, text in found]
    live = not as_json and len(found) == 1 if stream is None else stream
    _run(args, choice, tokenizer, ids, params, live=live, as_json=as_json, report=report)


def _run(
    args: EngineArgs,
    choice: Choice,
    tokenizer: Tokenizer,
    ids: list[list[int]],
    params: SamplingParams,
    *,
    live: bool,
    as_json: bool,
    report: bool,
) -> None:
    from ml4core.engine.llm import open_engine

    longest = max(map(len, ids)) + params.max_tokens
    with output.progress_bar("loading") as progress:
        engine = open_engine(
            args,
            choice=choice,
            sequences=len(ids),
            tokens_each=longest,
            eos_ids=frozenset({tokenizer.eos_id}),
            progress=progress,
        )
    try:
        facts = engine.report() if report else None
        if facts is not None and not as_json:
            output.note(startup.text(facts))
        decoder = tokenizer.stream()
        done = engine.generate(
            ids, params, (lambda _, token: output.write(decoder.push(token))) if live else None
        )
    finally:
        engine.close()
    if live:
        output.write(decoder.flush() + "\n")
        return
    texts = [tokenizer.decode(completion.token_ids) for completion in done]
    if as_json:
        completions = [
            {
                "index": index,
                "prompt_tokens": len(prompt),
                "token_ids": completion.token_ids,
                "text": text,
                "finish_reason": completion.finish_reason,
            }
            for index, (prompt, completion, text) in enumerate(zip(ids, done, texts, strict=True))
        ]
        result: dict[str, Any] = {"model": args.model, "completions": completions}
        output.write_json(result if facts is None else result | {"report": facts})
        return
    for index, text in enumerate(texts):
        head = f"==> prompt {index} <==\n" if len(texts) > 1 else ""
        output.write(f"{head}{text}\n")


def _refuse(args: EngineArgs) -> None:
    """Ends the run before a prompt is waited for, with all else that is against it."""
    choose_backend(args)
    from ml4core.engine.llm import open_engine  # imports torch

    open_engine(args)


def _open_tokenizer(args: EngineArgs) -> tuple[EngineArgs, Tokenizer, int]:
    """The tokenizer, and the model's vocabulary size; ``args`` then name a local folder."""
    from ml4core.models.checkpoint import Checkpoint
    from ml4core.models.hub import resolve_model
    from ml4core.models.tensors import load_model_spec

    folder = resolve_model(args.model, args.revision, args.download_dir)
    spec = load_model_spec(Checkpoint.open(folder))
    tokenizer = Tokenizer.load(find_tokenizer(folder, args.tokenizer))
    tokenizer.check_vocab(spec.vocab_size)
    return dataclasses.replace(args, model=str(folder), revision=None), tokenizer, spec.vocab_size


def _encode(tokenizer: Tokenizer, field: str, text: str, chat: bool) -> list[int]:
    if chat:
        return tokenizer.encode_chat([{"role": "user", "content": text}], field)
    return tokenizer.encode(text, field)


def _ids(texts: list[str]) -> list[int]:
    words = [word for text in texts for word in text.split(",")]
    for word in words:
        if not word.strip().isdecimal() or len(word) > 10:
            raise RequestError("--stop-token-ids", word, "token ids, 0 or above")
    return [int(word) for word in words]
