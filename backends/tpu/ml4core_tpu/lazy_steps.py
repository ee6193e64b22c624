"""Steps on torch-xla's lazy tensors: one graph a step, which torch-xla compiles for its shape.

Weights and caches are lazy tensors for as long as the session is open. What the engine hands to a
step, and what it gets back, lies on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ml4core.api import Deployment, DraftStep, StepBuckets, StepOutput, StepPlan, StepShape
from ml4core_tpu.buckets import buckets_of
from ml4core_tpu.runtimes import HOST, LAZY_DEVICE

F = TypeVar("F", bound=Callable[..., object])
Step = Callable[..., StepOutput]


def lazy_device() -> torch.device:
    """The host as torch-xla's device, with kernels of all ops."""
    os.environ.setdefault(LAZY_DEVICE, HOST)
    import torch_xla

    from ml4core_tpu.xla_ops import registered

    found: torch.device = torch_xla.device()  # before JAX is imported
    registered()
    return found


def lazy_buckets(deployment: Deployment) -> StepBuckets:
    """One size of each kind: a graph takes a minute to compile, and padding is cheap."""
    requests, pages = deployment.max_num_seqs, buckets_of(deployment).pages
    draft = deployment.model.draft
    windows = requests * (1 if draft is None else draft.depth + 1)
    return StepBuckets(
        decode=(requests,),
        verify=(requests,),
        prefill_requests=(requests,),
        prefill_rows=(deployment.max_num_batched_tokens,),
        pages=(pages,),
        logits=tuple(sorted({requests, windows, windows + requests})),
    )


class LazyExecutor:
    """Brings a step's plan to lazy tensors, and its results back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compile(self, step: Step, shape: StepShape) -> Step:
        # Tensors of inference mode have no version, which lazy tensors want of all that they meet.
        @torch.inference_mode(False)
        @torch.no_grad()
        def run(weights: Any, plan: StepPlan | DraftStep, kv: Any) -> StepOutput:
            import torch_xla

            # What was allocated or copied since becomes data. Else it were part of the graph, and
            # that another one than the next step's.
            torch_xla.sync()
            moved = {name: one.to(self._device) for name, one in plan.tensors().items()}
            found = step(weights, plan.replace_tensors(moved), kv)
            torch_xla.sync()
            taps = tuple(tap.cpu() for tap in found.taps)
            return StepOutput(found.logits.cpu(), taps, found.fault.cpu())

        return run

    def eager_break(self, function: F) -> F:
        return function
