"""Speculation: the drafter's dimensions, what it is given and gives, and the two protocols.

Letters in shapes, beyond those of ``ml4core.api.model``: ``C`` context rows, ``R`` requests, ``B``
pages a request, ``M`` taps, ``Z`` Markov rank, ``Q`` rows a request that are verified. ``depth`` is
the count of drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ml4core.api.model import LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ml4core.api.layouts import KVCache
    from ml4core.api.step import StepShape

WindowMode = Literal["row", "block"]
AnchorVector = Literal["none", "add", "replace"]

DRAFT_GROUP = "draft"
"""Name of the KV group that holds the drafter's rows."""

DRAFT_SALT = 1 << 30
"""Draft i of a block draws with the anchor's position plus (i + 1) times this: drafts share no
noise with their verification, nor with drafts of another block, which may stand at the same place.
"""


@dataclass(frozen=True)
class DraftSpec:
    """A block drafter: an anchor token and learned vectors go through a few layers side by side,
    then a sequential head draws one draft after the other.

    Attributes:
        hidden_size: that of the target, as is ``vocab_size``: embedding and output are shared.
        norm_eps: of the norm of the context states.
        layers: latent attention over every key; each owns its rows. ``index`` counts from 0.
        taps: layers of the target whose summed residuals make the context, in joining order.
        depth: rows of a block, each of which gives a draft.
        mask_rows: rows of the table of learned vectors.
        anchor_vector: ``none``: that table begins with the block's second row. Else its first row
            is the anchor's, and it is added to the anchor's embedding or replaces it.
        window: keys of the window; None for no limit.
        window_mode: which keys the row at position q of a block from position P on sees. ``row``:
            those j with |q - j| < window. ``block``: the block and the ``window`` keys before P.
        head: the sequential head; ``rnn`` is a gated recurrence.
        markov_rank: width of its state.
        normed_head_input: whether the head is given the normed state, as the output matrix is, or
            the residual.
        assumptions: each unpublished choice in force, and where it came from.
    """

    hidden_size: int
    vocab_size: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    taps: tuple[int, ...]
    depth: int = 3
    mask_rows: int = 2
    anchor_vector: AnchorVector = "none"
    window: int | None = 2048
    window_mode: WindowMode = "row"
    head: Literal["rnn"] = "rnn"
    markov_rank: int = 512
    normed_head_input: bool = True
    assumptions: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raises ``ValueError`` naming the field, the value and what would work."""
        for name in ("layers", "taps"):
            if not getattr(self, name):
                raise ValueError(f"{name} of the drafter is empty; it needs at least one")
        for name in ("depth", "markov_rank", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of the drafter is {value}; it must be 1 or more")
        for name, known in _WORDS.items():
            if (word := getattr(self, name)) not in known:
                raise ValueError(f"{name} of the drafter is {word!r}; known: {', '.join(known)}")
        need = self.depth - (self.anchor_vector == "none")
        if self.mask_rows < need:
            raise ValueError(
                f"mask_rows of the drafter is {self.mask_rows}; a depth of {self.depth} with "
                f"anchor_vector {self.anchor_vector!r} needs {need} or more"
            )
        for index, layer in enumerate(self.layers):
            self._check_layer(index, layer)

    def _check_layer(self, index: int, layer: LayerSpec) -> None:
        found = (layer.index, layer.kv_source, layer.topk_source)
        if found != (wanted := (index, index, None)):
            raise ValueError(
                f"draft layer {index} has index, kv_source and topk_source {found}; it must own "
                f"its rows and see every key: {wanted}"
            )
        if layer.hidden_size != self.hidden_size:
            raise ValueError(
                f"draft layer {index} has hidden_size {layer.hidden_size}; the drafter's is "
                f"{self.hidden_size}"
            )
        row, first = ((one.kv_lora_rank, one.rope_dim) for one in (layer, self.layers[0]))
        if row != first:
            raise ValueError(
                f"draft layer {index} has rows of {row[0]} + {row[1]} values; all draft layers "
                f"have one layout, and layer 0 has {first[0]} + {first[1]}"
            )


_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "anchor_vector": ("none", "add", "replace"),
        "window_mode": ("row", "block"),
        "head": ("rnn",),
    }
)

DRAFT_WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "tensor [vocab, H]: the target's",
        "output": "Weight [vocab, H]: the target's",
        "fc": "Weight [H, M H]: the joined taps to a context state",
        "context_norm": "tensor [H]",
        "mask_embeddings": "tensor [mask_rows, H]. With mask_rows",
        "norm": "tensor [H]",
        "markov_w1": "tensor [vocab, Z]: embeds the token before",
        "markov_joint": "Weight [3 Z, 2 Z + H]: rows of gate, candidate, output; columns of the "
        "state, that embedding, the hidden state",
        "markov_joint_bias": "tensor [3 Z]",
        "markov_w2": "Weight [vocab, Z]",
    }
)
"""Names of the drafter's weights outside of its layers, as a backend receives them. Its layers have
the names of ``LAYER_WEIGHTS``. Norms keep the checkpoint's dtype.
"""


class DraftWeights(NamedTuple):
    """Weights as the session laid them out: ``DRAFT_WEIGHTS`` by name, and ``LAYER_WEIGHTS`` of
    each draft layer.
    """

    top: Mapping[str, Any]
    layers: tuple[Mapping[str, Any], ...]


class Sampling(NamedTuple):
    """How each request draws. A padded request has any finite values."""

    temperature: Tensor
    """[R] fp32; 0: the largest logit."""
    seeds: Tensor
    """[R] int64."""
    positions: Tensor
    """[R] int64, the position of the request's first row."""


class DraftPlan(NamedTuple):
    """The input of a drafting step: context rows to store, and requests to draft for.

    ``C`` or ``R`` may be 0. The anchor is the token that was emitted last; it stands at position P,
    and the target has not seen it yet. Context rows are those of accepted tokens, all below their
    request's P; a rejected or padded row has slot -1. A padded request, or one that doesn't draft,
    has slots -1 and page 0 only; its drafts are finite and unused. No slot but -1 appears twice.
    """

    context_positions: Tensor
    """[C] int64, global."""
    context_slots: Tensor
    """[C] int64; -1 writes nothing."""
    anchors: Tensor
    """[R] int64 token ids."""
    slots: Tensor
    """[R, depth] int64, of positions P to P + depth - 1; none of a request's is -1, or all are."""
    block_table: Tensor
    """[R, B] int32 pages of the draft group. Those wholly below the window may be page 0."""
    sampling: Sampling
    """``positions`` are the P. With temperature 0 drafts are greedy."""


@dataclass(frozen=True)
class DraftStep:
    """What an executor is given for a ``draft_block``: a plan, and the taps that its context states
    are made of. A step with it returns a ``StepOutput`` of the drafts' logits, their ids as the one
    tap, and no fault.

    ``shape``: blocks as verify windows, context rows as one request's chunk.
    """

    shape: StepShape
    plan: DraftPlan
    taps: tuple[Tensor, ...]

    def tensors(self) -> dict[str, Tensor]:
        """As those of a ``StepPlan``, with names of their own."""
        plain = self.plan._asdict()
        sampling: Sampling = plain.pop("sampling")
        found = {f"draft.{name}": one for name, one in plain.items()}
        found |= {f"draft.sampling.{name}": one for name, one in sampling._asdict().items()}
        return found | {f"draft.taps.{i}": tap for i, tap in enumerate(self.taps)}

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> DraftStep:
        """The step of the same shape with these in place of its own; those that are not named
        stay. Raises ``ValueError`` for other names.
        """
        own = self.tensors()
        if unknown := sorted(tensors.keys() - own.keys()):
            raise ValueError(f"{unknown} are no tensors of a drafting step; it has {list(own)}")
        found = own | dict(tensors)
        sampling = Sampling(*(found[f"draft.sampling.{name}"] for name in Sampling._fields))
        plain = {n: found[f"draft.{n}"] for n in DraftPlan._fields if n != "sampling"}
        taps = tuple(found[f"draft.taps.{i}"] for i in range(len(self.taps)))
        return DraftStep(self.shape, DraftPlan(**plain, sampling=sampling), taps)


class DraftOutput(NamedTuple):
    """The drafts, and what they were drawn from."""

    ids: Tensor
    """[R, depth] int64; draft i is for position P + 1 + i."""
    logits: Tensor
    """[R, depth, vocab] fp32, before the temperature."""


class Verified(NamedTuple):
    """What a verification emits."""

    ids: Tensor
    """[R, Q] int64, -1 behind the emitted tokens."""
    counts: Tensor
    """[R] int64, 1 to Q: the accepted drafts and one token more."""


class Drafter(Protocol):
    """The parts of a ``draft_block``. ``store_context`` and ``backbone`` write rows into ``kv``, a
    latent cache for each draft layer; all else is pure.
    """

    @property
    def spec(self) -> DraftSpec: ...

    def combine(self, weights: DraftWeights, taps: Sequence[Tensor]) -> Tensor:
        """Context states [C, H] of ``M`` taps [C, H]."""
        ...

    def store_context(
        self, weights: DraftWeights, plan: DraftPlan, kv: Sequence[KVCache], states: Tensor
    ) -> None:
        """Writes the rows that each layer makes of context states [C, H]."""
        ...

    def block_inputs(self, weights: DraftWeights, anchors: Tensor) -> Tensor:
        """The first layer's input [R, depth, H] of anchors [R]."""
        ...

    def backbone(
        self, weights: DraftWeights, plan: DraftPlan, kv: Sequence[KVCache], inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The residual after the last layer, and its norm, each [R, depth, H]."""
        ...

    def base_logits(self, weights: DraftWeights, hidden: Tensor) -> Tensor:
        """Logits fp32 [R, depth, vocab] of normed states [R, depth, H], before the head's share."""
        ...

    def head_init(self, states: Tensor) -> Tensor:
        """The head's state fp32 [R, Z] before a block of states [R, depth, H]."""
        ...

    def head_step(
        self, weights: DraftWeights, previous: Tensor, states: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The head's share fp32 [R, vocab] of the logits after tokens ``previous`` [R] at states
        [R, H]; and its next state.
        """
        ...


class Verifier(Protocol):
    """Judges drafts and draws: the call of ``verify_and_sample``."""

    def __call__(
        self,
        logits: Tensor,
        sampling: Sampling,
        draft_ids: Tensor | None = None,
        draft_logits: Tensor | None = None,
        *,
        block: bool = False,
    ) -> Verified:
        """Emits tokens whose law is that of the target.

        Args:
            logits: [R Q, vocab], a request's rows together; masks, penalties and the like are in
                them, the temperature is not.
            draft_ids: [R, Q-1], -1 where there is no draft. None: Q is 1 and tokens are drawn.
            draft_logits: [R, Q-1, vocab] that the drafts were drawn from, before the same
                temperature. None: a draft counts as certain, which greedy drafts need.
            block: drafts are judged as a block, not one by one; only a backend that declares
                ``spec:block_verification`` is asked to. With P_0 = 1, P_i = min(P_(i-1) p_i(d_i) /
                q_i(d_i), 1), S_i the sum over x of max(P_i p_(i+1)(x) - q_(i+1)(x), 0) and h_i =
                S_i / (S_i + 1 - P_i), but P_i for the last draft: the longest i with u_i < h_i are
                kept. After the last draft the next token has the law of p, else that of the terms
                of S_i. The u are of this block alone: one after it shares none of them.
        """
        ...
