"""``ml4 bench serve``: a server under load, with the definitions and flags of vLLM's benchmark."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ml4core.cli import output
from ml4core.cli.exits import ERROR, UsageError

if TYPE_CHECKING:
    from ml4core.bench.serving.datasets import Conversation

DATASETS = "random|custom|sharegpt|conversation"
VOCAB_SIZE = 8192


def serve(
    backend: Annotated[
        Literal["vllm", "openai", "openai-chat"],
        typer.Option(help="The endpoint: of completions (vllm, openai), or of chats."),
    ] = "openai",
    base_url: Annotated[
        str | None, typer.Option(help="The server; in place of --host and --port.", metavar="URL")
    ] = None,
    host: Annotated[str, typer.Option(help="Its host.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.", min=1, max=65535)] = 8000,
    endpoint: Annotated[
        str | None, typer.Option(help="The path, where it is not OpenAI's.", metavar="PATH")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Default: the first that the server names.", metavar="NAME")
    ] = "",
    api_key: Annotated[
        str | None, typer.Option(help="Of the server.", envvar="ML4_API_KEY", metavar="KEY")
    ] = None,
    dataset_name: Annotated[
        Literal["random", "custom", "sharegpt", "conversation"],
        typer.Option(
            help="random: tokens. custom: a prompt a line of a .jsonl file. sharegpt: first "
            "questions. conversation: whole conversations, turn by turn.",
            metavar=DATASETS,
        ),
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="File of the other datasets.", metavar="FILE")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests, or conversations.", min=1)] = 1000,
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 128,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens that all begin with.", min=0)] = 0,
    output_len: Annotated[
        int | None, typer.Option(help="Tokens of an answer, of other datasets.", min=1)
    ] = None,
    think_time_s: Annotated[
        float, typer.Option(help="Seconds between the turns of a conversation.", min=0)
    ] = 0.0,
    request_rate: Annotated[
        str, typer.Option(help="Requests a second, or inf.", metavar="NUMBER")
    ] = "inf",
    burstiness: Annotated[
        float, typer.Option(help="1: a Poisson process; less: more bursts.")
    ] = 1.0,
    max_concurrency: Annotated[
        list[int] | None,
        typer.Option(help="Requests at once at most; repeated, a run for each.", min=1),
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before.", min=0)] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of full length.")] = (
        False
    ),
    temperature: Annotated[float | None, typer.Option(help="Of the answers.", min=0)] = None,
    percentile_metrics: Annotated[
        str, typer.Option(help="Of which percentiles are told.", metavar="NAME,...")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option(help="Which percentiles.", metavar="NUMBER,...")
    ] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="A limit in ms, as ttft:200; may be repeated.", metavar="NAME:MS"),
    ] = None,
    devices: Annotated[int, typer.Option(help="That serve it, for the plot.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts and gaps.")] = 0,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Whole answers.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write charts of all runs, as SVG.", metavar="FILE")
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write a JSON file for each run.")
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Where to.", metavar="FOLDER")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="All results as one list.")] = False,
) -> None:
    """Measure a server under load: TTFT, TPOT, ITL, throughput, goodput."""
    from ml4core.bench.serving import report
    from ml4core.bench.serving.outcome import METRICS
    from ml4core.bench.serving.plots import charts
    from ml4core.bench.serving.run import LoadOptions
    from ml4core.serving.http.packages import MissingPackageError, need

    try:
        need("httptools", "ml4 bench serve", "serve")
    except MissingPackageError as error:
        raise UsageError(str(error)) from error
    told = set(_names("--percentile-metrics", percentile_metrics, METRICS))
    options = report.BenchOptions(
        base_url or f"http://{host}:{port}",
        api_key,
        max_concurrency or [None],
        num_warmups,
        _numbers("--metric-percentiles", metric_percentiles, 100),
        _limits(goodput or [], METRICS),
        devices,
    )
    sent = LoadOptions(
        model=model,
        api="openai-chat" if backend == "openai-chat" else "openai",
        endpoint=endpoint,
        rate=_rate(request_rate),
        burstiness=burstiness,
        ignore_eos=ignore_eos,
        temperature=temperature,
        seed=seed,
        stream=not no_stream,
    )
    if not 0 < burstiness <= 1e6:
        raise UsageError(f"--burstiness: {burstiness:g} is out of range; works: above 0")
    load = _load(
        dataset_name, dataset_path, num_prompts, output_len, think_time_s, sent.api == "openai-chat"
    )
    if dataset_name == "random":
        lengths = (random_input_len, random_output_len, random_prefix_len)
        load = functools.partial(_random, num_prompts, lengths, seed, sent.api)

    def show(facts: dict[str, Any]) -> None:
        for key in [k for k in facts if k.endswith("_ms") and k.split("_")[-2] not in told]:
            del facts[key]
        if save_result:
            name = f"{sent.api}-{facts['max_concurrency']}-{facts['date'].replace(':', '')}.json"
            result_dir.mkdir(parents=True, exist_ok=True)
            (result_dir / name).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        if not as_json:
            output.write(report.text(facts))

    try:
        results = report.bench(options, load, sent, show)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except report.ServerError as error:
        output.note(f"error: {error}")
        raise typer.Exit(ERROR) from error
    if plot is not None:
        plot.write_text(charts(results, devices), "utf-8")
    if as_json:
        output.write_json(results)
    if any(facts["failed"] for facts in results):
        raise typer.Exit(ERROR)


def _random(
    count: int, lengths: tuple[int, int, int], seed: int, api: str
) -> Sequence[Conversation]:
    from ml4core.bench.serving.datasets import random_tokens, random_words

    size, answer, prefix = lengths
    if api == "openai-chat":
        return random_words(count, input_len=size + prefix, output_len=answer, seed=seed)
    return random_tokens(
        count,
        input_len=size,
        output_len=answer,
        prefix_len=prefix,
        vocab_size=VOCAB_SIZE,
        seed=seed,
    )


def _load(
    name: str, path: Path | None, count: int, length: int | None, think_s: float, chat: bool
) -> Callable[[], Sequence[Conversation]]:
    from ml4core.bench.serving import datasets

    if name == "random":
        return list
    if path is None:
        raise UsageError(f"--dataset-name {name}: works with --dataset-path")
    if name == "conversation":
        if not chat:
            raise UsageError("--dataset-name conversation: works with --backend openai-chat")
        return lambda: datasets.conversations(path, count, length, think_s)
    read = datasets.custom if name == "custom" else datasets.sharegpt
    return lambda: read(path, count, length, chat=chat)


def _names(flag: str, given: str, known: Sequence[str]) -> list[str]:
    found = [word.strip() for word in given.split(",") if word.strip()]
    for word in found:
        if word not in known:
            raise UsageError(f"{flag}: {word!r} is none of {', '.join(known)}")
    return found


def _numbers(flag: str, given: str, most: float) -> list[float]:
    try:
        found = [float(word) for word in given.split(",") if word.strip()]
    except ValueError:
        raise UsageError(f"{flag}: {given!r} is no list of numbers") from None
    if not all(0 <= value <= most for value in found):
        raise UsageError(f"{flag}: {given!r} is out of range; works: 0 to {most:g}")
    return found


def _rate(given: str) -> float:
    try:
        rate = float(given)
    except ValueError:
        raise UsageError(f"--request-rate: {given!r} is neither a number nor inf") from None
    if not rate > 0:
        raise UsageError(f"--request-rate: {given} is out of range; works: above 0, or inf")
    return rate


def _limits(given: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    found = {}
    for word in given:
        name, _, value = word.partition(":")
        if name == "itl" or name not in known:
            raise UsageError(f"--goodput: {word!r}; works: ttft, tpot or e2el, as ttft:200")
        (found[name],) = _numbers("--goodput", value or "?", 1e9)
    return found
