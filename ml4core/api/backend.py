"""What a backend is: a small object that a plugin offers, and the session that it opens.

Both are structural: a plugin subclasses nothing of core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ml4core.api.capabilities import Capabilities
from ml4core.api.collectives import Collectives
from ml4core.api.faults import Fault
from ml4core.api.layouts import KVCache, KVLayout
from ml4core.api.model import LayerSpec
from ml4core.api.refusal import Refusal
from ml4core.api.stages import Candidate
from ml4core.api.step import StepExecutor, StepShape
from ml4core.api.vision import VisionShape
from ml4core.api.weights import Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ml4core.api.deployment import Deployment

DeviceKind = Literal["real", "interpreted", "fake", "source"]
ModelPart = Literal["decoder", "draft", "vision"]


@dataclass(frozen=True)
class Device:
    """A device that a probe found.

    Attributes:
        kind: ``real``; or one that opens only when asked for: ``interpreted``, where kernels run in
            an interpreter on the host; ``fake``, where something else stands in their place; and
            ``source``, where their sources are compiled for another device than they are made for.
        name: for people, e.g. the product name.
        arch: the architecture word that kernels depend on, e.g. ``x86_64`` or ``sm_90``.
        torch_device: what ``torch.device`` takes.
        memory_bytes: total memory, 0 if unknown.
        details: versions and figures worth showing.
    """

    kind: DeviceKind
    name: str
    arch: str
    torch_device: str
    index: int = 0
    memory_bytes: int = 0
    details: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Probe:
    """The answer of a probe: the devices that can serve, and why others (or all) can't."""

    devices: tuple[Device, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class Backend(Protocol):
    """What ``ml4core_backends`` returns. Making one imports no vendor library and touches no
    device.

    It may have ``reference_device``, a ``Device``: what a deployment is judged for where it is only
    planned, and no device is found. It may have ``layouts_for(model: ModelSpec)``: its private
    layouts by id at the model's widths, as ``Session.layouts`` of a session will have them, so that
    they can be planned without one. It may have ``programs_for(deployment: Deployment)``: the sizes
    that a session will compile steps for, lists of int by what they count, for such a plan.
    """

    @property
    def name(self) -> str:
        """The flag's word; equal to the entry point's name."""
        ...

    @property
    def priority(self) -> int:
        """Order in which ``--backend auto`` tries, highest first; equal ones by name; the embedded
        cpu backend is last.
        """
        ...

    def probe(self) -> Probe:
        """Looks for devices. May import vendor libraries; allocates nothing. Runs in a child
        process with a time limit.
        """
        ...

    def capabilities(self, device: Device) -> Capabilities:
        """What it can do there. Pure."""
        ...

    def open(self, deployment: Deployment) -> Session:
        """Binds libraries and the device. Raises ``Refused`` with all reasons before it
        allocates.
        """
        ...


class Session(Protocol):
    """A backend opened for one deployment. Core loops over layers; a session serves their parts.

    It may have ``step_buckets``, a ``StepBuckets``: the sizes that it compiles steps for. Without,
    or with None, steps have the sizes that they have. It may have ``switches``, words by word: its
    own settings as they are in force, for the start-up report. It may have ``memory``, a
    ``DeviceMemory``: then steps are tried as the engine starts, caches are sized by what they leave
    of ``--gpu-memory-utilization``, and what has to be compiled or captured is so before the first
    request.
    """

    @property
    def device(self) -> Device: ...

    @property
    def ops(self) -> Mapping[str, Callable[..., object]]:
        """The backend's own ops by name, each with the contract of ``ml4core.api.OPS``."""
        ...

    @property
    def layouts(self) -> Mapping[str, KVLayout]:
        """Private layouts by id; empty for most."""
        ...

    @property
    def executor(self) -> StepExecutor: ...

    @property
    def collectives(self) -> Collectives | None:
        """None: core gives the default. A process that is one of several ranks has joined their
        group, torch.distributed's default one, before ``Backend.open``, which may make more.
        """
        ...

    def providers(
        self, stage: str, layer: LayerSpec | None, shape: StepShape | VisionShape
    ) -> Sequence[Candidate]:
        """Candidates for a stage, best first. Core binds the first accepted one, else the stage's
        composition. ``layer`` is None for stages of the whole model; the shape is a
        ``VisionShape`` for ``vision_encoder`` only.
        """
        ...

    def prepare_weights(
        self,
        weights: Mapping[str, Tensor | Weight],
        layer: LayerSpec | None,
        part: ModelPart = "decoder",
    ) -> Mapping[str, Tensor | Weight]:
        """Lays out one layer's weights on the device. Called once for each, in order, so that
        memory peaks at the model plus one layer. Arguments may be reused or dropped.

        Args:
            weights: by the names of ``LAYER_WEIGHTS``; with ``layer`` None those of
                ``GLOBAL_WEIGHTS``, ``DRAFT_WEIGHTS`` or ``VISION_WEIGHTS``, or of
                ``VISION_LAYER_WEIGHTS`` for each layer of the encoder in turn.
            layer: a layer of the decoder or of the drafter; the vision encoder's have no spec.
            part: what the weights belong to. Layers of decoder and drafter both count from 0.
        """
        ...

    def alloc_kv(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        """A cache of that many pages, with finite content. ``MemoryError`` if it doesn't fit."""
        ...

    def fault(self) -> Fault | None:
        """The sticky fault of the device, if one is known on the host. Doesn't wait for the
        device: it is asked for on every step.
        """
        ...

    def close(self) -> None:
        """Gives everything back. May be called twice."""
        ...
