"""The runtimes that can stand under the kernels, chosen by an option.

jax        JAX itself: XLA on the host, and TPUs of one process a host
torch_xla  torch-xla: its lazy tensors, with the kernels as calls of JAX programs
torch_tpu  torch-tpu: its own device, with the kernels as registered programs
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType

from ml4core.api import Deployment, Refusal
from ml4core_tpu.libraries import INSTALL

SWITCHES = ("runtime", "compilation_cache", "warm_up", "resident")
"""Keys of the object ``tpu`` of ``--additional-config``."""
DEFAULT = "jax"
LAZY = "torch_xla"
LAZY_DEVICE, HOST = "PJRT_DEVICE", "CPU"
"""The variable by which torch-xla takes its device, and its word for the host."""
TORCH_TPU = "torch_tpu"

_DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {"jax": "jax", LAZY: "torch-xla", TORCH_TPU: "torch-tpu"}
)
WORKS: Mapping[str, str] = MappingProxyType(
    {
        "jax": INSTALL,
        LAZY: "an environment of its own, of torch-xla 2.9.0 and the torch 2.9 that it is bound "
        "to: python -m tools.torch_xla.environment FOLDER in a checkout",
        TORCH_TPU: "pip install torch-tpu",
    }
)
"""What brings a runtime."""


def runtime_of(deployment: Deployment) -> str:
    """The runtime that is asked for; ``jax`` if none is."""
    own = deployment.additional_config.get("tpu", {})
    return str(own.get("runtime", DEFAULT)) if isinstance(own, Mapping) else DEFAULT


def runtime_refusals(deployment: Deployment) -> tuple[Refusal, ...]:
    """Why the runtime can't serve the deployment's device. Imports none but JAX."""
    runtime, device = runtime_of(deployment), deployment.device
    subject = f"--additional-config tpu.runtime={runtime}"
    if runtime not in _DISTRIBUTIONS:
        return (Refusal("tpu", subject, "there is no such runtime", ", ".join(_DISTRIBUTIONS)),)
    if find_spec(runtime) is None:
        reason = f"{runtime} is not installed"
        return (Refusal("tpu", subject, reason, WORKS[runtime]),)
    if runtime == TORCH_TPU:
        if device.kind == "real":
            reason, remedy = "its ops are registered there, and no session runs on them", "jax"
        else:
            reason = f"torch-tpu {_version(runtime)} runs nothing without a TPU: it has no client"
            remedy = "jax, which interprets on the host"
        return (Refusal("tpu", subject, reason, f"tpu.runtime={remedy}"),)
    if runtime == LAZY and device.kind == "real":
        reason = "its sessions run on the host alone: its libtpu doesn't know tpu7x"
        return (Refusal("tpu", subject, reason, "tpu.runtime=jax"),)
    named = os.environ.get(LAZY_DEVICE, HOST)
    if runtime == LAZY and named != HOST:
        reason = f"{LAZY_DEVICE} is {named!r}, and its sessions run on the host"
        return (Refusal("tpu", subject, reason, f"{LAZY_DEVICE}={HOST}, or leave it out"),)
    if runtime == LAZY and (reason := _unlike_torch(_version(LAZY), version("torch"))):
        return (Refusal("tpu", subject, reason, f"{WORKS[LAZY]}; or tpu.runtime=jax"),)
    return ()


def _unlike_torch(torch_xla: str, torch: str) -> str:
    """Why torch-xla can't be loaded beside this torch; "" if it can be."""
    if torch_xla.split(".")[:2] == torch.split(".")[:2]:
        return ""
    return f"torch-xla {torch_xla} is bound to torch of its own release, and here is torch {torch}"


def runtime_reasons() -> Mapping[str, str]:
    """Each runtime with its version, or why it isn't there. Imports none."""
    return MappingProxyType(
        {
            name: _version(name) if find_spec(name) else f"not installed; works: {works}"
            for name, works in WORKS.items()
        }
    )


def _version(module: str) -> str:
    try:
        return version(_DISTRIBUTIONS[module])
    except PackageNotFoundError:
        return "of unknown version"
