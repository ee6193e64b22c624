"""The whole extension surface of core: three hooks. pluggy finds and selects; it is never called in
a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from ml4core.api.backend import Backend
    from ml4core.api.capabilities import Capabilities
    from ml4core.api.deployment import Deployment
    from ml4core.api.faults import Fault
    from ml4core.api.refusal import Refusal

PROJECT = "ml4core"
BACKENDS_GROUP = "ml4core.backends"
"""Entry-point group of backend plugins; the entry point's name is the word of ``--backend``."""
COMMANDS_GROUP = "ml4core.commands"
"""Entry-point group of sub-commands of ``ml4``; each loads a ``typer.Typer``."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def ml4core_backends() -> Sequence[Backend]:  # type: ignore[empty-body]
    """The backends of this plugin. Imports no vendor library and touches no device."""


@hookspec
def ml4core_refusals(deployment: Deployment, capabilities: Capabilities) -> Sequence[Refusal]:  # type: ignore[empty-body]
    """Every further reason against this deployment. Core gathers them with its own and raises one
    ``Refused``.
    """


@hookspec
def ml4core_fault(fault: Fault) -> None:
    """Told once when an engine stops on a fault. May neither raise nor restart it."""
