"""Sub-commands of other distributions, and what is said where one is missing or broken."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperGroup

from ml4core.api import COMMANDS_GROUP
from ml4core.cli import output
from ml4core.cli.exits import ERROR, UsageError

BROUGHT_BY: Mapping[str, str] = MappingProxyType(
    {name: f"ml4core-{name}" for name in ("conformance", "cuda", "rocm", "tpu")}
)
"""Known sub-commands and the distributions that bring them."""


class CommandGroup(TyperGroup):
    """The commands of core, and those of entry points, imported only when called."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return own + sorted(set(installed()) - set(own))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What help shows: a command of another distribution is a line, not imported."""
        own = super().get_command(ctx, cmd_name)
        found = installed().get(cmd_name)
        if own is not None or not found:
            return own
        return self._stub(cmd_name, found)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """What runs."""
        name = args[0]
        if name not in self.commands:
            found = installed().get(name)
            if found:
                return name, load(name, found), args[1:]
            if reason := missing(name):
                raise UsageError(reason)
        return super().resolve_command(ctx, args)

    @staticmethod
    def _stub(name: str, found: list[EntryPoint]) -> Any:
        app = typer.Typer(add_completion=False)
        app.command(name, help=f"From {', '.join(map(origin, found))}.")(lambda: None)
        return typer.main.get_command(app)


def installed() -> dict[str, list[EntryPoint]]:
    """Name -> its entry points: one, or several where distributions contend. Imports nothing."""
    found: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=COMMANDS_GROUP):
        rivals = found.setdefault(entry_point.name, [])
        if entry_point not in rivals:  # a path listed twice lists its distributions twice
            rivals.append(entry_point)
    return found


def origin(entry_point: EntryPoint) -> str:
    """``name version`` of the distribution that brings it."""
    if entry_point.dist is None:
        return entry_point.value
    return f"{entry_point.dist.name} {entry_point.dist.version}"


def load(name: str, found: list[EntryPoint]) -> Any:
    """The command of a distribution. Ends the run with the reason, if there is none to be had."""
    if len(found) > 1:
        both = " and ".join(sorted(map(origin, found)))
        _fail(f"ml4 {name}: brought by both {both}; uninstall one")
    (entry_point,) = found
    try:
        app = entry_point.load()
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # an import may even exit; the other commands go on
        _fail(f"ml4 {name}: {origin(entry_point)} can't be loaded: {type(error).__name__}: {error}")
    if not isinstance(app, typer.Typer):
        _fail(
            f"ml4 {name}: {origin(entry_point)} brings a {type(app).__name__} as "
            f"{entry_point.value}; works: a typer.Typer"
        )
    return typer.main.get_command(app)


def missing(name: str) -> str:
    """Why a known command is not here, and how to get it; empty for one that nobody knows."""
    distribution = BROUGHT_BY.get(name)
    if distribution is None:
        return ""
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return f"ml4 {name}: {distribution} is not installed; pip install 'ml4core[{name}]'"
    return f"ml4 {name}: {distribution} {found} brings no such command"


def _fail(text: str) -> Any:
    output.note(f"error: {text}")
    raise typer.Exit(ERROR)
