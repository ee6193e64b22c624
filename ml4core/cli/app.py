"""The ``ml4`` command line: its commands, and its one way out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ml4core import API_VERSION, __version__
from ml4core.cli import (
    backends,
    bench,
    checkpoint,
    doctor,
    eval,
    exits,
    generate,
    inspect,
    output,
    plan,
    quantize,
    serve,
    signals,
    streams,
)
from ml4core.cli.commands import CommandGroup
from ml4core.cli.engine_options import EngineCommand, with_engine_flags
from ml4core.cli.sampling_options import with_sampling_options
from ml4core.cli.server_options import with_server_flags
from ml4core.models.embedded import EMBEDDED
from ml4core.planning.variants import PUBLISHED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        streams.prepare()
        command = typer.main.get_command(build_app())
        with signals.raised():
            result = command.main(args=words, prog_name="ml4", standalone_mode=False)
        output.write("")  # what is buffered, while a closed pipe can still be told
    except typer.Exit as error:
        return error.exit_code
    except BaseException as error:
        code = exits.report(error)
        streams.settle()
        return code
    return result if isinstance(result, int) else exits.OK


def build_app() -> typer.Typer:
    app = typer.Typer(
        cls=CommandGroup,
        add_completion=False,
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
    )
    app.callback()(root)
    app.command("backends")(backends.backends)
    app.command("doctor")(doctor.doctor)
    app.command("inspect")(inspect.inspect)
    app.add_typer(checkpoint.build_app(), name="checkpoint")
    app.command("quantize")(quantize.quantize)
    app.command("generate", cls=EngineCommand)(
        with_engine_flags(with_sampling_options(generate.generate), EMBEDDED, plans=False)
    )
    app.command("serve", cls=EngineCommand)(
        with_engine_flags(with_server_flags(serve.serve), EMBEDDED, plans=False)
    )
    app.add_typer(bench.build_app(), name="bench")
    app.command("eval", cls=EngineCommand)(with_engine_flags(eval.evaluate, EMBEDDED, plans=False))
    app.command("plan", cls=EngineCommand)(with_engine_flags(plan.plan, PUBLISHED))
    return app


def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show versions and exit.")] = False,
) -> None:
    """Mistral Large 4 on any accelerator that has a plugin."""
    if version:
        output.write(f"ml4core {__version__} (plugin API {API_VERSION})\n")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        output.write(context.get_help())
        raise typer.Exit(exits.USAGE)
