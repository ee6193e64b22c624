"""The server's flags as options of a command, made from their one table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ml4core.cli.engine_options import option
from ml4core.engine.errors import ArgumentsError
from ml4core.serving.http.flags import SERVER_FLAGS, ServerArgs


def with_server_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (engine's arguments, ``ServerArgs``) as one whose options are the server's
    flags; for ``with_engine_flags``.
    """

    def command(args: Any, **given: Any) -> Any:
        values: dict[str, Any] = {}
        problems: list[str] = []
        for field, value in given.items():
            if value in (None, []):
                continue
            try:
                values[field] = SERVER_FLAGS[field].parse(value)
            except ValueError as error:
                problems.append(f"{SERVER_FLAGS[field].name}: {error}")
        if problems:
            raise ArgumentsError(problems)
        return function(args, ServerArgs(**values))

    first = next(iter(inspect.signature(function, eval_str=True).parameters.values()))
    options = [option(flag, plans=False) for flag in SERVER_FLAGS.values()]
    command.__signature__ = inspect.Signature([first, *options])  # type: ignore[attr-defined]
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__annotations__ = {}
    return command
