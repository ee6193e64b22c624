"""The candidate for ``decoder_layer``: a whole layer of a small step in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import environ

from ml4core.api import Candidate, Capabilities, Deployment, LayerSpec, Refusal, Rejected, StepShape
from ml4core_rocm import switches
from ml4core_rocm.latency.guards import PROVIDER, asked, config_reasons
from ml4core_rocm.latency.steps import StepFacts, plan


def candidates(
    layer: LayerSpec,
    shape: StepShape,
    deployment: Deployment,
    capabilities: Capabilities,
    environment: Mapping[str, str] = environ,
) -> Sequence[Candidate]:
    """Nothing where it isn't asked for; else a rejection with each reason: those of the step,
    those of the layer, those of the deployment, and the kernel's last.
    """
    if not asked(deployment):
        return ()
    found = []
    drafts = deployment.speculative_config.get("num_speculative_tokens")
    window = drafts + 1 if isinstance(drafts, int) else None
    decision = plan(shape, window, StepFacts(graph="none" if deployment.enforce_eager else "full"))
    if not decision.mono:
        found.append(Refusal("rocm", PROVIDER, f"a {shape.kind} step: {decision.why}"))
    if layer.moe is None:
        found.append(Refusal("rocm", PROVIDER, "a dense layer is no part of it"))
    of_switches, _ = switches.read(deployment, capabilities, environment)
    return (Rejected(PROVIDER, (*found, *config_reasons(deployment, of_switches))),)
