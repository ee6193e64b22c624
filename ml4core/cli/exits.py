"""What the process says and returns when something ends a command."""

from __future__ import annotations

import os
import traceback

import typer

from ml4core.api import FaultError, Refused
from ml4core.cli import output
from ml4core.cli.signals import Terminated
from ml4core.engine.errors import ArgumentsError, RequestError
from ml4core.models.errors import CheckpointError
from ml4core.registry import lacks_memory

OK = 0
ERROR = 1
"""A checkpoint, a request or the machine is at fault; or this program."""
USAGE = 2
"""The command line is."""
REFUSED = 3
"""The deployment can't be served, with every reason."""
FAULT = 4
"""The engine stopped on a fault."""
INTERRUPTED = 128 + 2
"""By SIGINT; by another signal, 128 and its number."""


class UsageError(Exception):
    """A command line that can't be taken."""


TRACEBACK_VARIABLE = "ML4_TRACEBACK"


def report(error: BaseException) -> int:
    """Prints what ended the run on stderr; returns the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ERROR
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        output.note("interrupted")
        return INTERRUPTED
    if isinstance(error, Terminated):
        output.note(f"ended by {error}")
        return 128 + error.number
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        traceback.print_exception(error)
    code, text = _verdict(error)
    if text:
        output.note(f"error: {text}")
    return code


def _verdict(error: BaseException) -> tuple[int, str]:
    if isinstance(error, ArgumentsError):
        count = len(error.problems)
        lines = "".join(f"\n  - {problem}" for problem in error.problems)
        return USAGE, error.problems[0] if count == 1 else f"{count} faults in the flags:{lines}"
    if isinstance(error, UsageError):
        return USAGE, str(error)
    if hasattr(error, "format_message"):  # typer's own errors share no public class before 0.26
        return getattr(error, "exit_code", USAGE), _usage_text(error)
    if isinstance(error, Refused):
        return REFUSED, str(error)
    if isinstance(error, FaultError):
        return FAULT, str(error)
    if isinstance(error, CheckpointError | RequestError):
        return ERROR, str(error)
    if lacks_memory(error):
        return ERROR, f"out of memory: {error or 'no further word'}"
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return ERROR, f"{name}{error.strerror or error}"
    kind = type(error).__name__
    return (
        ERROR,
        f"{kind}: {error}\nThis is a fault of ml4core; {TRACEBACK_VARIABLE}=1 shows where.",
    )


def _usage_text(error: BaseException) -> str:
    options = getattr(error, "possibilities", None)
    text = str(getattr(error, "message", "")) if options else error.format_message()  # type: ignore[attr-defined]
    text = text.rstrip(".")
    if not text:  # a group without a command has shown its help
        return ""
    if options:
        text += f"; did you mean {options[0]}?"
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text}\nTry '{context.command_path} --help'."
