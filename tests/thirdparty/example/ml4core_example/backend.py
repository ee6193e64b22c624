"""What the backend finds, what it can do, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import (
    Capabilities,
    Deployment,
    Device,
    Probe,
    Refusal,
    Refused,
    Session,
    undeclared,
    unknown_switches,
)
from ml4core_example.layout import COLUMNS

NAME = "example"
MAX_HEADS = 64
MAX_TOPK = 2048

_FEATURES = frozenset(
    {
        # Ops of our own. All others, and every stage, are core's compositions in plain torch.
        "op:topk",
        "op:kv_write",
        "op:gather_kv",
        "op:sparse_mla",
        "feature:compose",
        "kv:fp32",
        f"kv:{COLUMNS}",
        "index:fp32",
        "weights:bf16",
        "weights:fp32",
        "act:fp32",
        "feature:deterministic",
    }
)


class ExampleBackend:
    """Torch on the host's cores, as if it were a device."""

    name = NAME
    priority = 1

    def probe(self) -> Probe:
        """Vendor libraries are imported here, not above. Each way to have no device is a reason."""
        try:
            import torch
        except ImportError as error:
            return Probe(refusals=(Refusal(NAME, "torch", f"can't be imported: {error}"),))
        details = {"torch": torch.__version__}
        return Probe((Device("real", "example device", "host", "cpu", details=details),))

    def capabilities(self, device: Device) -> Capabilities:
        """Words of a closed vocabulary. What isn't declared is refused, so declare what is true."""
        return Capabilities(
            _FEATURES,
            defaults={"dtype": "float32", "kv": "fp32", "index": "fp32", "block_size": "64"},
            limits={"max_heads": MAX_HEADS, "max_topk": MAX_TOPK},
        )

    def open(self, deployment: Deployment) -> Session:
        """All reasons against the deployment at once, before anything is allocated."""
        capabilities = self.capabilities(deployment.device)
        reasons = [
            *undeclared(deployment.needs, capabilities, NAME),
            *unknown_switches(deployment, NAME),
            *refusals(deployment),
        ]
        if reasons:
            raise Refused(reasons, what=f"--backend {NAME}")
        from ml4core_example.session import ExampleSession

        return ExampleSession(deployment)


def refusals(deployment: Deployment) -> Sequence[Refusal]:
    if deployment.kv_layout == COLUMNS and deployment.block_size % 8:
        reason = f"{COLUMNS} has pages of a multiple of 8 tokens, not {deployment.block_size}"
        return [Refusal(NAME, "--block-size", reason, "8, 16, 64, ...")]
    return []
