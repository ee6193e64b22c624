"""A session: the backend, opened for one deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ml4core.api import (
    Candidate,
    Deployment,
    Fault,
    KVCache,
    KVLayout,
    LayerSpec,
    ModelPart,
    StepOutput,
    StepShape,
    VisionShape,
    Weight,
)
from ml4core_example.layout import COLUMNS, columns
from ml4core_example.ops.attention import sparse_mla
from ml4core_example.ops.caches import gather_kv, kv_write
from ml4core_example.ops.selection import topk

if TYPE_CHECKING:
    from torch import Tensor


class Eager:
    """Runs a step as it is. A device that captures or compiles steps does so in ``compile``.

    Attributes:
        before_step: what a harness has put in the way of each step.
    """

    before_step: Callable[[], object] | None = None

    def compile(
        self, step: Callable[..., StepOutput], shape: StepShape
    ) -> Callable[..., StepOutput]:
        def run(*args: object) -> StepOutput:
            if self.before_step is not None:
                self.before_step()
            return step(*args)

        return run

    def eager_break(self, function: Callable[..., object]) -> Callable[..., object]:
        return function


class ExampleSession:
    """Its ``ops`` replace core's compositions one by one."""

    def __init__(self, deployment: Deployment) -> None:
        self.device = deployment.device
        self.ops: Mapping[str, Callable[..., object]] = {
            "topk": topk,
            "kv_write": kv_write,
            "gather_kv": gather_kv,
            "sparse_mla": sparse_mla,
        }
        self.layouts: Mapping[str, KVLayout] = {COLUMNS: columns()}
        self.executor = Eager()
        self.collectives = None  # core's own
        self.failed: Fault | None = None

    def providers(
        self, stage: str, layer: LayerSpec | None, shape: StepShape | VisionShape
    ) -> Sequence[Candidate]:
        return ()  # no stage of our own

    def prepare_weights(
        self,
        weights: Mapping[str, Tensor | Weight],
        layer: LayerSpec | None,
        part: ModelPart = "decoder",
    ) -> Mapping[str, Tensor | Weight]:
        """As they are. A device would move them here, and lay them out for its kernels."""
        return weights

    def alloc_kv(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        layout.check_block_size(block_size)
        shapes = [(part.shape(blocks, block_size), part.dtype) for part in layout.parts]
        try:
            parts = tuple(torch.zeros(shape, dtype=getattr(torch, name)) for shape, name in shapes)
        except RuntimeError as error:
            raise MemoryError(f"no memory for {blocks} pages of {layout.id}: {error}") from error
        return KVCache(layout, block_size, parts)

    def fault(self) -> Fault | None:
        """What the driver has told of; asked for on every step, so it doesn't wait."""
        return self.failed

    def close(self) -> None:
        return None
