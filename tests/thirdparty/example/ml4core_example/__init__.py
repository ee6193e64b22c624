"""An example of a backend, as a vendor would write it in a repository of its own.

It imports ``ml4core.api`` and ``ml4core.formats``, and nothing else of ml4core.
"""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import Backend, Capabilities, Deployment, Refusal, hookimpl


@hookimpl
def ml4core_backends() -> Sequence[Backend]:
    """Called when plugins are looked for: imports no vendor library and touches no device."""
    from ml4core_example.backend import ExampleBackend

    return [ExampleBackend()]


@hookimpl
def ml4core_refusals(deployment: Deployment, capabilities: Capabilities) -> Sequence[Refusal]:
    """What no capability word can say."""
    from ml4core_example.backend import refusals

    return refusals(deployment)
