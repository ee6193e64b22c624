"""``ml4 eval``: how good a model is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ml4core.cli import output, streams
from ml4core.cli.exits import UsageError
from ml4core.engine.args import EngineArgs
from ml4core.evaluation.parts import DEFAULT_PARTS, PARTS, WEIGHTS
from ml4core.models.embedded import EMBEDDED

STDOUT = "-"


def evaluate(
    args: EngineArgs,
    part: Annotated[
        list[str] | None,
        typer.Argument(
            help="ppl: perplexity by form of the weights and layout of the cache. retrieval: "
            "numbers found in long prompts. tools: calls and JSON. draft: accepted drafts. "
            "speed: of one request with drafts and without. Default: all but speed.",
            metavar=f"[{'|'.join(PARTS)}]...",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text to foretell in place of the shipped ones.", metavar="FILE"),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="A form to convert the checkpoint to, for ppl; may be repeated. Default for "
            "one up to 256 MiB: nvfp4, mxfp4.",
            metavar="|".join(WEIGHTS),
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Prompt tokens of retrieval; may be repeated; default: 512 to 2048.", min=1
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Cases of each row at most.", min=1)] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Prompts of 4096 and 8192 tokens too: the card's run.")
    ] = False,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="Write the figures as one object into a file too, or to stdout alone: -.",
            metavar="FILE",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of them, an SVG.", metavar="FILE")
    ] = None,
) -> None:
    """Judge a model: perplexity, retrieval, tool calls, drafts.

    MODEL: left out, it is ml4-tiny; `ml4 eval ppl draft` judges two of its parts.
    """
    args, parts = _split(args, part or ())
    for flag, value in (("--json", as_json), ("--plot", plot)):
        _check_target(flag, value)
    if unknown := [form for form in weights or () if form not in WEIGHTS]:
        raise UsageError(f"--weights {unknown[0]}: no such form; works: {', '.join(WEIGHTS)}")
    if length and full:
        raise UsageError("--full: contradicts --length; leave one out")

    from ml4core.evaluation.run import Options, measure

    options = Options(
        parts=parts,
        text=text,
        weights=None if weights is None else tuple(dict.fromkeys(weights)),
        lengths=tuple(dict.fromkeys(length or ())),
        limit=limit,
        full=full,
    )
    with _told() as tell:
        facts = measure(args, options, tell)
    if plot is not None:
        from ml4core.evaluation.plot import plot as picture

        plot.expanduser().write_text(picture(facts), "utf-8")
    if as_json == STDOUT:
        output.write_json(facts)
        return
    from ml4core.evaluation.tables import tables

    shown = tables(facts)
    stream = streams.results()
    output.write(
        "\n".join(f"{one.title}\n{output.table(one.columns, one.rows, stream)}" for one in shown)
    )
    if "draft" in facts and facts["draft"] is None:
        output.note("draft: the checkpoint has no drafter")
    if as_json is not None:
        Path(as_json).expanduser().write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


def _split(args: EngineArgs, named: Sequence[str]) -> tuple[EngineArgs, tuple[str, ...]]:
    """The model, and the parts in the order in which they run: the first word may be either."""
    words = list(named)
    if args.model in PARTS:
        words.insert(0, args.model)
        args = replace(args, model=EMBEDDED)
    if unknown := [word for word in words if word not in PARTS]:
        raise UsageError(
            f"{unknown[0]}: no such part; works: {', '.join(PARTS)}, behind the model "
            "if one is named"
        )
    return args, tuple(one for one in PARTS if one in words) or DEFAULT_PARTS


def _check_target(flag: str, value: str | Path | None) -> None:
    """Where figures go is looked at before minutes are spent on them."""
    if value is None or str(value) == STDOUT:
        return
    path = Path(value).expanduser()
    if path.is_dir() or not path.absolute().parent.is_dir():
        why = "is a folder" if path.is_dir() else "its folder does not exist"
        raise UsageError(f"{flag} {value}: {why}; works: a file")


@contextmanager
def _told() -> Iterator[Any]:
    """Gives what is told how far it is: a bar on a terminal, a line for each part elsewhere."""
    with output.steps_bar() as bar:
        if bar is not None:
            yield bar
            return
        begun: set[str] = set()

        def tell(what: str, done: int, total: int) -> None:
            if what not in begun:
                begun.add(what)
                output.note(f"measuring: {what}")

        yield tell
