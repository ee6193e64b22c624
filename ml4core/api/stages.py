"""The tree of stages: named compositions of ops that a backend may replace as a whole, and the
reasons of a choice.

A stage's callable is bound once for a layer kind and step shape; what varies is passed on each
call. ``residual`` is the summed stream; ``hidden`` is its norm for the block that comes next, or
None where that block has still to norm. A stage's meaning is its composition in
``ml4core.compose``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ml4core.api.refusal import Refusal

if TYPE_CHECKING:
    from torch import Tensor

    from ml4core.api.layouts import KVCache


@dataclass(frozen=True)
class StageSpec:
    """One stage: its parts, and its call in words.

    Attributes:
        children: the stages that its composition calls, in order.
        signature: arguments and results of the bound callable.
        per_layer: whether it is bound for each layer kind, or once for the model.
    """

    name: str
    signature: str
    doc: str
    children: tuple[str, ...] = ()
    per_layer: bool = True
    since: int = 1


_TABLE = (
    StageSpec(
        "decoder_layer",
        "(weights, plan, kv, residual [T,H], hidden [T,H] | None, selection | None, next_norm [H] "
        "| None)"
        " -> (residual, hidden | None, selection | None)",
        "One whole layer.",
        ("attention", "ffn"),
    ),
    StageSpec(
        "attention",
        "(weights, plan, kv, residual, hidden | None, selection | None) -> (residual, hidden, "
        "selection | None)",
        "From the layer's input to the norm before its feed-forward. Owners of an index replace "
        "the selection.",
        ("attn_inputs", "select", "sparse_mla", "attn_output"),
    ),
    StageSpec(
        "attn_inputs",
        "(weights, plan, kv, residual, hidden | None) -> AttnInputs",
        "Norm, projections, rope, SSMax, absorption of W_UK, and the writes to the latent and "
        "index caches.",
    ),
    StageSpec(
        "select",
        "(plan, kv, index_q [T,Hi,D], index_weights [T,Hi]) -> Selection",
        "Index logits, top-k and slots. Called on index owners only.",
    ),
    StageSpec(
        "sparse_mla",
        "(plan, kv, q [T,N,W], selection | None) -> (out [T,N,L], lse [T,N])",
        "Attention over the selection, or over every visible key on layers without an index.",
    ),
    StageSpec(
        "attn_output",
        "(weights, out [T,N,L], residual) -> (residual, hidden)",
        "W_UV, output projection, all-reduce, residual and the feed-forward's norm.",
    ),
    StageSpec(
        "ffn",
        "(weights, residual, hidden, next_norm [H] | None) -> (residual, hidden | None)",
        "Router, routed and shared experts (or the dense block), all-reduce, residual and, given "
        "its weight, the next norm. A row to which the router gives no weight, as it saw NaN, is "
        "NaN.",
    ),
    StageSpec(
        "verify_and_sample",
        "(logits [R Q,vocab], sampling: Sampling, draft_ids [R,Q-1] | None = None, draft_logits "
        "[R,Q-1,vocab] | None = None, *, block=False) -> Verified(ids [R,Q], counts [R])",
        "Draws a token a request, or judges its drafts and adds a token; ``Verifier`` has the "
        "arguments' meaning. Bound for the shape of the step that made the logits.",
        per_layer=False,
    ),
    StageSpec(
        "draft_block",
        "(weights: DraftWeights, plan: DraftPlan, kv: a KVCache each draft layer, taps: [C,H] each)"
        " -> DraftOutput(ids [R,depth], logits [R,depth,vocab])",
        "Stores the rows of accepted tokens in the drafter's caches, then runs its layers over a "
        "block a request and its sequential head. Without context rows (C 0) it stores none; "
        "without requests (R 0) it only stores. Rows of a block see each other, later ones too. "
        "Bound for a shape whose verify windows are the blocks and whose prefill rows, if any, are "
        "the context rows.",
        per_layer=False,
    ),
    StageSpec(
        "vision_encoder",
        "(weights: VisionWeights, patches [T,C p p], positions [T,2] int64, image_ids [T] int32)"
        " -> embeddings [T/(s s),H]",
        "Image patches to embeddings of the decoder's width; letters are those of "
        "``ml4core.api.vision``. Each s s consecutive patches are a cell, in raster order, and "
        "give one embedding. Patches of one image are consecutive, have one id, and see each "
        "other only. A position is (row, column) in its image's grid of patches. Padding is whole "
        "cells with id -1: it may hold anything and leaves no trace. Every rank runs all of it.",
        per_layer=False,
    ),
)

STAGES: Mapping[str, StageSpec] = MappingProxyType({spec.name: spec for spec in _TABLE})


class AttnInputs(NamedTuple):
    """Results of ``attn_inputs``. Index tensors are None on layers that own no indexer."""

    q: Tensor
    """[T, N, W] absorbed query (latent part, then rope part), scaled by SSMax, in the model's
    dtype.
    """
    index_q: Tensor | None
    """[T, Hi, D] fp32, not quantised."""
    index_weights: Tensor | None
    """[T, Hi] fp32, without the scale D^-0.5 Hi^-0.5."""


class Selection(NamedTuple):
    """What ``select`` found; sharers reuse all of it."""

    positions: Tensor
    """[T, K] int32, local to the request, unique, packed in front, -1 behind; ascending."""
    lens: Tensor
    """[T] int32, the number of valid entries."""
    slots: Tensor
    """[T, K] int32, the same entries through the latent group's table; -1 behind."""
    has_nan: Tensor
    """[T] bool: a visible score was NaN. Sets the fault word."""


class LayerKV(NamedTuple):
    """The caches that one layer sees. A consumer's ``latent`` is its owner's object."""

    latent: KVCache
    index_keys: KVCache | None


@dataclass(frozen=True)
class Accepted:
    """A provider that can serve. ``call`` has the stage's signature, with everything constant
    bound.
    """

    provider: str
    call: Callable[..., object]
    version: str = ""


@dataclass(frozen=True)
class Rejected:
    """A provider that can't serve, with each reason."""

    provider: str
    refusals: tuple[Refusal, ...]


Candidate: TypeAlias = Accepted | Rejected
