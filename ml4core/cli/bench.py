"""``ml4 bench``: how fast it is here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ml4core.bench.parts import DEFAULT_PARTS, PARTS, SEEDED
from ml4core.cli import bench_ops, bench_serve, output, streams
from ml4core.cli.engine_options import EngineCommand, with_engine_flags
from ml4core.cli.exits import UsageError
from ml4core.engine.args import EngineArgs
from ml4core.models.quantize_options import MXFP4Rule

STDOUT = "-"


def build_app() -> typer.Typer:
    app = typer.Typer(help="Measure speed and memory here.", no_args_is_help=True)
    app.command("step", cls=EngineCommand)(with_engine_flags(step, SEEDED, plans=False))
    app.command("ops")(bench_ops.ops)
    app.command("requant")(requant)
    app.command("serve")(bench_serve.serve)
    return app


def step(
    args: EngineArgs,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="host: a step without a model. model: prompts, tokens, contexts. load: peak of "
            "memory at loading. compare: see --compare. May be repeated; default: the first three.",
            metavar="|".join(PARTS),
        ),
    ] = None,
    compare: Annotated[
        Literal["transformers"] | None,
        typer.Option(help="Run an equal model with it, in turns with ours; adds that part."),
    ] = None,
    requests: Annotated[
        list[int] | None,
        typer.Option(
            help="Running requests of the host part; may be repeated; default: 1, 32, 256.", min=1
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of a prompt of the model part; may be repeated; default: 128 to 4096, as "
            "fits.",
            min=1,
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(help="Requests that run together; may be repeated; default: 1, 16.", min=1),
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each of their prompts.", min=1)] = 128,
    output_len: Annotated[int, typer.Option(help="Decodes to time.", min=1)] = 16,
    repeats: Annotated[int, typer.Option(help="Of each timing.", min=1, max=10_000)] = 3,
    threads: Annotated[int, typer.Option(help="Of torch on the host.", min=1, max=4096)] = 1,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="Write the figures as one object into a file too, or to stdout alone: -.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Measure the cost of an engine's steps.

    MODEL: a checkpoint. Left out: a small model with seeded weights, made for this run.
    """
    parts = _parts(part or (), compare)
    target = _target(as_json)
    if "compare" in parts:
        from ml4core.bench.relative import check_installed

        check_installed()

    from ml4core.bench.step import Options, measure

    default = Options()
    options = Options(
        parts=parts,
        requests=tuple(dict.fromkeys(requests or default.requests)),
        contexts=tuple(dict.fromkeys(context or default.contexts)),
        batches=tuple(dict.fromkeys(batch_size or default.batches)),
        input_len=input_len,
        output_len=output_len,
        repeats=repeats,
        threads=threads,
    )
    facts = measure(args, options, lambda what: output.note(f"measuring: {what}"))
    if as_json == STDOUT:
        output.write_json(facts)
        return
    from ml4core.cli.bench_text import text

    output.write(text(facts, streams.results()))
    if target is not None:
        target.write_text(json.dumps(facts, indent=2, default=str) + "\n", "utf-8")


def _parts(named: Sequence[str], compare: str | None) -> tuple[str, ...]:
    """In the order in which they run."""
    if unknown := [one for one in named if one not in PARTS]:
        raise UsageError(f"--part {unknown[0]}: no such part; works: {', '.join(PARTS)}")
    wanted: set[str] = {*(named or DEFAULT_PARTS)}
    if compare is not None:
        wanted.add("compare")
    return tuple(one for one in PARTS if one in wanted)


def _target(as_json: str | None) -> Path | None:
    """Where the figures go, looked at before minutes are spent on them."""
    if as_json in (None, STDOUT):
        return None
    path = Path(str(as_json)).expanduser()
    if path.is_dir() or not path.absolute().parent.is_dir():
        why = "is a folder" if path.is_dir() else "its folder does not exist"
        raise UsageError(f"--json {as_json}: {why}; works: a file, or - for stdout")
    return path


def requant(
    rule: Annotated[MXFP4Rule, typer.Option(help="How MXFP4 finds a group's scale.")] = "even",
    threads: Annotated[int, typer.Option(help="Of torch on the host.", min=1, max=4096)] = 1,
    repeats: Annotated[int, typer.Option(help="Of each timing.", min=1, max=10_000)] = 5,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="Write the figures as one object into a file too, or to stdout alone: -.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Measure how fast experts in FP8 become MXFP4 while a checkpoint is loaded."""
    target = _target(as_json)
    from ml4core.bench.requant import measure, text

    facts = measure(rule, threads, repeats)
    if as_json == STDOUT:
        output.write_json(facts)
        return
    output.write(text(facts))
    if target is not None:
        target.write_text(json.dumps(facts, indent=2, default=str) + "\n", "utf-8")
