"""Every reason of this backend against a deployment, whichever part it lies in."""

from __future__ import annotations

from collections.abc import Mapping
from os import environ

from ml4core.api import Capabilities, Deployment, Refusal, unknown_switches
from ml4core_rocm import switches
from ml4core_rocm.capabilities import layout_refusals
from ml4core_rocm.latency.guards import config_reasons


def refusals(
    deployment: Deployment,
    capabilities: Capabilities,
    environment: Mapping[str, str] = environ,
) -> tuple[Refusal, ...]:
    """They depend on the arguments alone, and on the environment that a launcher hands to each of
    its ranks, so every rank finds the same list.
    """
    found, of_switches = switches.read(deployment, capabilities, environment)
    return (
        *layout_refusals(deployment),
        *unknown_switches(deployment, "rocm", switches.KEYS),
        *of_switches,
        *config_reasons(deployment, found),
    )
