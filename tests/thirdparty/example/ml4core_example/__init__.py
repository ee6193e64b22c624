"""An example of a backend, as a vendor would write it in a repository of its own.

It imports ``ml4core.api`` and ``ml4core.formats``, and nothing else of ml4core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


@hookimpl(optionalhook=True)
def ml4core_conformance_checks(register: Callable[..., None]) -> None:
    """Called by the suite alone. Our checks count in our verdict as the suite's do."""
    from ml4core_example.conformance import pages_of_eight

    doc = "Rows lie in columns of eight tokens, so pages of another multiple are refused."
    register("x-ml4core-example.pages", pages_of_eight, doc, profile="system")


@hookimpl(optionalhook=True)
def ml4core_conformance_harness(backend: Backend) -> object:
    """Called by the suite alone: what only we can do to our device."""
    from ml4core_example.conformance import Harness

    return Harness()
