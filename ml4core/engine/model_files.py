"""The parts of a model as its files have them, which every rank opens for itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ml4core.api import Capabilities, Deployment, Device, ModelSpec
from ml4core.engine import resolve as resolving
from ml4core.engine import switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.collectives import shard_of
from ml4core.engine.image_limits import FLAG as IMAGES_FLAG
from ml4core.engine.image_limits import image_limit
from ml4core.engine.speculative_config import FLAG
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark import with_drafter
from ml4core.models.dspark_weights import load_draft, validate_draft
from ml4core.models.errors import CheckpointError
from ml4core.models.hub import resolve_model
from ml4core.models.pixtral import vision_spec
from ml4core.models.pixtral_weights import load_vision, validate_vision
from ml4core.models.requant import formats_after, nbytes_after
from ml4core.models.shard_check import check_shard
from ml4core.models.tensors import TensorReport, load_model_spec, validate
from ml4core.models.weight_reader import Progress
from ml4core.models.weights import load_layers

if TYPE_CHECKING:
    from ml4core.engine.runner import ModelRunner


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint whose tensors were compared with its table.

    Attributes:
        spec: with the drafter and the encoder of images, where flags ask for them.
        tensors: the decoder's; ``drafter`` and ``vision``: of those parts, None without.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    tensors: TensorReport
    drafter: TensorReport | None = None
    vision: TensorReport | None = None

    @classmethod
    def open(cls, args: EngineArgs) -> ModelFiles:
        """Those of ``args.model``. Raises ``CheckpointError``."""
        checkpoint = Checkpoint.open(resolve_model(args.model, args.revision, args.download_dir))
        spec = load_model_spec(checkpoint)
        found = cls(checkpoint, spec, validate(checkpoint, spec))
        if args.speculative_config:
            found = _with_drafter(found)
        if image_limit(args.limit_mm_per_prompt):
            found = _with_vision(found)
        return found

    def deployment(
        self, args: EngineArgs, device: Device, capabilities: Capabilities
    ) -> Deployment:
        """What the flags ask for there. Raises ``RequestError`` for a value that can't be."""
        formats, nbytes = self.tensors.formats, self.tensors.nbytes
        if switches.requant(args.additional_config) is not None:
            formats, nbytes = formats_after(self.tensors), nbytes_after(self.tensors)
        if self.drafter is not None:
            formats |= self.drafter.formats
        beside = [part.nbytes for part in (self.drafter, self.vision) if part is not None]
        return resolving.resolve(
            args, self.spec, formats, nbytes + sum(beside), device, capabilities
        )

    def local(self, args: EngineArgs) -> EngineArgs:
        """``args`` with these files by their folder."""
        return replace(args, model=str(self.checkpoint.path), revision=None)

    def check_cut(self, deployment: Deployment) -> None:
        """Raises ``CheckpointError`` if ranks can't share the matrices."""
        requant = switches.requant(deployment.additional_config) is not None
        shard = shard_of(deployment, 0)
        check_shard(f"{self.checkpoint.path}", self.spec, self.tensors, shard, requant)

    def load(
        self,
        runner: ModelRunner,
        deployment: Deployment,
        progress: Progress | None = None,
        images: bool = True,
    ) -> None:
        """What the runner's rank has of the weights, one layer after the other; ``images``: with
        the encoder of images, if there is one.
        """
        dtype = getattr(torch, deployment.dtype)
        device = deployment.device.torch_device
        runner.load(
            load_layers(
                self.checkpoint,
                self.spec,
                dtype,
                progress=progress,
                report=self.tensors,
                shard=runner.shard,
                requant=switches.requant(deployment.additional_config, device),
            )
        )
        if self.drafter is not None and self.spec.draft is not None:
            runner.load_draft(
                load_draft(self.checkpoint, self.spec.draft, dtype, report=self.drafter)
            )
        if images and self.vision is not None and self.spec.vision is not None:
            runner.load_vision(
                load_vision(self.checkpoint, self.spec.vision, dtype, report=self.vision)
            )


def _with_drafter(found: ModelFiles) -> ModelFiles:
    try:
        spec = with_drafter(found.checkpoint, found.spec)
        assert spec.draft is not None
        return replace(found, spec=spec, drafter=validate_draft(found.checkpoint, spec.draft))
    except CheckpointError as error:
        raise CheckpointError(f"{FLAG}: {error}") from error


def _with_vision(found: ModelFiles) -> ModelFiles:
    spec = found.spec
    vision = vision_spec(spec.extras, spec.hidden_size)
    if vision is None:
        raise CheckpointError(f"{IMAGES_FLAG}: {found.checkpoint.path} has no encoder of images")
    report = validate_vision(found.checkpoint, vision)
    return replace(found, spec=replace(spec, vision=vision), vision=report)
