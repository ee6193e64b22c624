"""The block drafter as a composition of ops, and of the attention and feed-forward stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ml4core.api import (
    DRAFT_SALT,
    AttnInputs,
    Drafter,
    DraftOutput,
    DraftPlan,
    DraftSpec,
    DraftWeights,
    KVCache,
    LayerKV,
    LayerSpec,
    Segment,
    StepPlan,
    StepShape,
)
from ml4core.compose.attention import Children, attn_inputs, attn_output
from ml4core.compose.context import StageContext
from ml4core.compose.ffn import ffn
from ml4core.compose.single_rank import SingleRank
from ml4core.compose.vocabulary import embeddings, vocabulary_logits

_NO_ROWS = Segment(0, 0, 0)


def draft_block(ctx: StageContext, children: Children) -> Callable[..., DraftOutput]:
    drafter = BlockDrafter(ctx)

    def call(
        weights: DraftWeights, plan: DraftPlan, kv: Sequence[KVCache], taps: Sequence[Tensor]
    ) -> DraftOutput:
        drafter.check(plan, kv, taps)
        if plan.context_slots.shape[0]:
            drafter.store_context(weights, plan, kv, drafter.combine(weights, taps))
        return drafter.propose(weights, plan, kv)

    return call


class _Layer(NamedTuple):
    """A draft layer's parts. They are core's own: a provider chosen for the target's layers need
    not know the layout of the drafter's caches.
    """

    spec: LayerSpec
    inputs: Callable[..., AttnInputs]
    output: Callable[..., tuple[Tensor, Tensor]]
    ffn: Callable[..., tuple[Tensor, Tensor | None]]

    @classmethod
    def compose(cls, ctx: StageContext) -> _Layer:
        return cls(ctx.spec, attn_inputs(ctx, {}), attn_output(ctx, {}), ffn(ctx, {}))


class BlockDrafter(Drafter):
    """A ``Drafter`` of bound ops. Each rank runs all of it, but for the embedding and the output,
    of which it has the target's shares.
    """

    def __init__(self, ctx: StageContext) -> None:
        if ctx.model.draft is None:
            raise ValueError(
                f"model {ctx.model.name!r} has no drafter (ModelSpec.draft is None), so its stage "
                "can't be composed"
            )
        self._spec = ctx.model.draft
        self._ops = ctx.ops
        self._ranks = ctx.collectives
        self._dtype = ctx.dtype
        self._layers = tuple(
            _Layer.compose(
                replace(ctx, layer=layer, collectives=SingleRank(), replicas=SingleRank())
            )
            for layer in self._spec.layers
        )

    @property
    def spec(self) -> DraftSpec:
        return self._spec

    def check(self, plan: DraftPlan, kv: Sequence[KVCache], taps: Sequence[Tensor]) -> None:
        """Raises ``ValueError`` for shapes that don't fit the drafter or each other."""
        spec, context = self._spec, (plan.context_slots.shape[0], self._spec.hidden_size)
        if len(kv) != len(spec.layers):
            raise ValueError(f"{len(kv)} draft caches for {len(spec.layers)} draft layers")
        found = [tuple(tap.shape) for tap in taps]
        if found != [context] * len(spec.taps):
            raise ValueError(
                f"taps have shapes {found}; there must be {len(spec.taps)}, after the target's "
                f"layers {spec.taps}, each of shape {context}: a row for each of context_slots"
            )
        block = (plan.anchors.shape[0], spec.depth)
        if tuple(plan.slots.shape) != block:
            raise ValueError(f"slots has shape {tuple(plan.slots.shape)}; it must be {block}")

    def combine(self, weights: DraftWeights, taps: Sequence[Tensor]) -> Tensor:
        w = weights.top
        states = self._ops["gemm"](torch.cat(tuple(taps), dim=-1), w["fc"])
        normed: Tensor = self._ops["rms_norm"](states, w["context_norm"], self._spec.norm_eps)
        return normed

    def store_context(
        self, weights: DraftWeights, plan: DraftPlan, kv: Sequence[KVCache], states: Tensor
    ) -> None:
        ops = self._ops
        for layer, w, cache in zip(self._spec.layers, weights.layers, kv, strict=True):
            # No input norm: the context's own norm stands in for it.
            latent, k_pe = ops["gemm"](states, w["wkv_a"]).split(
                [layer.kv_lora_rank, layer.rope_dim], dim=-1
            )
            latent = ops["rms_norm"](latent, w["kv_a_norm"], layer.norm_eps)
            if layer.rope is not None:
                k_pe = ops["rope"](
                    k_pe.unsqueeze(1),
                    plan.context_positions,
                    w["inv_freq"],
                    layer.rope.interleaved,
                    1.0,
                ).squeeze(1)
            rope = k_pe if layer.rope_dim else None
            ops["kv_write"](cache, plan.context_slots, latent, rope)

    def propose(self, weights: DraftWeights, plan: DraftPlan, kv: Sequence[KVCache]) -> DraftOutput:
        """Drafts of each request, given that its context rows are stored."""
        spec, sampling = self._spec, plan.sampling
        requests = plan.anchors.shape[0]
        if requests == 0:
            empty = torch.empty(0, spec.depth, spec.vocab_size, device=plan.anchors.device)
            return DraftOutput(torch.empty_like(plan.slots), empty)
        residual, hidden = self.backbone(
            weights, plan, kv, self.block_inputs(weights, plan.anchors)
        )
        base = self.base_logits(weights, hidden)
        states = hidden if spec.normed_head_input else residual
        state = self.head_init(states)
        previous, ids, logits = plan.anchors, [], []
        for i in range(spec.depth):
            share, state = self.head_step(weights, previous, states[:, i], state)
            logits.append(base[:, i] + share)
            previous = self._ops["sample"](
                logits[-1],
                sampling.temperature,
                sampling.seeds,
                sampling.positions + DRAFT_SALT * (i + 1),
            )
            ids.append(previous)
        return DraftOutput(torch.stack(ids, dim=1), torch.stack(logits, dim=1))

    def block_inputs(self, weights: DraftWeights, anchors: Tensor) -> Tensor:
        spec, w = self._spec, weights.top
        own = spec.anchor_vector != "none"
        anchor = embeddings(self._ops, anchors, w["embedding"], self._ranks)
        rows = [anchor.to(self._dtype).unsqueeze(1)]
        if spec.mask_rows:
            masks = w["mask_embeddings"].to(rows[0].dtype).unsqueeze(0)
            masks = masks.expand(anchors.shape[0], -1, -1)
            if spec.anchor_vector == "add":
                rows[0] = rows[0] + masks[:, :1]
            elif spec.anchor_vector == "replace":
                rows[0] = masks[:, :1]
            rows.append(masks[:, own : own + spec.depth - 1])
        return torch.cat(rows, dim=1)

    def backbone(
        self, weights: DraftWeights, plan: DraftPlan, kv: Sequence[KVCache], inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        block = _as_step(plan)
        residual, hidden = inputs.flatten(0, 1), None
        next_norms = [w["attention_norm"] for w in weights.layers[1:]] + [weights.top["norm"]]
        for layer, w, cache, next_norm in zip(
            self._layers, weights.layers, kv, next_norms, strict=True
        ):
            q, _, _ = layer.inputs(w, block, LayerKV(cache, None), residual, hidden)
            out = self._attend(layer.spec, q, cache, plan, block)
            residual, hidden = layer.output(w, out, residual)
            residual, hidden = layer.ffn(w, residual, hidden, next_norm)
        assert hidden is not None  # the last layer was given a norm
        shape = inputs.shape[:2]
        return residual.unflatten(0, shape), hidden.unflatten(0, shape)

    def _attend(
        self, layer: LayerSpec, q: Tensor, cache: KVCache, plan: DraftPlan, block: StepPlan
    ) -> Tensor:
        """Each row over its window and the block: ``q`` [R depth, N, W] to [R depth, N, L]."""
        depth, window = self._spec.depth, self._spec.window
        ops, table, scale = self._ops, plan.block_table, layer.softmax_scale
        if window is None or self._spec.window_mode == "block":
            keys = None if window is None else window + depth
            out, _ = ops["window_mla"](
                q, cache, table, block.query_start, block.visible, depth, scale, keys
            )
            return out  # type: ignore[no-any-return]
        # Windows of one end and unlike beginnings: a call for each row of the block.
        rows = q.unflatten(0, (-1, depth)).transpose(0, 1).contiguous()
        start = torch.arange(rows.shape[1] + 1, dtype=torch.int32, device=q.device)
        ends = block.visible.unflatten(0, (-1, depth))[:, 0]
        outs = []
        for i in range(depth):
            last = min(depth, i + window)  # keys of the block that row i sees end here
            visible = (ends - (depth - last)).clamp(min=0)
            keys = window - 1 + last - i
            out, _ = ops["window_mla"](rows[i], cache, table, start, visible, 1, scale, keys)
            outs.append(out)
        return torch.stack(outs, dim=1).flatten(0, 1)

    def base_logits(self, weights: DraftWeights, hidden: Tensor) -> Tensor:
        output, vocab_size = weights.top["output"], self._spec.vocab_size
        rows = vocabulary_logits(self._ops, hidden.flatten(0, 1), output, vocab_size, self._ranks)
        return rows.unflatten(0, hidden.shape[:2])

    def head_init(self, states: Tensor) -> Tensor:
        shape = (states.shape[0], self._spec.markov_rank)
        return torch.zeros(shape, dtype=torch.float32, device=states.device)

    def head_step(
        self, weights: DraftWeights, previous: Tensor, states: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        ops, w = self._ops, weights.top
        token = ops["embed"](previous, w["markov_w1"]).to(torch.float32)
        joint = torch.cat((state, token, states.to(torch.float32)), dim=-1)
        joint = ops["gemm"](joint, w["markov_joint"]) + w["markov_joint_bias"].to(torch.float32)
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return ops["gemm"](torch.tanh(output), w["markov_w2"]), state


def _as_step(plan: DraftPlan) -> StepPlan:
    """The blocks as a step of verify windows, with the drafter's caches as its latent group.

    Every row sees the whole block.
    """
    requests, depth = plan.slots.shape
    device = plan.slots.device
    order = torch.arange(requests * depth, device=device)
    position = plan.sampling.positions.unsqueeze(-1) + torch.arange(depth, device=device)
    real = plan.slots[:, :1] >= 0
    ends = torch.where(real, position[:, -1:] + 1, 0).to(torch.int32)
    windows = Segment(requests, requests * depth, depth)
    pages = (("latent", plan.block_table.shape[1]),)
    return StepPlan(
        shape=StepShape(_NO_ROWS, windows, _NO_ROWS, pages, requests * depth),
        token_ids=plan.anchors.repeat_interleave(depth),
        positions=torch.where(real, position, 0).flatten(),
        row_request=order // depth,
        query_start=torch.arange(0, requests * depth + 1, depth, dtype=torch.int32, device=device),
        visible=ends.expand(-1, depth).flatten(),
        block_tables={"latent": plan.block_table},
        slots={"latent": plan.slots.flatten()},
        logits_indices=order,
    )
