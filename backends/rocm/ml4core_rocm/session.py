"""A session on an AMD GPU, in Triton's interpreter, or of torch on the host in a GPU's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import environ

from torch import Tensor

from ml4core.api import (
    Candidate,
    Deployment,
    LayerSpec,
    ModelPart,
    StepShape,
    VisionShape,
    Weight,
)
from ml4core_rocm import environment, switches
from ml4core_rocm.aiter_ops import arranged, with_aiter
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.collectives import GroupCollectives, joined
from ml4core_rocm.ops import load_ops
from ml4core_rocm.providers import expert_mode
from ml4core_rocm.stages import Stages
from ml4core_triton.session import GpuSession

ACTS = ("fp8_block", "fp8_tensor", "mxfp4")
"""Formats in which a deployment may want the inputs of products with quantised weights."""


class RocmSession(GpuSession):
    """Opened for one deployment."""

    def __init__(self, deployment: Deployment) -> None:
        act = next((act for act in ACTS if f"act:{act}" in deployment.needs), None)
        found, _ = switches.read(deployment, capabilities(deployment.device), environ)
        names = environment.told(environ, found.use_aiter)
        environment.warn(names)
        fake = deployment.device.kind == "fake"
        acts = (act, found.kernel_act, found.sparse_mla_precision)
        ours = {} if fake else load_ops(*acts)
        ops, told = with_aiter(ours, deployment, found)
        super().__init__(deployment, ops)
        self._stages = Stages(deployment, ops=ops)
        served = ops.get("moe_experts") is not ours.get("moe_experts")
        self._expert_mode = expert_mode(deployment, found) if served else ""
        self._group: GroupCollectives | None = None
        self._restore = _stated(self._of_environment(found))
        try:
            self._group, summed = joined(deployment, found, self._torch_device)
        except BaseException:
            self._restore()
            raise
        self.collectives = self._group
        self.switches: Mapping[str, str] = {**found.told, **names, **told, **summed}

    def providers(
        self, stage: str, layer: LayerSpec | None, shape: StepShape | VisionShape
    ) -> Sequence[Candidate]:
        if not isinstance(shape, StepShape):
            return ()
        return self._stages.candidates(stage, layer, shape)

    def prepare_weights(
        self,
        weights: Mapping[str, Tensor | Weight],
        layer: LayerSpec | None,
        part: ModelPart = "decoder",
    ) -> Mapping[str, Tensor | Weight]:
        """With experts in the order that AITER reads them in, where it serves them."""
        ready = super().prepare_weights(weights, layer, part)
        return arranged(ready, self._expert_mode) if self._expert_mode else ready

    def _of_environment(self, found: switches.Switches) -> Mapping[str, str]:
        """What AITER takes from the environment alone, for as long as the session is open."""
        stated: dict[str, str] = {}
        if found.use_aiter and self._deployment.tensor_parallel_size > 1:
            stated[switches.VARIABLES[switches.AR_SIZE]] = str(found.custom_ar_max_size)
        if self._expert_mode == "a8w4":
            stated[switches.MOE_BOUND] = "0"
        return stated

    def close(self) -> None:
        try:
            super().close()
            if self._group is not None:
                self._group.close()
        finally:
            self._restore()


def _stated(variables: Mapping[str, str]) -> Callable[[], None]:
    """Puts ``variables`` into the environment. What is returned puts back what stood there; twice
    is once.
    """
    before = {name: environ.get(name) for name in variables}
    environ.update(variables)

    def restore() -> None:
        while before:
            name, value = before.popitem()
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value

    return restore
