"""A session on an NVIDIA GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ml4core.api import Candidate, Deployment, LayerSpec, StepShape, VisionShape
from ml4core_cuda.ffn_stage import wanted_act
from ml4core_cuda.latency import WORD, wanted
from ml4core_cuda.ops import load_ops
from ml4core_cuda.providers import PEERS
from ml4core_cuda.stages import KERNELS, candidates
from ml4core_cuda.tuned import told
from ml4core_triton.session import GpuSession


class CudaSession(GpuSession):
    """Opened for one deployment."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment, load_ops(wanted_act(deployment), deployment.device.name))

    def providers(
        self, stage: str, layer: LayerSpec | None, shape: StepShape | VisionShape
    ) -> Sequence[Candidate]:
        if not isinstance(shape, StepShape):
            return ()
        return candidates(stage, layer, shape, self._deployment)

    @property
    def switches(self) -> Mapping[str, str]:
        """What is in force here, for the start-up report."""
        told_of = [name for names in KERNELS.values() for name in names]
        found = {"decode_backend": WORD if wanted(self._deployment) else "standard"}
        if self._torch_device.type == "cuda":
            told_now = told(self.device.name, told_of) or (f"measured on {self.device.name}",)
            found["sizes"] = "; ".join(told_now)
        if self.step_buckets is not None:
            sizes = len(self.step_buckets.decode) * len(self.step_buckets.pages)
            found["graphs"] = f"of up to {sizes} decode sizes, captured at the start"
        return found

    @property
    def clock(self) -> Callable[[Sequence[Callable[[], object]], int], Sequence[float]] | None:
        """Times calls as a step runs them, in a graph; seconds of one call, for each repeat. None
        in the interpreter.
        """
        if self._torch_device.type != "cuda":
            return None
        from ml4core_cuda.measure.timing import Timer

        timer = Timer(str(self._torch_device))
        return lambda calls, repeats: [us * 1e-6 for us in timer.spans(calls, repeats)]

    @property
    def peers(self) -> Mapping[str, Mapping[str, Callable[..., object]]]:
        """By op, by name, the same work by the libraries that are here, to be timed beside ours."""
        from ml4core_cuda.kernels import deep_gemm, flash_mla, flashinfer

        served: dict[str, tuple[str, Callable[..., object]]] = {
            "FlashMLA": ("sparse_mla", flash_mla.sparse_mla),
            "FlashInfer": ("topk", flashinfer.top_k),
            "DeepGEMM": ("gemm", deep_gemm.product),
        }
        found: dict[str, dict[str, Callable[..., object]]] = {}
        for peer in PEERS:
            if self._torch_device.type == "cuda" and not peer.absent():
                op, call = served[peer.name]
                found.setdefault(op, {})[peer.name] = call
        return found
