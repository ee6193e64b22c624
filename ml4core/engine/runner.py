"""Runs steps: weights, caches and the forward bound to a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ml4core.api import (
    DRAFT_GROUP,
    Capabilities,
    Collectives,
    Deployment,
    DeviceMemory,
    DraftOutput,
    DraftPlan,
    DraftStep,
    DraftWeights,
    Fault,
    FaultError,
    KVCache,
    LayerSpec,
    ModelPart,
    Segment,
    Session,
    StepOutput,
    StepPlan,
    StepShape,
    Verifier,
    VisionShape,
    VisionWeights,
    Weight,
)
from ml4core.compose.bind import (
    BoundModel,
    Choice,
    bind_global_stage,
    bind_model,
    bind_ops,
)
from ml4core.compose.context import StageContext
from ml4core.engine.collectives import SingleRank, ranks_of, shard_of
from ml4core.engine.kv_pool import Pools, allocate
from ml4core.engine.programs import Programs
from ml4core.engine.transfers import upload
from ml4core.models.mistral_large4 import KVState, ModelWeights, forward
from ml4core.models.pixtral_images import ImageBatch
from ml4core.models.shards import Shard, shard_spec

LayerStream = Iterable[tuple[LayerSpec | None, Mapping[str, torch.Tensor | Weight]]]


class ModelRunner:
    """One rank's model. ``step`` runs a plan; after a fault it refuses for good.

    Attributes:
        collectives: those of the session, else those that were given.
        shard: what of the weights this rank has: ``load`` takes what ``load_layers`` gives for it.
        spec: the table as this rank sees it.
        device, dtype: of steps and their activations.
    """

    def __init__(
        self,
        session: Session,
        backend: str,
        deployment: Deployment,
        capabilities: Capabilities,
        *,
        collectives: Collectives | None = None,
        replicas: Collectives | None = None,
    ) -> None:
        """``collectives``: of the replica's ranks, for a session that brings none; may be None
        where there is one. ``replicas``: of those of this rank in all replicas; None where there is
        one, or a session has its own. ``ValueError`` for those of another number of ranks.
        """
        ops, self._op_choices = bind_ops(session, capabilities, backend)
        self.session = session
        self.memory: DeviceMemory | None = getattr(session, "memory", None)
        self.backend = backend
        self.collectives = session.collectives or collectives or SingleRank()
        ranks, size = self.collectives.world_size, ranks_of(deployment)
        if ranks != size:
            raise ValueError(
                f"--tensor-parallel-size {size}, and the runner's collectives are of {ranks}; "
                f"works: collectives of {size} ranks"
            )
        self.shard: Shard = shard_of(deployment, self.collectives.rank)
        self.spec = shard_spec(deployment.model, self.shard)
        self.device = deployment.device.torch_device
        self.dtype: torch.dtype = getattr(torch, deployment.dtype)
        self.vocab_size = deployment.model.vocab_size
        self.ops = ops
        self._context = StageContext(
            model=self.spec,
            layer=None,
            ops=ops,
            collectives=self.collectives,
            dtype=self.dtype,
            mla_form=str(deployment.attention_config.get("mla_form", "auto")),
            replicas=replicas or SingleRank(),
        )
        captured = getattr(session.executor, "captures_shape", lambda shape: False)
        self._bound: Programs[StepShape, tuple[BoundModel, Callable[..., StepOutput]]]
        self._bound = Programs(captured)
        self._drafts: Programs[StepShape, Callable[..., StepOutput]] = Programs(captured)
        self._stages: Programs[
            tuple[str, StepShape | VisionShape], tuple[Callable[..., Any], Choice]
        ] = Programs()
        self._steps = 0
        self._fault: Fault | None = None
        self.weights: ModelWeights | None = None
        self.kv: KVState | None = None
        self.draft_weights: DraftWeights | None = None
        self.vision_weights: VisionWeights | None = None
        self.draft_kv: tuple[KVCache, ...] = ()

    def load(self, layers: LayerStream) -> None:
        """Lays out the decoder's weights, one layer at a time."""
        self.weights = ModelWeights(*self._laid_out(layers, len(self.spec.layers), "decoder"))

    def load_draft(self, layers: LayerStream) -> None:
        """Lays out the drafter's weights, after the decoder's, whose embedding and output it
        shares.
        """
        if self.weights is None or self.spec.draft is None:
            raise RuntimeError("a drafter's weights come after its model's, which says what it is")
        top, done = self._laid_out(layers, len(self.spec.draft.layers), "draft")
        shared = {name: self.weights.top[name] for name in ("embedding", "output")}
        self.draft_weights = DraftWeights({**top, **shared}, done)

    def load_vision(
        self, layers: Iterable[tuple[int | None, Mapping[str, torch.Tensor | Weight]]]
    ) -> None:
        """Lays out the weights of the encoder of images."""
        top: Mapping[str, Any] = {}
        done: list[Mapping[str, Any]] = []
        for layer, weights in layers:
            prepared = self.session.prepare_weights(weights, None, "vision")
            del weights
            if layer is None:
                top = prepared
            else:
                done.append(prepared)
        self.vision_weights = VisionWeights(top, tuple(done))

    def _laid_out(
        self, layers: LayerStream, count: int, part: ModelPart
    ) -> tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...]]:
        top: Mapping[str, Any] = {}
        done: list[Mapping[str, Any]] = []
        for spec, weights in layers:
            prepared = self.session.prepare_weights(weights, spec, part)
            del weights  # else one layer's source stays alive while the next is read
            if spec is None:
                top = prepared
            else:
                done.append(prepared)
        if not top or len(done) != count:
            raise ValueError(f"the {part} has {count} layers, {len(done)} were loaded")
        return top, tuple(done)

    def allocate_kv(self, plan: Pools) -> None:
        """Allocates the caches; ``self.pools`` then hands out their pages. Those that were there
        before are given back first.
        """
        self.free_kv()
        caches, self.pools = allocate(self.session, plan)
        self.kv = KVState(caches["latent"], caches.get("index", {}))
        self.draft_kv = tuple(caches.get(DRAFT_GROUP, {}).values())
        self.block_size = plan.block_size

    def free_kv(self) -> None:
        """Gives the caches back, and the programs that were made for them."""
        self._bound.clear()
        self._drafts.clear()
        self.kv, self.draft_kv = None, ()

    def choices(self, shape: StepShape) -> tuple[Choice, ...]:
        """Who serves which part at this shape: the start-up report."""
        return (*self._bind(shape)[0].choices, *self._op_choices)

    def encode_images(self, batch: ImageBatch) -> torch.Tensor:
        """Embeddings [cells, H] of images, one behind the other."""
        if self.vision_weights is None:
            raise RuntimeError("load_vision() comes before encode_images()")
        call = self.stage("vision_encoder", VisionShape(len(batch.patches)))[0]
        arrays = [one.numpy() for one in (batch.patches, batch.positions, batch.image_ids)]
        sent = upload(arrays, torch.device(self.device))
        with torch.inference_mode():
            found: torch.Tensor = call(self.vision_weights, *sent)
        return found[: sum(batch.counts)]

    def stage(self, name: str, shape: StepShape | VisionShape) -> tuple[Callable[..., Any], Choice]:
        """A stage of the whole model, bound for a shape; and who serves it."""
        return self._stages.get(
            (name, shape), lambda: bind_global_stage(name, self.session, self._context, shape)
        )

    def judge(self, shape: StepShape) -> Verifier:
        """What judges the verify windows of a step of this shape."""
        return self.stage("verify_and_sample", shape)[0]

    def draft(self, plan: DraftPlan, taps: tuple[torch.Tensor, ...]) -> DraftOutput:
        """Queues a drafting step, whose output lives as long as that of ``launch``: until the next
        of either.
        """
        if self.draft_weights is None or not self.draft_kv:
            raise RuntimeError("load_draft() and allocate_kv() with a draft group come before")
        shape = draft_shape(plan)
        program = self._drafts.get(shape, lambda: self._draft_program(shape))
        output = program(self.draft_weights, DraftStep(shape, plan, taps), self.draft_kv)
        return DraftOutput(output.taps[0], output.logits)

    def _draft_program(self, shape: StepShape) -> Callable[..., StepOutput]:
        block = self.stage("draft_block", shape)[0]

        def step(weights: DraftWeights, given: DraftStep, kv: Sequence[KVCache]) -> StepOutput:
            made: DraftOutput = block(weights, given.plan, kv, given.taps)
            no_fault = torch.zeros((), dtype=torch.bool, device=made.ids.device)
            return StepOutput(made.logits, (made.ids,), no_fault)

        return self.session.executor.compile(step, shape)

    def _bind(self, shape: StepShape) -> tuple[BoundModel, Callable[..., StepOutput]]:
        return self._bound.get(shape, lambda: self._program(shape))

    def _program(self, shape: StepShape) -> tuple[BoundModel, Callable[..., StepOutput]]:
        bound = bind_model(self.session, self._context, shape)

        def step(weights: ModelWeights, plan: StepPlan, kv: KVState) -> StepOutput:
            return forward(bound, weights, plan, kv)

        return bound, self.session.executor.compile(step, shape)

    def step(self, plan: StepPlan) -> StepOutput:
        """Runs the plan. Raises ``FaultError``; then no result of this step leaves and no later
        step runs.
        """
        output = self.launch(plan)
        self.check(output.fault)
        return output

    def launch(self, plan: StepPlan) -> StepOutput:
        """Queues the plan on the device. Nothing of the output may leave before ``check``."""
        if self._fault is not None:
            raise FaultError(self._fault)
        if self.weights is None or self.kv is None:
            raise RuntimeError("load() and allocate_kv() come before step()")
        self._steps += 1
        with torch.inference_mode():
            return self._bind(plan.shape)[1](self.weights, plan, self.kv)

    def check(self, failed: torch.Tensor) -> None:
        """Raises ``FaultError`` if a step that was launched has failed, or one since: ``failed`` is
        its output's fault, which is waited for.
        """
        fault = self._fault or self.session.fault()
        if fault is None and bool(failed):
            fault = Fault(
                "nan", "a NaN reached the index scores or the logits of a request", self._steps
            )
        if fault is not None:
            self._fault = self._fault or replace(fault, step=self._steps)
            raise FaultError(self._fault)


def draft_shape(plan: DraftPlan) -> StepShape:
    """Blocks as verify windows, and context rows as a chunk of one request."""
    none, (requests, depth) = Segment(0, 0, 0), plan.slots.shape
    rows = plan.context_slots.shape[0]
    return StepShape(
        none,
        Segment(requests, requests * depth, depth) if requests else none,
        Segment(1, rows, rows) if rows else none,
        ((DRAFT_GROUP, plan.block_table.shape[1]),),
        requests * depth,
    )
