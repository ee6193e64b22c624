"""``ml4 serve``: the OpenAI-compatible server."""

from __future__ import annotations

import typer

from ml4core.cli import output
from ml4core.cli.exits import ERROR, UsageError
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.serving.http.flags import ServerArgs, without_server_flags
from ml4core.serving.http.packages import MissingPackageError, need_server


def serve(args: EngineArgs, server: ServerArgs) -> None:
    """Serve a model to clients of the OpenAI API.

    MODEL: left out, it is ml4-tiny.
    """
    engine = without_server_flags(args)
    if server.dry_run:
        from ml4core.serving.dry_run import dry_run

        output.write_json(dry_run(engine, refused=output.write_json))
        return
    if engine.refusals() or engine.data_parallel_size > 1:
        # With all else that is against it, before anything is imported.
        choose_backend(engine, serves=True)
    try:
        need_server()
        from ml4core.serving.http.serve import ShutdownError, run
    except MissingPackageError as error:
        raise UsageError(str(error)) from error
    try:
        run(args, server)
    except MissingPackageError as error:
        raise UsageError(str(error)) from error
    except ShutdownError as error:
        output.note(f"error: {error}")
        raise typer.Exit(ERROR) from error
