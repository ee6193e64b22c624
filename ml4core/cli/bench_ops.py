"""``ml4 bench ops``: the command and its table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer

from ml4core.cli import output, streams
from ml4core.cli.exits import UsageError

STDOUT = "-"


def ops(
    backend: Annotated[
        str, typer.Option(metavar="NAME|auto", help="Whose ops; see: ml4 backends.")
    ] = "auto",
    device: Annotated[
        Literal["real", "interpreted", "fake", "source"] | None,
        typer.Option(help="Kind of the device; one that isn't real is opened only if asked for."),
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="An op's name; may be repeated; default: all.")
    ] = None,
    size: Annotated[
        Literal["full", "small"] | None,
        typer.Option(
            help="full: one rank of eight of the full model. Default: full on an accelerator."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of each timing.", min=1, max=10_000)] = 5,
    threads: Annotated[int, typer.Option(help="Of torch on the host.", min=1, max=4096)] = 1,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="Write the figures as one object into a file too, or to stdout alone: -.",
            metavar="FILE",
        ),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="Draw a roofline into this SVG file.", metavar="FILE")
    ] = None,
) -> None:
    """Measure a backend's ops, beside others that do the same work."""
    targets = {"--json": _target("--json", as_json), "--plot": _target("--plot", plot)}
    from ml4core.bench.ops import Options, measure

    options = Options(tuple(op or ()), size or "", repeats, threads, device)
    try:
        facts = measure(backend, options, lambda what: output.note(f"measuring: {what}"))
    except ValueError as error:
        raise UsageError(f"--op: {error}") from error
    if (path := targets["--plot"]) is not None:
        from ml4core.bench.ops_plot import roofline

        path.write_text(roofline(facts), "utf-8")
    if as_json == STDOUT:
        output.write_json(facts)
        return
    output.write(text(facts, streams.results()))
    if (path := targets["--json"]) is not None:
        path.write_text(json.dumps(facts, indent=2, default=str) + "\n", "utf-8")


def text(facts: Mapping[str, Any], stream: TextIO) -> str:
    """A line an op. The figure in brackets is the range without the outer tenths."""
    rates, where = facts["rates"], facts["environment"]
    head = (
        f"{where['backend']} on {where['device']} ({where['device_kind']}), {facts['size']} sizes; "
        f"copy {rates['bytes'] / 1e9:,.0f} GB/s, products {rates['flops'] / 1e12:,.2f} Tflop/s\n"
    )
    rows = [
        (
            one["name"],
            f"{1e6 * one['median']:,.1f} [{1e6 * one['low']:,.1f} .. {1e6 * one['high']:,.1f}]",
            f"{1e6 * one['floor']:,.1f}",
            f"{one['of_floor']:.0%}",
            "\n".join(_peer(name, peer) for name, peer in one["peers"].items()),
        )
        for one in facts["ops"]
    ]
    columns = ("OP", "US A CALL", "FLOOR, US", "OF IT", "BESIDE IT")
    return f"{output.printable(head)}\n{output.table(columns, rows, stream)}"


def _peer(name: str, facts: Mapping[str, Any]) -> str:
    if "failed" in facts:
        return f"{name}: {facts['failed'][:60]}"
    return f"{facts['speed_up']:.2f}x {name}, {1e6 * facts['median']:,.1f} us"


def _target(flag: str, value: str | None) -> Path | None:
    """Where it goes, looked at before minutes are spent on it."""
    if value in (None, STDOUT):
        if value == STDOUT and flag != "--json":
            raise UsageError(f"{flag} {value}: works: a file")
        return None
    path = Path(str(value)).expanduser()
    if path.is_dir() or not path.absolute().parent.is_dir():
        why = "is a folder" if path.is_dir() else "its folder does not exist"
        raise UsageError(f"{flag} {value}: {why}; works: a file, or - for stdout")
    return path
